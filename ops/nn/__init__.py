"""Modules that PyTorch lacks, on packed and on dense tensors alike."""

from .attention import Attention, RelativeBias, alibi, attention
from .rotary import RotaryEmbedding, rotary

__all__ = ["Attention", "RelativeBias", "RotaryEmbedding", "alibi", "attention", "rotary"]

"""A tensor type for samples of varying size, and packed operators on which PyTorch code runs.

>>> x = PackedTensor.from_list([torch.randn(3, 8), torch.randn(5, 8)], "n _")
>>> torch.nn.functional.gelu(x).mean(1).shape
torch.Size([2, 8])
"""

from . import compat, dispatch, nn, pattern, rules
from .attention import attention_backend
from .axis import Axis, Extent, Grid
from .compile import deliver, dynamic_shapes, mark_dynamic
from .dispatch import FallbackWarning, coverage, strict
from .means import per_sample_mean
from .pattern import Pattern, parse
from .sequences import from_packed_sequence, to_packed_sequence
from .tensor import PackedTensor, is_packed, map_tensors

dispatch.install_methods(PackedTensor)
compat.make_overridable(dispatch.TABLE)

#: Tells this package from another one that is called ``ops``.
__packload_ops__ = True

__all__ = [
    "Axis",
    "Extent",
    "FallbackWarning",
    "Grid",
    "PackedTensor",
    "Pattern",
    "attention_backend",
    "compat",
    "coverage",
    "deliver",
    "dynamic_shapes",
    "from_packed_sequence",
    "is_packed",
    "map_tensors",
    "mark_dynamic",
    "nn",
    "parse",
    "pattern",
    "per_sample_mean",
    "rules",
    "strict",
    "to_packed_sequence",
]

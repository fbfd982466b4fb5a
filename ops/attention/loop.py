"""The backend that does everything: one operator over samples; on the CPU the fused kernel of each."""

from __future__ import annotations

from torch import Tensor

from ..kernels.attention import attention
from .call import Call


def refuses(call: Call) -> str | None:
    """Never."""
    return None


def run(call: Call) -> Tensor:
    """[Tq, H, Dv]."""
    tensors = (call.query, call.key, call.value, call.bias)
    return attention(*tensors, call.q.lengths, call.k.lengths, *call.options)[0]

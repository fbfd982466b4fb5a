"""``torch.nn.attention.varlen``: PyTorch's own packed attention, of half precision on a CUDA device.

Causal is a window without keys to the right. Grouped heads came with an argument in 2.13.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from torch.nn.attention import varlen

from .call import Call
from .flash import refuses_packed

_GROUPS = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters


def refuses(call: Call) -> str | None:
    """Why it cannot do this, or None."""
    if call.dropout:
        return "it has no dropout"
    if call.query.shape[1] != call.key.shape[1] and not _GROUPS:
        return "it takes grouped heads from torch 2.13 on"
    return refuses_packed(call)


def run(call: Call) -> Tensor:
    """[Tq, H, Dv]."""
    extra: dict[str, Any] = {"enable_gqa": call.query.shape[1] != call.key.shape[1]} if _GROUPS else {}
    out = varlen.varlen_attn(
        call.query.contiguous(),
        call.key.contiguous(),
        call.value.contiguous(),
        call.q.offsets,
        call.k.offsets,
        call.q.max_length,
        call.k.max_length,
        scale=call.scale,
        window_size=(call.left, 0 if call.causal else call.right),
        **extra,
    )
    assert isinstance(out, Tensor)
    return out

"""The package ``flash-attn``: packed sequences of half precision on a CUDA device.

Its causal mask and window line up the last query with the last key; PyTorch's the first with the first. They
are the same where queries and keys have the same lengths, so anything else is refused.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from ..axis import same_axis
from .call import Call

HALF = (torch.float16, torch.bfloat16)


def _load() -> Any:
    try:
        return importlib.import_module("flash_attn").flash_attn_varlen_func
    except ImportError:
        return None


#: ``flash_attn_varlen_func``, or None where the package is not installed.
function = _load()


def refuses_packed(call: Call) -> str | None:
    """What no kernel of this family can do."""
    if call.query.device.type != "cuda":
        return f"it runs on CUDA devices, the tensors are on '{call.query.device.type}'"
    if call.query.dtype not in HALF:
        return f"it takes float16 and bfloat16, not {call.query.dtype}"
    if call.bias is not None:
        return "it takes no mask and no bias"
    if call.query.shape[2] != call.value.shape[2] or call.query.shape[2] > 256:
        return (
            "it needs one head dim of at most 256 for queries and values, "
            f"not {call.query.shape[2]} and {call.value.shape[2]}"
        )
    if (call.causal or call.windowed) and not same_axis(call.q, call.k):
        return "it lines up the last query with the last key, so causal and windows need one axis for both"
    return None


def refuses(call: Call) -> str | None:
    """Why it cannot do this, or None."""
    if function is None:
        return "the package 'flash-attn' is not installed"
    return refuses_packed(call)


def run(call: Call) -> Tensor:
    """[Tq, H, Dv]."""
    return function(
        *(t.contiguous() for t in (call.query, call.key, call.value)),
        call.q.offsets,
        call.k.offsets,
        call.q.max_length,
        call.k.max_length,
        dropout_p=call.dropout,
        softmax_scale=call.scale,
        causal=call.causal,
        window_size=(call.left, call.right),
    )

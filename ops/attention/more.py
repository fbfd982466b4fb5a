"""Keys of a module beside those of its input: ``bias_k``, ``bias_v``, ``add_zero_attn``, static ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..axis import Grid
from ..tensor import PackedTensor
from .bias import WHAT
from .call import Call


def more_keys(
    bias_k: Tensor | None, bias_v: Tensor | None, zero: bool, heads: tuple[int, int], like: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Keys and values [1 or 2, H, D] that every sample gets beside its own, or None."""
    if (bias_k is None) != (bias_v is None):
        raise ValueError(f"multi-head {WHAT}: bias_k and bias_v go together; one of them is None")
    if bias_k is None and not zero:
        return None
    found = []
    for rows in (bias_k, bias_v):
        parts = [] if rows is None else [rows.reshape(1, *heads)]
        found.append(torch.cat(parts + [like.new_zeros(1, *heads)] * zero))
    return found[0], found[1]


def with_more(call: Call, keys: Tensor, values: Tensor) -> Call:
    """``call`` with more keys and values behind every sample's own; its bias is None or [cells, 1 or H]."""
    grid, batch, count = Grid([call.k]), call.k.batch_size, keys.shape[0]
    join: Any = torch.cat  # of packed tensors
    key, value = (
        join([PackedTensor(x, grid, (0, 1, 2, 3)), more.expand(batch, -1, -1, -1)], 1)
        for x, more in ((call.key, keys), (call.value, values))
    )
    bias: Any = call.bias
    if bias is not None:
        pairs: Any = PackedTensor(bias, Grid([call.q, call.k]), (0, 1, 2, 3))
        bias = F.pad(pairs, (0, 0, 0, count), value=1.0 if bias.dtype == torch.bool else 0.0).values
    return call._replace(key=key.values, value=value.values, k=key.axes[0], bias=bias)


def masked_instead(mask: Any) -> bool:
    """Whether a causal call with added keys can go by its mask.

    Raises:
        NotImplementedError: it has none.
    """
    if mask is None:
        raise NotImplementedError(
            f"multi-head {WHAT}: is_causal says nothing of the keys that bias_k and add_zero_attn add: "
            "give the mask as attn_mask"
        )
    return True


def refuse_static(keys: Any, values: Any) -> None:
    """Raise NotImplementedError where a module was handed projected keys or values."""
    if keys is not None or values is not None:
        raise NotImplementedError(
            f"multi-head {WHAT} on packed tensors does not take static_k and static_v: give projected keys "
            "and values to scaled_dot_product_attention"
        )

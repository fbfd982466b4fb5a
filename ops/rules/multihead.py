"""``F.multi_head_attention_forward``, what ``nn.MultiheadAttention`` and the transformer layers call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import dispatch
from ..attention import Call, attend, packed_weights
from ..attention.bias import WHAT, by_cell, module_bias
from ..attention.operands import MIXED, require_module_layout
from ..axis import Grid
from ..tensor import PackedTensor, is_packed
from .join import cat, pad


def multi_head_attention(
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[PackedTensor, PackedTensor | None]:
    """(n, B, E) -> (n, B, E), and the weights (B, n, m) averaged over heads, or (B, H, n, m).

    Args:
        attn_mask: (N, M), (B * H, N, M), or packed (B, n, m) or (B, H, n, m); not read where ``is_causal``.
        key_padding_mask: (B, M) or packed (B, m); what stands behind a sample's keys is not read.
        bias_k, bias_v: (1, 1, E), one more key and value of every sample; ``add_zero_attn`` gives one of
            zeros. They stand behind the sample's own, and every query sees them.

    Raises:
        NotImplementedError: static keys or values; causal without a mask where there are such keys.
        ValueError: operands or masks that do not fit.
    """
    if static_k is not None or static_v is not None:
        raise NotImplementedError(
            f"multi-head {WHAT} on packed tensors does not take static_k and static_v: give projected keys "
            "and values to scaled_dot_product_attention"
        )
    if not (is_packed(query) and is_packed(key) and is_packed(value)):
        raise TypeError(f"multi-head {WHAT}: {MIXED}")
    require_module_layout(query, key, value)
    heads = (num_heads, embed_dim_to_check // num_heads)
    more = _more(bias_k, bias_v, add_zero_attn, heads, key.values)
    if is_causal and more is not None:
        if attn_mask is None:
            raise NotImplementedError(
                f"multi-head {WHAT}: is_causal says nothing of the keys that bias_k and add_zero_attn add: "
                "give the mask as attn_mask"
            )
        is_causal = False
    separate = (q_proj_weight, k_proj_weight, v_proj_weight)
    q, k, v = _projected((query, key, value), heads, in_proj_weight, in_proj_bias, separate)
    bias = module_bias(query, key, num_heads, None if is_causal else attn_mask, key_padding_mask)
    dropout = dropout_p if training else 0.0
    call = Call(q, k, v, query.axes[0], key.axes[0], bias, is_causal, dropout=dropout)
    if more is not None:
        call = _with_more(call if bias is None else call._replace(bias=by_cell(bias, query, key)), *more)
    call = call.settled()
    out = F.linear(attend(call).flatten(1), out_proj_weight, out_proj_bias)
    shown = packed_weights(call, average_attn_weights) if need_weights else None
    return PackedTensor(out, query.grid, query.order), shown


def _more(
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


def _with_more(call: Call, keys: Tensor, values: Tensor) -> Call:
    """``call`` with more keys and values behind every sample's own; its bias is None or [cells, 1 or H]."""
    grid, batch, count = Grid([call.k]), call.k.batch_size, keys.shape[0]
    key, value = (
        cat([PackedTensor(x, grid, (0, 1, 2, 3)), more.expand(batch, -1, -1, -1)], 1)
        for x, more in ((call.key, keys), (call.value, values))
    )
    bias = call.bias
    if bias is not None:
        pairs = PackedTensor(bias, Grid([call.q, call.k]), (0, 1, 2, 3))
        bias = pad(pairs, (0, 0, 0, count), value=1.0 if bias.dtype == torch.bool else 0.0).values
    return call._replace(key=key.values, value=value.values, k=key.axes[0], bias=bias)


def _projected(
    operands: tuple[PackedTensor, PackedTensor, PackedTensor],
    heads: tuple[int, int],
    weight: Tensor | None,
    bias: Tensor | None,
    separate: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> Iterable[Tensor]:
    """Queries, keys and values [rows, H, D]: one product where all three come from one payload."""
    query, key, value = operands
    if weight is not None and query.values is key.values and key.values is value.values:
        return F.linear(query.values, weight, bias).unflatten(-1, (3, *heads)).unbind(1)
    weights = separate if weight is None else weight.chunk(3)
    biases = bias.chunk(3) if bias is not None else (None, None, None)
    return (
        F.linear(x.values, w, b).unflatten(-1, heads)  # type: ignore[arg-type]
        for x, w, b in zip(operands, weights, biases)
    )


def _mha(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return multi_head_attention(*args, **kwargs)


dispatch.register_function(WHAT, _mha, "multi_head_attention_forward", F.multi_head_attention_forward)

"""``F.multi_head_attention_forward``, what ``nn.MultiheadAttention`` and the transformer layers call."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import dispatch
from ..attention import Call, attend, attention_weights
from ..axis import Grid, require_same
from ..tensor import PackedTensor, is_packed
from .attention import WHAT, pair_bias, require_batch

#: Scores inside the module: batch, heads, queries, keys, as of queries of this order.
_SCORES = (0, 2, 1, 3)


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

    Raises:
        NotImplementedError: ``bias_k``, ``add_zero_attn`` or static keys.
        ValueError: operands or masks that do not fit.
    """
    _refuse(
        {
            "bias_k and bias_v": bias_k is not None or bias_v is not None,
            "add_zero_attn": add_zero_attn,
            "static_k and static_v": static_k is not None or static_v is not None,
        }
    )
    if not (is_packed(query) and is_packed(key) and is_packed(value)):
        raise TypeError("multi-head attention: query, key and value must all be packed, or none")
    _require_module_layout(query, key, value)
    heads = (num_heads, embed_dim_to_check // num_heads)
    if in_proj_weight is not None and query.values is key.values and key.values is value.values:
        q, k, v = F.linear(query.values, in_proj_weight, in_proj_bias).unflatten(-1, (3, *heads)).unbind(1)
    else:
        separate = (q_proj_weight, k_proj_weight, v_proj_weight)
        weights = separate if in_proj_weight is None else in_proj_weight.chunk(3)
        biases = in_proj_bias.chunk(3) if in_proj_bias is not None else (None, None, None)
        q, k, v = (
            F.linear(x.values, w, b).unflatten(-1, heads)  # type: ignore[arg-type]
            for x, w, b in zip((query, key, value), weights, biases)
        )
    bias = _bias(query, key, num_heads, None if is_causal else attn_mask, key_padding_mask)
    dropout = dropout_p if training else 0.0
    call = Call(q, k, v, query.axes[0], key.axes[0], bias, is_causal, dropout=dropout).settled()
    out = F.linear(attend(call).flatten(1), out_proj_weight, out_proj_bias)
    shown = _weights(call, average_attn_weights) if need_weights else None
    return PackedTensor(out, query.grid, query.order), shown


def _weights(call: Call, average: bool) -> PackedTensor:
    grid = Grid([call.q, call.k])
    weights = attention_weights(call, grid)
    if average:
        return PackedTensor(weights.mean(1), grid, (0, 1, 2))
    return PackedTensor(weights, grid, (0, 3, 1, 2))


def _bias(query: PackedTensor, key: PackedTensor, heads: int, mask: Any, padding: Any) -> Tensor | None:
    """Both masks as one bias; True means here that a key is not seen."""
    if mask is not None:
        mask = _expanded(mask, query.batch_size, heads)
    if padding is not None:
        if padding.dim() != 2:
            raise ValueError(f"{WHAT}: key_padding_mask of shape {tuple(padding.shape)}; it must be (B, M)")
        padding = padding[:, None, None]
    found = None
    for one in (mask, padding):
        if one is None:
            continue
        one = ~one if one.dtype == torch.bool else one
        bias = pair_bias(one, query.axes[0], key.axes[0], _SCORES, [heads])
        found = bias if found is None else _both(found, bias, query, key)
    return found


def _expanded(mask: Any, batch: int, heads: int) -> Any:
    """A mask with a dim for the batch and one for heads, or neither."""
    if is_packed(mask):
        return mask[:, None] if mask.dim() == 3 else mask
    return mask.unflatten(0, (batch, heads)) if mask.dim() == 3 else mask


def _both(a: Tensor, b: Tensor, query: PackedTensor, key: PackedTensor) -> Tensor:
    """The sum of two biases, where the first may be shared by all samples."""
    if a.dim() == 3:
        a = pair_bias(
            a.expand(query.batch_size, -1, -1, -1), query.axes[0], key.axes[0], _SCORES, [a.shape[0]]
        )
    if a.dtype == b.dtype == torch.bool:
        return a & b
    a, b = (_additive(x) for x in (a, b))
    return a + b


def _additive(x: Tensor) -> Tensor:
    if x.dtype != torch.bool:
        return x
    return torch.zeros_like(x, dtype=torch.get_default_dtype()).masked_fill(~x, float("-inf"))


def _require_module_layout(query: PackedTensor, key: PackedTensor, value: PackedTensor) -> None:
    for x in (query, key, value):
        if x.order != (1, 0, 2):
            raise ValueError(
                "multi-head attention needs positions, batch, features: (n, B, E), or with batch_first=True "
                f"(B, n, E), one ragged axis among them; got the order {x.order} inside the module"
            )
    require_same(key.axes[0], value.axes[0], f"{WHAT}: key against value")
    require_batch(query, key)


def _refuse(reasons: dict[str, bool]) -> None:
    for name, given in reasons.items():
        if given:
            raise NotImplementedError(f"multi-head attention on packed tensors does not take {name} yet")


def _mha(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return multi_head_attention(*args, **kwargs)


dispatch.register_function(WHAT, _mha, "multi_head_attention_forward", F.multi_head_attention_forward)

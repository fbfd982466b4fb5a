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
from ..attention.more import masked_instead, more_keys, refuse_static, with_more
from ..attention.operands import MIXED, require_module_layout
from ..tensor import PackedTensor, is_packed


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
    refuse_static(static_k, static_v)
    if not (is_packed(query) and is_packed(key) and is_packed(value)):
        raise TypeError(f"multi-head {WHAT}: {MIXED}")
    require_module_layout(query, key, value)
    heads = (num_heads, embed_dim_to_check // num_heads)
    more = more_keys(bias_k, bias_v, add_zero_attn, heads, key.values)
    is_causal = is_causal and not (more is not None and masked_instead(attn_mask))
    separate = (q_proj_weight, k_proj_weight, v_proj_weight)
    q, k, v = _projected((query, key, value), heads, in_proj_weight, in_proj_bias, separate)
    bias = module_bias(query, key, num_heads, None if is_causal else attn_mask, key_padding_mask)
    dropout = dropout_p if training else 0.0
    call = Call(q, k, v, query.axes[0], key.axes[0], bias, is_causal, dropout=dropout)
    if more is not None:
        call = with_more(call if bias is None else call._replace(bias=by_cell(bias, query, key)), *more)
    call = call.settled()
    out = F.linear(attend(call).flatten(1), out_proj_weight, out_proj_bias)
    shown = packed_weights(call, average_attn_weights) if need_weights else None
    return PackedTensor(out, query.grid, query.order), shown


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


def _left_aligned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``nn.TransformerEncoder`` may make a batch with a padding mask nested: never."""
    return False


dispatch.register_function(WHAT, _mha, "multi_head_attention_forward", F.multi_head_attention_forward)
dispatch.TABLE[torch._nested_tensor_from_mask_left_aligned] = _left_aligned  # no row: only modules call it

"""Attention: ``F.scaled_dot_product_attention``, with masks and biases brought to pairs of positions."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from .. import dispatch
from ..attention import UNLIMITED, Call, attend
from ..attention.bias import WHAT, pair_bias
from ..attention.operands import MIXED, require_batch, require_heads, require_same_dims, token_major
from ..axis import require_same
from ..tensor import PackedTensor, is_packed


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> PackedTensor:
    """``F.scaled_dot_product_attention`` with each sample by itself.

    Args:
        query: (..., n, D) with the batch and static head dims in front, in any order.
        key, value: (..., m, D) and (..., m, Dv), over the samples of ``query``; ``m`` may be ``n``.
        attn_mask: packed or dense, broadcastable to the scores (..., n, m): boolean, True where a key is
            seen, or added to the scores, and then with a gradient. A packed one has a ragged dim of queries,
            of keys, or of both (a pair); a dense one is read by sample, head and position.

    Returns:
        (..., n, Dv) with the layout of ``query``; exactly 0 where a query sees no key.

    Raises:
        ValueError: operands that do not fit each other.
    """
    return packed_attention(
        query, key, value, attn_mask, causal=is_causal, scale=scale, dropout=dropout_p, grouped=enable_gqa
    )


def packed_attention(
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    *,
    causal: bool = False,
    window: tuple[int, int] = (UNLIMITED, UNLIMITED),
    scale: float | None = None,
    dropout: float = 0.0,
    grouped: bool = False,
) -> PackedTensor:
    """:func:`scaled_dot_product_attention`, and a window: query i sees keys i - left to i + right."""
    if not (is_packed(query) and is_packed(key) and is_packed(value)):
        raise TypeError(f"{WHAT}: {MIXED}")
    require_same(key.axes[0], value.axes[0], f"{WHAT}: key against value")
    require_batch(query, key)
    require_same_dims(query, key, value)
    q, k, v = (token_major(x) for x in (query, key, value))
    require_heads(q, k, v, grouped)
    heads = [size for d, size in enumerate(query.shape[:-2]) if query.order[d] > 1]
    axes = query.axes[0], key.axes[0]
    bias = None if mask is None else pair_bias(mask, *axes, query.order, heads)
    call = Call(q, k, v, *axes, bias, causal, *window, scale, dropout)
    out = attend(call.settled())
    numbers = iter(range(2, 2 + len(query.order)))
    order = tuple(c if c <= 1 else next(numbers) for c in query.order)
    return PackedTensor(out.reshape(out.shape[0], *heads, out.shape[-1]), query.grid, order)


def _sdpa(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return scaled_dot_product_attention(*args, **kwargs)


dispatch.register_function(WHAT, _sdpa, "scaled_dot_product_attention", F.scaled_dot_product_attention)

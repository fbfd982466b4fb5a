"""Attention: ``F.scaled_dot_product_attention``, with masks and biases brought to pairs of positions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from .. import dispatch
from ..align import Layout, dense_payload, packed_payload
from ..attention import UNLIMITED, Call, attend
from ..axis import Axis, Grid, require_same
from ..tensor import PackedTensor, is_packed

WHAT = "attention"


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
        raise TypeError("scaled_dot_product_attention: query, key and value must all be packed")
    require_same(key.axes[0], value.axes[0], f"{WHAT}: key against value")
    require_batch(query, key)
    _require_same_dims(query, key, value)
    q, k, v = (_token_major(x) for x in (query, key, value))
    _require_heads(q, k, v, grouped)
    heads = [size for d, size in enumerate(query.shape[:-2]) if query.order[d] > 1]
    axes = query.axes[0], key.axes[0]
    bias = None if mask is None else pair_bias(mask, *axes, query.order, heads)
    call = Call(q, k, v, *axes, bias, causal, *window, scale, dropout)
    out = attend(call.settled())
    numbers = iter(range(2, 2 + len(query.order)))
    order = tuple(c if c <= 1 else next(numbers) for c in query.order)
    return PackedTensor(out.reshape(out.shape[0], *heads, out.shape[-1]), query.grid, order)


# ------------------------------------------------------------------ masks and biases


def score_layout(q: Axis, k: Axis, order: tuple[int, ...]) -> Layout:
    """The layout of scores (..., n, m) for queries of this ``order``."""
    numbers = iter(range(3, 3 + len(order)))
    lead = tuple(0 if c == 0 else next(numbers) for c in order[:-2])
    return Layout(Grid([q, k]), (*lead, 1, 2))


def pair_bias(mask: Any, q: Axis, k: Axis, order: tuple[int, ...], heads: list[int]) -> Tensor:
    """A mask or bias for scores (..., n, m), as backends take it: [cells, 1 or H] or [1 or H, N, M].

    Raises:
        TypeError: it is no tensor, or neither boolean nor floating.
        ValueError: it does not broadcast to the scores.
    """
    if not (is_packed(mask) or isinstance(mask, Tensor)):
        raise TypeError(f"{WHAT}: attn_mask is {type(mask).__name__}; it must be a packed or a dense tensor")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"{WHAT}: attn_mask of {mask.dtype}; it must be boolean, or floating to be added")
    if mask.dim() > len(order) or (is_packed(mask) and mask.dim() != len(order)):
        raise ValueError(
            f"{WHAT}: attn_mask of shape {tuple(mask.shape)} for queries of {len(order)} dims: write it with "
            "the batch, each head dim (1 where all heads share it), queries and keys"
        )
    layout = score_layout(q, k, order)
    if is_packed(mask):
        return _by_head(packed_payload(f"{WHAT}: attn_mask", mask, layout), heads)
    shared = _shared(mask, q, k, order, heads)
    if shared is not None:
        return shared
    rows = dense_payload(f"{WHAT}: attn_mask", mask, layout)
    return _by_head(rows.expand(layout.grid.cells, *rows.shape[1:]), heads)


def _by_head(rows: Tensor, heads: list[int]) -> Tensor:
    """[cells, *heads or 1s] -> [cells, H], or [cells, 1] where all heads share it."""
    _require_mask_heads(list(rows.shape[1:]), heads)
    if all(guard_or_false(size == 1) for size in rows.shape[1:]):
        return rows.reshape(rows.shape[0], 1)
    return rows.expand(-1, *heads).flatten(1)


def _shared(mask: Tensor, q: Axis, k: Axis, order: tuple[int, ...], heads: list[int]) -> Tensor | None:
    """A dense mask that no sample has of its own: [1 or H, N, M]; else None."""
    place = order.index(0) - (len(order) - mask.dim())
    if place >= 0:
        if not guard_or_false(mask.shape[place] == 1):
            return None
        mask = mask.squeeze(place)
    mask = mask.view(*[1] * (len(heads) + 2 - mask.dim()), *mask.shape)
    for d, axis, name in ((-2, q, "queries"), (-1, k, "keys")):
        if guard_or_false(mask.shape[d] == 1):
            continue
        if torch.compiler.is_compiling():
            torch._check(mask.shape[d] == axis.max_length)
        elif mask.shape[d] != axis.max_length:
            raise ValueError(
                f"{WHAT}: attn_mask of shape {tuple(mask.shape)} has {mask.shape[d]} {name} where the "
                f"largest length of axis '{axis.label}' is {axis.max_length}; slice it to the batch"
            )
    mask = mask.expand(*mask.shape[:-2], q.max_length, k.max_length)
    lead = list(mask.shape[:-2])
    _require_mask_heads(lead, heads)
    if all(guard_or_false(size == 1) for size in lead):
        return mask.reshape(1, *mask.shape[-2:])
    return mask.expand(*heads, -1, -1).flatten(0, len(heads) - 1)


def _require_mask_heads(sizes: list[int], heads: list[int]) -> None:
    if any(size != 1 and size != head for size, head in zip(sizes, heads)):
        raise ValueError(f"{WHAT}: attn_mask has the head dims {sizes}, the queries have {heads}")


# ------------------------------------------------------------------ checks


def require_batch(query: PackedTensor, key: PackedTensor) -> None:
    """Raise ValueError where queries and keys are of different batches."""
    if torch.compiler.is_compiling():
        torch._check(query.batch_size == key.batch_size)
    elif query.batch_size != key.batch_size:
        raise ValueError(f"{WHAT}: queries of {query.batch_size} samples, keys of {key.batch_size}")


def _require_same_dims(query: PackedTensor, key: PackedTensor, value: PackedTensor) -> None:
    kinds = [tuple(min(c, 2) for c in x.order) for x in (query, key, value)]
    if not kinds[0] == kinds[1] == kinds[2]:
        raise ValueError(
            f"{WHAT}: query, key and value must have batch, heads, positions and features at the same "
            f"dims; got the orders {query.order}, {key.order} and {value.order}"
        )


def _require_heads(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> None:
    heads, shared = q.shape[1], k.shape[1]
    fits = heads == shared or (grouped and shared > 0 and heads % shared == 0)
    if not fits or shared != v.shape[1] or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"{WHAT}: query, key and value of {heads}, {shared} and {v.shape[1]} heads, query and key of "
            f"{q.shape[2]} and {k.shape[2]} features do not fit; enable_gqa=True shares heads of keys among "
            "a multiple of them"
        )


def _token_major(x: PackedTensor) -> Tensor:
    """(..., n, D) -> [T, H, D]."""
    if len(x.axes) != 1 or len(x.order) < 3 or x.order[-2] != 1 or x.order[-1] < 2:
        raise ValueError(
            "scaled_dot_product_attention needs one ragged axis, at dim -2, and a static last dim; got "
            f"a packed tensor of shape {tuple(x.shape)} with the order {x.order}"
        )
    static = [c - 1 for c in x.order if c > 1]
    values = x.values.permute(0, *static)
    return values.unsqueeze(1) if values.dim() == 2 else values.flatten(1, -2)


def _sdpa(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return scaled_dot_product_attention(*args, **kwargs)


dispatch.register_function(WHAT, _sdpa, "scaled_dot_product_attention", F.scaled_dot_product_attention)

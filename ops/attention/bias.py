"""Masks and biases of attention, brought to pairs of positions as backends take them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from ..align import Layout, dense_payload, packed_payload
from ..axis import Axis, Grid
from ..tensor import PackedTensor, is_packed

#: What errors call the operator.
WHAT = "attention"
#: Scores inside a module: batch, heads, queries, keys, as of queries of this order.
MODULE_SCORES = (0, 2, 1, 3)


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


# ------------------------------------------------------------------ the masks of a module


def module_bias(query: PackedTensor, key: PackedTensor, heads: int, mask: Any, padding: Any) -> Tensor | None:
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
        bias = pair_bias(one, query.axes[0], key.axes[0], MODULE_SCORES, [heads])
        found = bias if found is None else _both(found, bias, query, key)
    return found


def _expanded(mask: Any, batch: int, heads: int) -> Any:
    """A mask with a dim for the batch and one for heads, or neither."""
    if is_packed(mask):
        return mask[:, None] if mask.dim() == 3 else mask
    return mask.unflatten(0, (batch, heads)) if mask.dim() == 3 else mask


def by_cell(bias: Tensor, query: PackedTensor, key: PackedTensor) -> Tensor:
    """A bias of a module as [cells, 1 or H], also where all samples share it."""
    if bias.dim() == 2:
        return bias
    layout = score_layout(query.axes[0], key.axes[0], MODULE_SCORES)
    rows = dense_payload(WHAT, bias.expand(query.batch_size, -1, -1, -1), layout)
    return rows.expand(layout.grid.cells, *rows.shape[1:])


def _both(a: Tensor, b: Tensor, query: PackedTensor, key: PackedTensor) -> Tensor:
    """The sum of two biases, by position where all samples share both."""
    if a.dim() != b.dim():
        a, b = (by_cell(x, query, key) for x in (a, b))
    if a.dtype == b.dtype == torch.bool:
        return a & b
    a, b = (_additive(x) for x in (a, b))
    return a + b


def _additive(x: Tensor) -> Tensor:
    if x.dtype != torch.bool:
        return x
    return torch.zeros_like(x, dtype=torch.get_default_dtype()).masked_fill(~x, float("-inf"))

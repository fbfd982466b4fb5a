"""Reductions over any set of logical dims.

A ragged axis is consumed: what is left of the grid is the structure of the result, and a result
without a ragged axis is a plain tensor. Reducing the batch needs all axes reduced too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from ..axis import Grid
from ..kernels import segment, structure
from ..tensor import ROWS, PackedTensor
from .shape import drop_static

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Segments:
    """The rows of a grid that fall on each cell of what is kept of it."""

    grid: Grid
    kept: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Number of results."""
        return self.grid.sub(self.kept).cells if self.kept else self.grid.batch_size

    @property
    def maps(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """index, order and splits, as the segment kernels take them."""
        return self.grid.map_to(self.kept), self.grid.order_by(self.kept), self.grid.splits(self.kept)

    def sum(self, values: Tensor) -> Tensor:
        """values [cells, *] -> [rows, *]."""
        return segment.sum_rows(values, *self.maps, self.rows)

    def counts(self) -> Tensor:
        """Cells of each result, int32 [rows]."""
        return structure.counts(self.grid.splits(self.kept), self.rows)

    def require_filled(self, what: str) -> None:
        """Raise IndexError, naming the sample, where a segment has no cells."""
        for k in self.grid.others(self.kept):
            structure.check_longer(self.grid.axes[k].lengths, 1, what)


Dense = Callable[[Tensor, list[int]], Tensor]
Ragged = Callable[[Tensor, list[int], Segments], Tensor]


def reduction(name: str, dense: Dense, ragged: Ragged) -> dispatch.Handler:
    """The handler of one operator.

    Args:
        dense: ``dense(values, dims)``: over dims of the payload, kept with size 1.
        ragged: ``ragged(values, dims, segments)``: over dims of the payload, kept with size 1, and over
            segments of its rows.
    """

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dispatch.refuse_out(name, kwargs)
        x, dim, keepdim, dtype = _arguments(*args, **kwargs)
        if dtype is not None:
            x = PackedTensor(x.values.to(dtype), x.grid, x.order)
        return _reduce(name, x, _places(x, dim), keepdim, dense, ragged)

    return handler


def _reduce(name: str, x: PackedTensor, places: set[int], keepdim: bool, dense: Dense, ragged: Ragged) -> Any:
    k = len(x.grid.axes)
    entries = {x.order[d] for d in places}
    dims = [c - k for c in sorted(entries) if c > k]
    reduced = [c - 1 for c in entries if 1 <= c <= k]
    if ROWS in entries or (0 in entries and len(reduced) == k):
        return _without_rows(dense(x.values, [0, *dims]), x, places, keepdim)
    if 0 in entries:
        left = [x.grid.axes[j].label for j in range(k) if j not in reduced]
        raise ValueError(
            f"{name}: the batch dim is reduced but the ragged axes {left} are not; samples do not line up. "
            "Reduce those dims too, or reduce x.to_padded()"
        )
    if not reduced:
        out = PackedTensor(dense(x.values, dims), x.grid, x.order) if dims else x
        return out if keepdim else drop_static(out, places)
    kept = tuple(j for j in range(k) if j not in reduced)
    return _rebuild(x, ragged(x.values, dims, Segments(x.grid, kept)), kept, places, keepdim)


def _arguments(
    x: Any = None,
    dim: Any = None,
    keepdim: bool = False,
    *,
    input: Any = None,
    axis: Any = None,
    dtype: Any = None,
) -> tuple[PackedTensor, Any, bool, Any]:
    return (input if x is None else x), (axis if dim is None else dim), keepdim, dtype


def _places(x: PackedTensor, dim: Any) -> set[int]:
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return set(range(len(x.order)))
    places = [x.dim_index(d) for d in ([dim] if isinstance(dim, int) else dim)]
    if len(set(places)) != len(places):
        raise ValueError(f"a dim is named twice in {tuple(dim)}")
    return set(places)


def _without_rows(values: Tensor, x: PackedTensor, places: set[int], keepdim: bool) -> Tensor:
    """A result over all rows [1, *static with 1s] as a dense tensor in logical order."""
    k = len(x.grid.axes)
    static = [c - k for c in x.order if c > k]
    values = values.permute(0, *static).squeeze(0)
    for d, c in enumerate(x.order):
        if c <= k:
            values = values.unsqueeze(d)
    return values if keepdim else values.squeeze(tuple(places))


def _rebuild(x: PackedTensor, values: Tensor, kept: tuple[int, ...], places: set[int], keepdim: bool) -> Any:
    """The result [rows, *static with 1s] as a packed tensor, or as a dense one if no axis is left."""
    k, order, extra = len(x.grid.axes), [], 0
    for d, c in enumerate(x.order):
        if c == 0:
            order.append(0)
        elif c > k:
            order.append(c - k + len(kept))
        elif d in places:
            extra += 1
            order.append(values.dim() - 1 + len(kept) + extra)
        else:
            order.append(kept.index(c - 1) + 1)
    values = values.view(*values.shape, *[1] * extra)
    if not kept:
        dense = values.permute(order)
        return dense if keepdim else dense.squeeze(tuple(places))
    out = PackedTensor(values, x.grid.sub(kept), tuple(order))
    return out if keepdim else drop_static(out, places)


def _sum_ragged(values: Tensor, dims: list[int], segments: Segments) -> Tensor:
    return segments.sum(values.sum(dims, keepdim=True) if dims else values)


def _mean_ragged(values: Tensor, dims: list[int], segments: Segments) -> Tensor:
    if not (values.is_floating_point() or values.is_complex()):
        raise RuntimeError(f"mean needs a floating or complex dtype; got {values.dtype}")
    wide = values.float() if values.dtype in HALF else values
    total = segments.sum(wide.mean(dims, keepdim=True) if dims else wide)
    counts = segments.counts().to(total.dtype)
    return (total / counts.view(-1, *[1] * (total.dim() - 1))).to(values.dtype)


def _peak(largest: bool) -> Ragged:
    name = "amax" if largest else "amin"

    def ragged(values: Tensor, dims: list[int], segments: Segments) -> Tensor:
        segments.require_filled(name)
        return segment.peak_rows(values, *segments.maps, segments.rows, dims, largest)

    return ragged


def _dense(function: Any) -> Dense:
    def dense(values: Tensor, dims: list[int]) -> Tensor:
        return function(values, dims, keepdim=True)

    return dense


for _name, _function, _ragged in (
    ("sum", torch.sum, _sum_ragged),
    ("mean", torch.mean, _mean_ragged),
    ("amax", torch.amax, _peak(largest=True)),
    ("amin", torch.amin, _peak(largest=False)),
):
    dispatch.register("reduction", reduction(_name, _dense(_function), _ragged), _name)

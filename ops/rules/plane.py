"""Parts of a plane of two dims, ragged or static: triangles and diagonals; and windows along one dim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from ..align import Layout
from ..axis import Axis, Grid, map_cells
from ..cells import segments_along, source_payload, static_dim
from ..layout import cells_at, positions_of, replaced, shorter_axis
from ..tensor import PackedTensor, like
from .shape import on_tensor


def triangle(name: str) -> Callable[..., PackedTensor]:
    """``tril`` and ``triu`` of the last two dims, ragged or static."""
    lower = name == "tril"

    def rule(x: PackedTensor, diagonal: int = 0) -> PackedTensor:
        row, column = _coordinate(x, -2, name), _coordinate(x, -1, name)
        keep = column - row <= diagonal if lower else column - row >= diagonal
        return like(x, torch.where(keep, x.values, 0).to(x.dtype))

    return rule


def _coordinate(x: PackedTensor, dim: int, what: str) -> Tensor:
    """Positions along a dim, broadcasting with the payload."""
    c, k = x.order[x.dim_index(dim)], len(x.grid.axes)
    tail = [1] * (x.values.dim() - 1)
    if 1 <= c <= k:
        return positions_of(x.grid, c - 1).view(-1, *tail)
    place = static_dim(x, dim, what)
    tail[place - 1] = x.values.shape[place]
    return torch.arange(x.values.shape[place], device=x.device).view(1, *tail)


# ------------------------------------------------------------------ diagonals


def _diagonal(x: PackedTensor, offset: int, dim1: int, dim2: int, what: str) -> Any:
    """Where a diagonal lies: a pair of the payload's dims, or the layout of ragged ones and their cells."""
    a, b = x.dim_index(dim1), x.dim_index(dim2)
    k, (c, e) = len(x.grid.axes), (x.order[a], x.order[b])
    if a == b:
        raise ValueError(f"{what} needs two different dims; got {dim1} and {dim2}")
    if c > k and e > k:
        return (c - k, e - k), None
    if not (1 <= c <= k and 1 <= e <= k):
        raise ValueError(f"{what} needs two static dims or two ragged ones (patterns 'n n' and 'n m')")
    rest = [j for j in range(k) if j not in (c - 1, e - 1)]
    axis = _diagonal_axis(x.grid.axes[c - 1], x.grid.axes[e - 1], offset)
    axes = [*(x.grid.axes[j] for j in rest), axis]
    starts, places = [0] * k, [rest.index(j) if j in rest else len(rest) for j in range(k)]
    starts[c - 1], starts[e - 1] = max(-offset, 0), max(offset, 0)
    index = map_cells(axes, x.grid.axes, places, starts, [1] * k)
    others = [entry for d, entry in enumerate(x.order) if d not in (a, b)]
    moved = [rest.index(n - 1) + 1 if 1 <= n <= k else n - (n > k) for n in others]
    return index, Layout(Grid(axes), (*moved, len(axes)))


def _diagonal_axis(rows: Axis, columns: Axis, offset: int) -> Axis:
    if rows is columns:
        return rows.derive(-abs(offset))
    return shorter_axis(rows.derive(min(offset, 0)), columns.derive(min(-offset, 0)))


def diagonal(x: PackedTensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> PackedTensor:
    """The diagonal of two static dims or of two ragged ones; it becomes the last dim."""
    index, layout = _diagonal(x, offset, dim1, dim2, "diagonal")
    if layout is not None:
        return layout.wrap(x.values.index_select(0, index))
    k, values = len(x.grid.axes), x.values.diagonal(offset, *index)
    c, e = (n + k for n in index)
    shifted = [entry - (entry > c) - (entry > e) for entry in x.order if entry not in (c, e)]
    return PackedTensor(values, x.grid, (*shifted, k + values.dim() - 1))


def diagonal_scatter(
    x: PackedTensor, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> PackedTensor:
    """A copy whose diagonal is ``src``, laid out as :func:`diagonal` gives it."""
    index, layout = _diagonal(x, offset, dim1, dim2, "diagonal_scatter")
    if layout is None:
        shown = diagonal(x, offset, dim1, dim2)
        source = source_payload("diagonal_scatter", src, Layout(shown.grid, shown.order))
        return like(x, x.values.diagonal_scatter(source, offset, *index))
    source = source_payload("diagonal_scatter", src, layout)
    source = source.expand(layout.grid.cells, *x.values.shape[1:])
    return like(x, x.values.index_copy(0, index.long(), source))


def diag_embed(x: PackedTensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> PackedTensor:
    """The last dim as the diagonal of two dims, 0 beside it; a ragged one makes two ragged dims."""
    n, k = len(x.order), len(x.grid.axes)
    places = [d % (n + 1) for d in (dim1, dim2)]
    rest, c = list(x.order[:-1]), x.order[-1]
    if c > k:
        new = [k + x.values.dim() - 1, k + x.values.dim()]
        values = x.values.movedim(c - k, -1).diag_embed(offset)
        order, grid = [entry - (entry > c) for entry in rest], x.grid
    else:
        if segments_along(x, -1) is None:
            raise ValueError("diag_embed needs a static or a ragged last dim; here it is the batch")
        axis = x.grid.axes[c - 1].derive(abs(offset))
        axes = [*x.grid.axes[: c - 1], axis, *x.grid.axes[c:], axis]
        grid, new = Grid(axes), [c, k + 1]
        starts = [0] * (k + 1)
        starts[c - 1], starts[k] = max(-offset, 0), max(offset, 0)
        index = map_cells(x.grid.axes, axes, [*range(k), c - 1], starts, [1] * (k + 1))
        empty = x.values.new_zeros(grid.cells, *x.values.shape[1:])
        values, order = empty.index_copy(0, index.long(), x.values), [e + (e > k) for e in rest]
    for place, entry in sorted(zip(places, new)):
        order.insert(place, entry)
    return PackedTensor(values, grid, tuple(order))


# ------------------------------------------------------------------ windows


def unfold(x: PackedTensor, dimension: int, size: int, step: int) -> PackedTensor:
    """Windows of ``size`` positions, every ``step``; what is in a window is a static dim at the end.

    Raises:
        IndexError: a sample is shorter than a window; names it.
    """
    place, k = x.dim_index(dimension), len(x.grid.axes)
    order = (*x.order, k + x.values.dim())
    segments = segments_along(x, place)
    if segments is None:
        return PackedTensor(x.values.unfold(static_dim(x, place, "unfold"), size, step), x.grid, order)
    if size < 1 or step < 1:
        raise ValueError(f"unfold: windows of {size} positions, every {step}: both must be positive")
    segments.require_filled(f"unfold by windows of {size}, which padding by F.pad would fill", size)
    j = segments.axis
    grid = replaced(x.grid, j, x.grid.axes[j].derive(step - size, step))
    positions = positions_of(grid, j)[:, None] * step + torch.arange(size, device=x.device)
    cells = cells_at(grid, x.grid, j, positions)
    values = x.values.index_select(0, cells.flatten()).unflatten(0, (grid.cells, size))
    return PackedTensor(values.movedim(1, -1), grid, order)


for _rule, _names in {
    triangle("tril"): "tril",
    triangle("triu"): "triu",
    diagonal: "diagonal",
    diagonal_scatter: "diagonal_scatter",
    diag_embed: "diag_embed",
}.items():
    dispatch.register("plane", on_tensor(_rule), _names)
dispatch.register_function("plane", on_tensor(unfold), "unfold", Tensor.unfold)  # F.unfold is another one

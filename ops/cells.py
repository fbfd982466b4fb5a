"""Where entries lie: cells named by positions inside samples, for gathering, scattering and assigning."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .align import Layout, as_positions, dense_payload, over_cells, packed_payload
from .axis import Axis, Extent, Grid, map_cells
from .kernels import structure
from .layout import cells_at, computed_axis, lengths_of
from .segments import Segments
from .tensor import ROWS, PackedTensor, is_packed


def static_dim(x: PackedTensor, dim: int, what: str) -> int:
    """The dim of ``values`` that stores a static logical dim.

    Raises:
        ValueError: the dim is the batch or a ragged axis.
    """
    c, k = x.order[x.dim_index(dim)], len(x.grid.axes)
    if c > k:
        return c - k
    if c == ROWS:
        return 0
    name = "the batch dim" if c == 0 else f"the ragged axis '{x.grid.axes[c - 1].label}'"
    raise ValueError(
        f"{what} needs a static dim; dim {dim} of a packed tensor of {len(x.order)} dims is {name}"
    )


def segments_along(x: PackedTensor, dim: int) -> Segments | None:
    """The segments along a ragged dim; None for any other dim."""
    c, k = x.order[x.dim_index(dim)], len(x.grid.axes)
    return Segments(x.grid, x.grid.others((c - 1,))) if 1 <= c <= k else None


def unstack(x: PackedTensor, dim: int, values: Tensor) -> Any:
    """A result whose ragged dim ``dim`` became static: [rows without its axis, size, *static]."""
    k, kept = len(x.grid.axes), x.grid.others((x.order[dim] - 1,))
    order = unstacked_order(x, dim)
    return PackedTensor(values, x.grid.sub(kept), order) if k > 1 else values.permute(order)


def unstacked_order(x: PackedTensor, dim: int) -> tuple[int, ...]:
    """The order of :func:`unstack`'s result."""
    c, k = x.order[dim], len(x.grid.axes)
    return tuple(k if e == c else e - (c < e <= k) for e in x.order)


def picked(x: PackedTensor, dim: int, key: Any, what: str) -> Tensor:
    """The cells [rows without the axis, size] at positions ``key``; negative ones count from the end."""
    positions = torch.as_tensor(key, device=x.device)
    if positions.dtype == torch.bool or positions.is_floating_point():
        raise NotImplementedError(f"the ragged axis takes integer positions or a packed mask; got {key}")
    segments = segments_along(x, dim)
    assert segments is not None
    lengths = segments.counts().view(-1, 1)
    return cells_of(x, segments, torch.where(positions < 0, positions + lengths, positions), what)


def cells_of(x: PackedTensor, segments: Segments, positions: Tensor, what: str) -> Tensor:
    """Cells at positions [rows without the axis, size, *] of each segment; checks them."""
    axis, kept = x.grid.axes[segments.axis], segments.kept
    samples = x.grid.sub(kept).sample_ids if kept else torch.arange(x.batch_size, device=x.device)
    structure.check_inside(positions, lengths_of(axis), samples, f"{what} along '{axis.label}'")
    return segments.cells(positions)


def located(x: PackedTensor, dim: int, index: Any, what: str) -> tuple[int, Tensor, Any]:
    """Where ``index`` (of positions along ``dim``) points to in the payload.

    Returns:
        The payload's dim, indices into it, and how a result or a source is laid out: a Layout, or for a
        dense one the order of its dims.
    """
    place = x.dim_index(dim)
    if index.dim() != len(x.order):
        raise ValueError(f"{what}: an index of {index.dim()} dims for a tensor of {len(x.order)}")
    segments = segments_along(x, place)
    if segments is None:
        layout = Layout(x.grid, x.order)
        return static_dim(x, place, what), source_payload(what, index, layout), layout
    if is_packed(index) and 1 <= index.order[place] <= len(index.grid.axes) or len(x.grid.axes) > 1:
        payload, grid = as_positions(what, index, x, place)
        k = segments.axis
        axis = x.grid.axes[k]
        structure.check_inside(payload, lengths_of(axis), grid.sample_ids, f"{what} along '{axis.label}'")
        return 0, cells_at(grid, x.grid, k, payload), Layout(grid, x.order)
    order = unstacked_order(x, place)
    payload = index.permute([order.index(d) for d in range(len(order))])
    return 0, cells_of(x, segments, payload, what).flatten(0, 1), order


def source_payload(what: str, source: Any, layout: Any) -> Any:
    """The payload of a source that is laid out like an index; numbers are passed through."""
    if not isinstance(source, (Tensor, PackedTensor)) or source.dim() == 0:
        return source
    if isinstance(source, PackedTensor):
        if isinstance(layout, tuple) or len(source.order) != len(layout.order):
            raise ValueError(f"{what}: the source has {len(source.order)} dims, and is packed")
        return packed_payload(what, source, layout)
    if isinstance(layout, tuple):
        return source.permute([layout.index(d) for d in range(len(layout))]).flatten(0, 1)
    return over_cells(dense_payload(what, source, layout), source, layout)


def laid_out(x: PackedTensor, values: Tensor, layout: Any) -> Any:
    """A result [cells of the index, *] as its layout says."""
    if isinstance(layout, tuple):
        return values.unflatten(0, (x.batch_size, -1)).permute(layout)
    return layout.wrap(values)


# ------------------------------------------------------------------ slices


def sample_range(x: PackedTensor, start: int, stop: int) -> PackedTensor:
    """Samples ``start`` to ``stop``; the payload is a view."""
    lengths = x.grid.lengths
    first = int(lengths[:start].sum())
    rows = int(lengths[start:stop].sum())
    return PackedTensor(x.values.narrow(0, first, rows), x.grid.select(range(start, stop)), x.order)


def slice_axis(x: PackedTensor, k: int, key: slice) -> PackedTensor:
    """A slice of axis ``k`` of the grid: a derived axis takes its place."""
    axis = x.grid.axes[k]
    start, step = key.start or 0, 1 if key.step is None else key.step
    if step <= 0:
        raise ValueError("slice step must be positive")
    derived = _sliced_axis(axis, start, key.stop, step)
    if derived is axis:
        return x
    axes = list(x.grid.axes)
    axes[k] = derived
    grid = Grid(axes)
    starts, strides = [0] * len(axes), [1] * len(axes)
    starts[k], strides[k] = start, step
    index = grid.part.map(
        f"slice {k} {start} {step} {axis.steps}",
        lambda: map_cells(axes, x.grid.axes, range(len(axes)), starts, strides),
    )
    return PackedTensor(x.values.index_select(0, index), grid, x.order)


def _sliced_axis(axis: Axis, start: int, stop: int | None, step: int) -> Axis:
    if isinstance(stop, Extent) and stop.axis is axis:
        stop = None
    if start >= 0:
        if stop is None or stop < 0:
            axis = axis.derive((stop or 0) - start)
        else:
            axis = axis.derive(-start, cap=stop)
    elif stop is None or stop < 0:
        axis = axis.derive(stop or 0, cap=-start)
    else:  # positions from the end up to one from the start: no step of normal form
        lengths = axis.lengths.clamp_max(stop) - (axis.lengths + start).clamp_min(0)
        axis = computed_axis(axis, f"slice {start}:{stop}", lengths.clamp_min(0))
    return axis.derive(step - 1, step)


def select_position(x: PackedTensor, dim: int, position: int) -> Any:
    """One position of a ragged dim: the axis is consumed."""
    k = x.order[dim] - 1
    axes = x.grid.axes
    needed = position + 1 if position >= 0 else -position
    structure.check_longer(axes[k].lengths, needed, f"x[{position}] along the ragged axis '{axes[k].label}'")
    kept = x.grid.others((k,))
    places = [kept.index(j) if j != k else -1 for j in range(len(axes))]
    starts = [position if j == k else 0 for j in range(len(axes))]
    index = map_cells([axes[j] for j in kept], axes, places, starts, [1] * len(axes))
    values = x.values.index_select(0, index)
    order = [c - (c > k + 1) for d, c in enumerate(x.order) if d != dim]
    if kept:
        return PackedTensor(values, x.grid.sub(kept), tuple(order))
    return values.permute(order)

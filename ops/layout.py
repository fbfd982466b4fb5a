"""Functions of structure alone: grids copied to another device, and where cells lie in a padded buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .axis import Axis, Grid, Partition, map_cells, same_axis
from .kernels import structure
from .tokens import Token


def map_grid(grid: Grid, fn: Callable[[Tensor], Tensor], memo: dict[Any, Any]) -> Grid:
    """Apply ``fn`` to the tensors of a structure that live on the device."""
    if grid not in memo:
        axes = [_map_axis(axis, fn, memo) for axis in grid.axes]
        part = axes[0] if len(axes) == 1 else _map_part(grid.part, fn, memo)
        memo[grid] = Grid(axes, part)
    return memo[grid]


def _map_part(part: Partition, fn: Callable[[Tensor], Tensor], memo: dict[Any, Any]) -> Partition:
    if part not in memo:
        maps = {name: fn(t) for name, t in part.maps.items()}
        memo[part] = Partition(part.lengths, fn(part.offsets), part.extent, maps)
        _map_derived(part, fn, memo)
    return memo[part]


def _map_axis(axis: Axis, fn: Callable[[Tensor], Tensor], memo: dict[Any, Any]) -> Axis:
    if axis not in memo:
        memo[axis] = Axis(
            axis.lengths,
            fn(axis.offsets),
            name=axis.name,
            maps={name: fn(t) for name, t in axis.maps.items()},
            sizes=(axis.extent, axis.peak),
            token=axis.token,
            steps=axis.steps,
        )
        _map_derived(axis, fn, memo)
    return memo[axis]


def _map_derived(part: Partition, fn: Callable[[Tensor], Tensor], memo: dict[Any, Any]) -> None:
    """What was delivered with ``part``, and its marks, for its copy."""

    def visit(derived: Partition) -> Partition:
        visit_one = _map_axis if isinstance(derived, Axis) else _map_part
        return visit_one(derived, fn, memo)  # type: ignore[arg-type]

    memo[part].parts = {key: visit(derived) for key, derived in part.parts.items()}
    memo[part].products = [(factors, visit(derived)) for factors, derived in part.products]
    if part.dynamic:
        memo[part].mark_dynamic(part.dynamic)


def padded_index(grid: Grid, sizes: Sequence[int]) -> Tensor:
    """For each cell its row in a padded (B, *sizes) buffer, flattened; int64 [cells]."""
    index = grid.sample_ids.long()
    for k, size in enumerate(sizes):
        index = index * size + positions_of(grid, k)
    return index


def positions_of(grid: Grid, k: int) -> Tensor:
    """For each cell its position along axis ``k``, int32 [cells]."""
    axis = grid.axes[k]
    if len(grid.axes) == 1:
        return axis.positions
    return grid.part.map(f"positions {k}", lambda: axis.positions.index_select(0, grid.coordinates(k)))


def lengths_of(axis: Axis) -> Tensor:
    """The length of every sample on the device, int32 [B]."""
    return structure.counts(axis.offsets, axis.batch_size)


def computed_axis(axis: Axis, kind: str, lengths: Tensor, others: Sequence[Axis] = ()) -> Axis:
    """The axis of ``lengths`` [B] on the host, a function of those of ``axis`` and ``others``.

    ``kind`` names the function: axes of one kind and of the same axes are one axis.
    """
    parents = tuple((part.token, part.steps) for part in (axis, *others))

    def build() -> Axis:
        host, offsets, total = structure.derive(lengths, axis.offsets, structure.NO_CAP, 0, 1)
        sizes = (total, structure.longest(host))
        return Axis(host, offsets, name=axis.name, sizes=sizes, token=Token(kind, parents))

    return axis.cached((kind, parents[1:]), build)


def shorter_axis(a: Axis, b: Axis) -> Axis:
    """The axis of each sample's smaller length."""
    if same_axis(a, b):
        return a
    return computed_axis(a, "shorter", torch.minimum(a.lengths, b.lengths), [b])


def replaced(grid: Grid, k: int, axis: Axis) -> Grid:
    """The grid with another axis in place of axis ``k``."""
    return grid if axis is grid.axes[k] else Grid([*grid.axes[:k], axis, *grid.axes[k + 1 :]])


def cells_at(source: Grid, target: Grid, k: int, positions: Tensor) -> Tensor:
    """For each cell of ``source`` the cell of ``target`` with other positions along axis ``k``.

    Args:
        source, target: grids that agree in all axes but axis ``k``.
        positions: int [source cells, *], positions along axis ``k`` of ``target``.

    Returns:
        int64 [source cells, *].
    """
    places = [-1 if j == k else j for j in range(len(target.axes))]
    if places == [-1]:
        first = target.offsets.index_select(0, source.sample_ids)
    else:
        first = map_cells(source.axes, target.axes, places, [0] * len(places), [1] * len(places))
    steps = positions.long()
    tail = [1] * (positions.dim() - 1)
    for axis in target.axes[k + 1 :]:
        steps = steps * lengths_of(axis).index_select(0, source.sample_ids).view(-1, *tail)
    return first.view(-1, *tail) + steps


def envelope_index(grid: Grid, k: int) -> tuple[int, Tensor]:
    """Rows of the grid without axis ``k``, and where each cell lies in [rows * max_length]."""
    kept = grid.others((k,))
    rows = grid.sub(kept).cells if kept else grid.batch_size
    return rows, grid.map_to(kept).long() * grid.axes[k].max_length + positions_of(grid, k)


def to_envelope(values: Tensor, grid: Grid, k: int, fill: Any = 0) -> Tensor:
    """values [cells, *] -> [rows, max_length of axis k, *], padded behind the valid positions."""
    rows, index = envelope_index(grid, k)
    length = grid.axes[k].max_length
    flat = values.new_full((rows * length, *values.shape[1:]), fill)
    return flat.index_copy(0, index, values).view(rows, length, *values.shape[1:])


def from_envelope(padded: Tensor, grid: Grid, k: int) -> Tensor:
    """The valid positions of :meth:`to_envelope`."""
    return padded.flatten(0, 1).index_select(0, envelope_index(grid, k)[1])


def append_grids(grids: list[Grid]) -> Grid:
    """The grid of several batches one after the other; axes that are one in all of them stay one."""
    made: dict[tuple[Axis, ...], Axis] = {}
    axes = []
    for column in zip(*(grid.axes for grid in grids)):
        if column not in made:
            made[column] = column[0].append(column[1:])
        axes.append(made[column])
    return Grid(axes)


def interleaved(grids: list[Grid], grid: Grid, k: int) -> Tensor:
    """For each cell of ``grid`` its cell among those of all parts, one part after the other.

    Args:
        grids: the parts; they agree in all axes but axis ``k``.
        grid: their join along axis ``k``.
    """
    if len(grid.axes) == 1:
        return structure.interleave([part.offsets for part in grids], grid.cells)
    cells, start = [], None
    for part in grids:
        positions = positions_of(part, k)
        if start is not None:
            positions = positions + start.index_select(0, part.sample_ids)
        cells.append(cells_at(part, grid, k, positions))
        lengths = lengths_of(part.axes[k])
        start = lengths if start is None else start + lengths
    return structure.invert(torch.cat(cells).to(torch.int32))

"""Functions of structure alone: grids copied to another device, and where cells lie in a padded buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .axis import Axis, Grid, Partition


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
        if part.dynamic:
            memo[part].mark_dynamic(part.dynamic)
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
        if axis.dynamic:
            memo[axis].mark_dynamic(axis.dynamic)
    return memo[axis]


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

"""Bins, and the grid [steps, ranks] that they are dealt to."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import draw
from .units import Item, Units

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Bins:
    """What a policy made of a stretch of the epoch's order.

    Attributes:
        units: the units of all bins, one bin after another.
        splits: [bins + 1]; bin ``b`` holds ``units[splits[b]:splits[b + 1]]``.
        taken: how many units of the order are used up, dropped ones included.
        repeated: how many units stand in the bins twice.
    """

    units: Array
    splits: Array
    taken: int
    repeated: int = 0

    def __len__(self) -> int:
        return len(self.splits) - 1


@dataclass(frozen=True, eq=False)
class Window:
    """A stretch of an epoch: the grid [steps, ranks] of batches, every cell with at least one sample.

    Attributes:
        epoch: the epoch.
        cursor: where the window begins in the epoch's order, in units.
        end: where it ends; the next window begins there.
        steps: batches of every rank.
        ranks: world size.
        units: units of all cells, step after step, in a step rank after rank.
        splits: [steps * ranks + 1]; cell (s, r) holds ``units[splits[c]:splits[c + 1]]``, c = s * ranks + r.
        costs: [steps, ranks], the cost of each cell (in the first budget if there are several).
        dropped: units of this stretch that are in no cell.
        repeated: units that are in two cells.
        table: what the units are.
    """

    epoch: int
    cursor: int
    end: int
    steps: int
    ranks: int
    units: Array
    splits: Array
    costs: Array
    dropped: int
    repeated: int
    table: Units

    def cell(self, step: int, rank: int) -> list[Item]:
        """The batch of a rank in a step: sample indices, and a Piece where a sample was cut."""
        c = step * self.ranks + rank
        return self.table.items(self.units[self.splits[c] : self.splits[c + 1]])

    @property
    def sizes(self) -> Array:
        """[steps, ranks] int64: samples in each cell."""
        return np.diff(self.splits).reshape(self.steps, self.ranks)

    @property
    def indices(self) -> Array:
        """The data set's index of every unit of ``units``."""
        return self.table.sample_of(self.units)


def even(bins: Bins, ranks: int, drop_last: bool, table: Units, padded: bool = False) -> Bins:
    """Make the number of bins a multiple of the number of ranks.

    With ``drop_last`` the cheapest bins that are too many are dropped. Else bins are halved, that of the most
    units first, which keeps every cap; where all bins are single units, cheapest units are repeated (fewer
    than there are ranks).
    """
    over = len(bins) % ranks
    if over == 0:
        return bins
    if drop_last:
        order = np.argsort(table.weigh(bins.units, bins.splits, padded), kind="stable")
        return _select(bins, np.sort(order[over:]))
    missing = ranks - over
    counts = np.diff(bins.splits)
    largest = np.argsort(-counts, kind="stable")[:missing]
    heap = [(-int(counts[b]), int(bins.splits[b])) for b in largest]
    heapq.heapify(heap)
    cuts: list[int] = []
    while len(cuts) < missing and heap and heap[0][0] <= -2:
        count, start = heapq.heappop(heap)
        half = -count // 2
        cuts.append(start + half)
        heapq.heappush(heap, (-half, start))
        heapq.heappush(heap, (count + half, start + half))
    splits = np.sort(np.concatenate([bins.splits, np.array(cuts, dtype=bins.splits.dtype)]))
    missing -= len(cuts)
    if not missing:
        return Bins(bins.units, splits, bins.taken, bins.repeated)
    cheapest = np.resize(bins.units[np.argsort(table.loads[bins.units], kind="stable")], missing)
    more = splits[-1] + 1 + np.arange(missing, dtype=splits.dtype)
    units, splits = np.concatenate([bins.units, cheapest]), np.concatenate([splits, more])
    return Bins(units, splits, bins.taken, bins.repeated + missing)


def deal(
    bins: Bins, weights: Array, ranks: int, key: tuple[int, int, int], level: bool
) -> tuple[Bins, Array]:
    """Deal bins to ranks: those of one step cost about the same.

    Sorted by cost, every ``ranks`` neighbours make a step; the order of steps, and of ranks in a step, is
    random.

    Args:
        bins: a multiple of ``ranks`` of them.
        weights: the cost of each.
        ranks: world size.
        key: (seed, epoch, cursor).
        level: whether to deal at all; else bins stay in their order.

    Returns:
        the bins in the order of cells, and the costs [steps, ranks].
    """
    steps = len(bins) // ranks
    if not level:
        return bins, weights.reshape(steps, ranks)
    seed, epoch, cursor = key
    grid = np.argsort(weights, kind="stable").reshape(steps, ranks)
    grid = grid[draw.permutation(steps, seed, epoch, draw.STEPS, cursor)]
    if ranks > 1:
        keys = draw.bits(steps * ranks, seed, epoch, draw.RANKS, cursor).reshape(steps, ranks)
        grid = np.take_along_axis(grid, np.argsort(keys, axis=1, kind="stable"), axis=1)
    return _select(bins, grid.reshape(-1)), weights[grid]


def _select(bins: Bins, which: Array) -> Bins:
    """Some bins, in a given order."""
    counts = np.diff(bins.splits)[which]
    splits = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
    rows = np.repeat(bins.splits[which] - splits[:-1], counts) + np.arange(splits[-1])
    return Bins(bins.units[rows], splits, bins.taken, bins.repeated)

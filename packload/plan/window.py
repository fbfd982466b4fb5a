"""Bins, and the grid [steps, ranks] that they are dealt to."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import draw
from .units import Item, Units

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Bins:
    """What a policy made of the front of the epoch's order.

    Attributes:
        units: the units of all bins, one bin after another; no bin is empty.
        splits: [bins + 1] int64; bin ``b`` holds ``units[splits[b]:splits[b + 1]]``.
        taken: how many units of the order are used up, those that are in no bin included.
        repeated: how many units stand in the bins a second time.
    """

    units: Array
    splits: Array
    taken: int
    repeated: int = 0

    def __len__(self) -> int:
        return len(self.splits) - 1


class Span(NamedTuple):
    """What of a window is needed to count: see :class:`Window`."""

    end: int
    steps: int
    dropped: int
    repeated: int


@dataclass(frozen=True, eq=False)
class Window:
    """A stretch of an epoch: the grid [steps, ranks] of batches, every cell with at least one sample.

    Attributes:
        epoch: the epoch.
        cursor: where the window begins in the epoch's order, in units.
        end: where it ends, and the next window begins.
        steps: batches of every rank.
        ranks: world size.
        units: the units of all cells, step after step, in a step rank after rank.
        splits: [steps * ranks + 1] int64; cell c = step * ranks + rank is ``units[splits[c]:splits[c + 1]]``.
        costs: [steps, ranks], the cost of each cell (of several, the first).
        dropped: units of this stretch that are in no cell.
        repeated: units that are in a second cell.
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
    def span(self) -> Span:
        """Its end and its numbers."""
        return Span(self.end, self.steps, self.dropped, self.repeated)

    @property
    def sizes(self) -> Array:
        """[steps, ranks] int64: samples in each cell."""
        return np.diff(self.splits).reshape(self.steps, self.ranks)

    @property
    def indices(self) -> Array:
        """The data set's index of every unit of ``units``."""
        return self.table.sample_of(self.units)


def even(bins: Bins, ranks: int, drop_last: bool, table: Units, padded: bool) -> Bins:
    """Make the number of bins a multiple of the number of ranks.

    With ``drop_last``, the cheapest bins are dropped, fewer than there are ranks. Else bins are halved, that
    of the most units first, which keeps every cap. Where all bins are single units, the cheapest units are
    repeated, fewer than there are ranks.
    """
    over = len(bins) % ranks
    if over == 0:
        return bins
    if drop_last:
        _, weights = table.weigh(bins.units, bins.splits, padded)
        return select(bins, np.sort(np.argsort(weights, kind="stable")[over:]))
    missing = ranks - over
    cuts = _halve(bins.splits, missing)
    bins = replace(bins, splits=np.sort(np.concatenate([bins.splits, cuts])))
    missing -= len(cuts)
    if not missing:
        return bins
    cheapest = np.resize(bins.units[np.argsort(table.weights[bins.units], kind="stable")], missing)
    return Bins(
        np.concatenate([bins.units, cheapest]),
        np.concatenate([bins.splits, len(bins.units) + 1 + np.arange(missing)]),
        bins.taken,
        bins.repeated + missing,
    )


def _halve(splits: Array, times: int) -> Array:
    """Where to cut bins to get ``times`` more of them; fewer cuts only if all bins are single units then."""
    counts = np.diff(splits)
    largest = np.argsort(-counts, kind="stable")[:times]
    heap = [(-int(counts[b]), int(splits[b])) for b in largest]
    heapq.heapify(heap)
    cuts: list[int] = []
    while len(cuts) < times and heap[0][0] < -1:
        size, start = heapq.heappop(heap)
        half = -size // 2
        cuts.append(start + half)
        heapq.heappush(heap, (-half, start))
        heapq.heappush(heap, (size + half, start + half))
    return np.array(cuts, dtype=np.int64)


def deal(weights: Array, ranks: int, key: tuple[int, int, int]) -> Array:
    """Deal bins to ranks so that those of one step cost about the same.

    Sorted by cost, every ``ranks`` neighbours make a step. The order of steps, and of ranks in a step, is
    random.

    Args:
        weights: [bins] int64, the cost of each; a multiple of ``ranks`` of them.
        ranks: world size.
        key: (seed, epoch, cursor).

    Returns:
        [steps * ranks]: the bin of each cell.
    """
    seed, epoch, cursor = key
    grid = np.argsort(weights, kind="stable").reshape(-1, ranks)
    grid = grid[draw.permutation(len(grid), seed, epoch, draw.STEPS, cursor)]
    keys = draw.bits(grid.size, seed, epoch, draw.RANKS, cursor).reshape(grid.shape)
    return np.take_along_axis(grid, np.argsort(keys, axis=1, kind="stable"), axis=1).reshape(-1)


def select(bins: Bins, which: Array) -> Bins:
    """Some bins, in a given order."""
    counts = np.diff(bins.splits)[which]
    splits = np.append(np.int64(0), np.cumsum(counts))
    rows = np.repeat(bins.splits[which] - splits[:-1], counts) + np.arange(splits[-1])
    return replace(bins, units=bins.units[rows], splits=splits)

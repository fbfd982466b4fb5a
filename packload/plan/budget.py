"""Batches filled to a budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .packing import Shelf, Shelves, runs
from .policy import STEPS, Array, Policy
from .units import Units
from .window import Bins

OPEN = 8
"""Bins open at a time while small units stream by."""
CHUNK = 4096
"""Units that are sorted and packed together where units are large."""
LARGE = 1 / 12
"""Mean cost over budget from which units are large."""
FILL = 0.97
"""How full bins are expected to be when a window is measured off."""

_NO_END = 2**62


@dataclass(frozen=True)
class Budget(Policy):
    """Batches filled to a budget, in random order.

    * Small units (mean cost below ``LARGE`` of the budget) stream by in random order, each into the tightest
      of a few open bins (best fit).
    * Large units are packed in chunks, largest first, each into the tightest bin (best fit decreasing).
    * Under padded accounting a window's units are sorted, and neighbours share a bin.

    Attributes:
        budgets: the caps, by name.
        large: whether units are large.
        padded: whether a bin costs the largest cost times its units.
    """

    budgets: tuple[tuple[str, float], ...]
    large: bool
    padded: bool = False
    name = "budget"

    def cut(self, units: Units, rest: Array, ranks: int, drop_last: bool) -> Bins:
        most = STEPS * ranks
        if measure(units, rest, 2 * most) is None:
            most = _NO_END
        if self.padded:
            count = len(rest) if most == _NO_END else measure(units, rest, FILL * most)
            return runs(units, rest[:count])
        stretch = rest if most == _NO_END else rest[: measure(units, rest, most)]
        pack = self._large if self.large and len(units.limits) == 1 else self._small
        chosen = np.array(pack(units, stretch, most), dtype=np.int64)
        taken = stretch[: len(chosen)]
        order = np.argsort(chosen, kind="stable")
        sizes = np.bincount(chosen)
        return Bins(taken[order], np.append(np.int64(0), np.cumsum(sizes)), len(taken))

    def identity(self) -> dict[str, Any]:
        return {"name": self.name, "budget": dict(self.budgets), "padded": self.padded}

    def _small(self, units: Units, stretch: Array, most: int) -> list[int]:
        chosen: list[int] = []
        charges = units.charges[:, stretch]
        if len(charges) == 1:
            Shelf(int(units.limits[0]), most, OPEN).fill(charges[0].tolist(), chosen)
        else:
            Shelves(units.limits.tolist(), most, 4 * OPEN if self.large else OPEN).fill(
                charges.T.tolist(), chosen
            )
        return chosen

    def _large(self, units: Units, stretch: Array, most: int) -> list[int]:
        """Whole chunks while there are bins for them, then a chunk that fits into the last ones."""
        costs, cap = units.charges[0][stretch], int(units.limits[0])
        chosen: list[int] = []
        opened = 0
        while len(chosen) < len(costs):
            rest = costs[len(chosen) :]
            if most == _NO_END:
                size = len(rest) if len(rest) < 2 * CHUNK else CHUNK
            else:
                size = min(CHUNK, len(rest))
                if np.minimum(rest[:size], cap).sum() > FILL * cap * (most - opened):
                    return chosen + _last_chunk(rest, cap, most - opened, opened)
            shelf = Shelf(cap, _NO_END, _NO_END)
            chosen += _decreasing(shelf, rest[:size], opened)
            opened += shelf.opened
        return chosen


def _decreasing(shelf: Shelf, costs: Array, first: int) -> list[int]:
    """Pack units, largest first; the bin of each in their own order, or [] if they do not all fit."""
    order = np.argsort(-costs, kind="stable")
    chosen: list[int] = []
    shelf.fill(costs[order].tolist(), chosen)
    if len(chosen) < len(costs):
        return []
    bins = np.empty(len(costs), dtype=np.int64)
    bins[order] = chosen
    return (bins + first).tolist()


def _last_chunk(costs: Array, cap: int, most: int, first: int) -> list[int]:
    """Fill exactly ``most`` bins: most of it largest first, then units as they come, until one does not fit."""
    full = np.cumsum(np.minimum(costs, cap))
    size = int(np.searchsorted(full, FILL * cap * most))
    while True:
        shelf = Shelf(cap, most, _NO_END)
        chosen = _decreasing(shelf, costs[:size], first)
        if len(chosen) == size:
            break
        size = size * 19 // 20
    more: list[int] = []
    shelf.fill(costs[size:].tolist(), more)
    return chosen + [b + first for b in more]


def measure(units: Units, rest: Array, bins: float) -> int | None:
    """How many units from the front fill ``bins`` bins in some budget, if no space is lost; None if all do not."""
    limits = units.limits[:, None]
    guess = int(bins / max(units.fraction, 1e-12) * 1.1) + 64
    while True:
        head = rest[:guess]
        full = np.cumsum(np.minimum(units.charges[:, head] / limits, 1.0), axis=1)
        at = int(min(np.searchsorted(row, bins) for row in full))
        if at < len(head):
            return at + 1
        if guess >= len(rest):
            return None
        guess *= 2

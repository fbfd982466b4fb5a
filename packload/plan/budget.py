"""Batches filled to a budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .packing import UNLIMITED, decreasing, make_shelf, neighbours, runs
from .policy import STEPS, Array, Policy
from .units import Units, take
from .window import Bins

LARGE = 1 / 12
"""Mean share of a bin from which units are large."""

OPEN = 12
"""Bins that are open at a time while small units stream by."""

CHUNK = 4096
"""Large units that are sorted and packed together."""

FILL = 0.97
"""How full bins are expected to get at least when units are measured off for them."""


@dataclass(frozen=True)
class Budget(Policy):
    """Batches filled to a budget.

    * Small units stream by in random order, each into the tightest of a few open bins (best fit).
    * Large units are packed in chunks, the largest first, each into the tightest bin (best fit decreasing).
    * Under padded accounting, units of about the same lengths share a bin.

    A window is a whole number of steps: when so many bins are open, units are put into them until one does
    not fit, and the next window begins with that one.

    Attributes:
        caps: the budgets by name.
        large: whether units are packed as large ones.
        padded: whether a bin costs what its padded batch costs.
    """

    caps: tuple[tuple[str, float], ...]
    large: bool
    padded: bool = False
    name = "budget"

    def cut(self, units: Units, rest: Array, ranks: int, drop_last: bool) -> Bins:
        """See :class:`Policy`."""
        most = STEPS * ranks
        last = measure(units, rest, 2 * most) is None
        stretch = rest if last else rest[: measure(units, rest, most)]
        if self.padded:
            return _padded(units, stretch if last else stretch[: len(stretch) // ranks * ranks])
        if last:
            most = len(rest)
        if self.large:
            bins = _chunks(units, stretch, most)
        else:
            bins = _stream(units, stretch, most)
        chosen = np.array(bins, dtype=np.int64)
        order = np.argsort(chosen, kind="stable")
        return Bins(stretch[order], np.append(np.int64(0), np.cumsum(np.bincount(chosen))), len(chosen))

    def identity(self) -> dict[str, Any]:
        """See :class:`Policy`."""
        return {"name": self.name, "budget": dict(self.caps), "padded": self.padded}


def measure(units: Units, rest: Array, bins: float) -> int | None:
    """How many units from the front of ``rest`` fill so many bins without a gap, in any budget.

    None if all of them do not. Units never fit into fewer bins.
    """
    guess = int(bins / max(units.share, 1e-9) * 1.1) + 64
    targets = np.ceil(units.limits * bins).astype(np.int64)
    while True:
        head = rest[:guess]
        filled = np.minimum(units.charges[:, head], units.limits[:, None]).cumsum(axis=1)
        at = min(int(np.searchsorted(row, target)) for row, target in zip(filled, targets))
        if at < len(head):
            return at + 1
        if len(head) == len(rest):
            return None
        guess *= 2


def _padded(units: Units, window: Array) -> Bins:
    """Units of about the same lengths, as many as the cost of the largest allows."""
    lengths = take(units.lengths, window)
    bins = (units.charges[:, window].sum(axis=1) // units.limits).max()
    order = neighbours(lengths, int(bins))
    return Bins(window[order], runs(units.caps, take(lengths, order)), len(window))


def is_large(units: Units) -> bool:
    """Whether units are better packed largest first.

    Under one cap, whether they are large. Under several, the largest in one may be the least in another, so
    that both ways are tried on some of them as well.
    """
    if units.share < LARGE or len(units.limits) == 1:
        return units.share >= LARGE
    some = np.linspace(0, units.count - 1, min(CHUNK, units.count), dtype=np.int64)
    streamed = len(set(_stream(units, some, len(some))))
    return len(set(_chunks(units, some, len(some)))) <= streamed


def _stream(units: Units, stretch: Array, most: int) -> list[int]:
    """Units as they come, into few open bins."""
    return make_shelf(units.limits, min(most, len(stretch)), OPEN).fill(units.charges[:, stretch])


def _chunks(units: Units, stretch: Array, most: int) -> list[int]:
    """Whole chunks while there are bins for them, then one that fits into the last bins."""
    charges, limits = units.charges[:, stretch], units.limits
    chosen: list[int] = []
    opened = 0
    while len(chosen) < len(stretch):
        rest = charges[:, len(chosen) :]
        chunk = rest[:, :CHUNK] if rest.shape[1] >= 2 * CHUNK else rest
        room = FILL * limits[0] * (most - opened)
        if np.minimum(chunk[0], limits[0]).sum() > room:
            return chosen + _last_chunk(rest, limits, most - opened, opened)
        shelf = make_shelf(limits, chunk.shape[1], UNLIMITED)
        packed = decreasing(shelf, chunk, limits)
        if opened + shelf.opened > most:
            return chosen + _last_chunk(rest, limits, most - opened, opened)
        chosen += [opened + b for b in packed]
        opened += shelf.opened
    return chosen


def _last_chunk(charges: Array, limits: Array, most: int, first: int) -> list[int]:
    """Fill exactly ``most`` bins: most units largest first, then as they come until one does not fit."""
    filled = np.minimum(charges, limits[:, None]).cumsum(axis=1)
    size = min(int(np.searchsorted(row, FILL * cap * most)) for row, cap in zip(filled, limits))
    while True:
        shelf = make_shelf(limits, most, UNLIMITED)
        chosen = decreasing(shelf, charges[:, :size], limits)
        if len(chosen) == size:
            chosen += shelf.fill(charges[:, size:])
            return [first + b for b in chosen]
        size = size * 19 // 20

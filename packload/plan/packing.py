"""Packing: units to bins of a capped cost. Plain functions of costs; what drives them is elsewhere.

A unit is checked before it is admitted, so no bin is ever above its cap.
"""

from __future__ import annotations

from bisect import bisect_left
from operator import gt, sub, truediv
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cost import Lengths
from .units import Units, each, take
from .window import Bins

Array = NDArray[Any]
Integers = list[int]


class Shelf:
    """Open bins, each with its free space, and best fit into them.

    The free spaces are kept sorted, so that the tightest bin that holds a unit is found by bisection. With
    ``width`` bins open, the fullest is closed before another is opened.
    """

    def __init__(self, cap: int, most: int, width: int) -> None:
        """
        Args:
            cap: of every bin.
            most: how many bins may be opened in all.
            width: how many bins may be open at a time.
        """
        self.cap, self.most, self.width = cap, most, width
        self.opened = 0
        self._free: Integers = []
        self._bins: Integers = []

    def fill(self, costs: Integers, chosen: Integers) -> None:
        """Put units into bins, one by one, until one fits in no open bin and none may be opened.

        Args:
            costs: of the units, none above the cap.
            chosen: gets the bin of each unit that was put into one.
        """
        free, bins, cap, most, width = self._free, self._bins, self.cap, self.most, self.width
        opened, add = self.opened, chosen.append
        for cost in costs:
            k = bisect_left(free, cost)
            if k < len(free):
                space, b = free.pop(k) - cost, bins.pop(k)
            elif opened < most:
                if len(free) == width:
                    del free[0], bins[0]
                space, b = cap - cost, opened
                opened += 1
            else:
                break
            add(b)
            k = bisect_left(free, space)
            free.insert(k, space)
            bins.insert(k, b)
        self.opened = opened


class Shelves:
    """Open bins of several caps. As :class:`Shelf`: the tightest bin in the first cap that holds a unit in all."""

    def __init__(self, caps: Integers, most: int, width: int) -> None:
        self.caps, self.most, self.width = caps, most, width
        self.opened = 0
        self._free: Integers = []
        self._spaces: list[Integers] = []
        self._bins: Integers = []

    def fill(self, costs: list[Integers], chosen: Integers) -> None:
        """Put units into bins, one by one, until one fits in no open bin and none may be opened."""
        free, spaces, bins = self._free, self._spaces, self._bins
        for cost in costs:
            k = bisect_left(free, cost[0])
            while k < len(free) and any(map(gt, cost, spaces[k])):
                k += 1
            if k < len(free):
                space, b = list(map(sub, spaces[k], cost)), bins[k]
                del free[k], spaces[k], bins[k]
            elif self.opened < self.most:
                if len(free) == self.width:
                    self._close()
                space, b = list(map(sub, self.caps, cost)), self.opened
                self.opened += 1
            else:
                break
            chosen.append(b)
            k = bisect_left(free, space[0])
            free.insert(k, space[0])
            spaces.insert(k, space)
            bins.insert(k, b)

    def _close(self) -> None:
        """Close the bin that is fullest in any of its caps."""
        k = min(range(len(self._bins)), key=lambda k: min(map(truediv, self._spaces[k], self.caps)))
        del self._free[k], self._spaces[k], self._bins[k]


def runs(units: Units, window: Array) -> Bins:
    """Bins of padded batches: units sorted by length, as many neighbours to a bin as its padded cost allows.

    The padded cost of a bin is the cost of the largest lengths in it times the number of its units.
    """
    window = window[np.argsort(units.loads[window], kind="stable")]
    lengths = take(units.lengths, window)
    splits = [0]
    step = 64
    while splits[-1] < len(window):
        start = splits[-1]
        size = _longest_run(units, lengths, start, step)
        splits.append(start + size)
        step = 2 * size
    return Bins(window, np.array(splits, dtype=np.int64), len(window))


def _longest_run(units: Units, lengths: Lengths, start: int, step: int) -> int:
    """How many units from ``start`` on share a bin; at least one."""
    while True:
        block = each(lengths, lambda a: np.maximum.accumulate(a[start : start + step], axis=0))
        charges, limits, _ = units.caps.charge(block)
        count = charges.shape[1]
        fits = (charges * np.arange(1, count + 1) <= limits[:, None]).all(axis=0)
        if not fits.all():
            return max(int(np.argmin(fits)), 1)
        if count < step:
            return count
        step *= 2

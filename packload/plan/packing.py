"""Packing: units to bins of capped cost. Plain functions of charges; what drives them is elsewhere.

A unit is checked before it is admitted, so no bin is ever above a cap. A unit that is above a cap by itself
gets a bin of its own.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections.abc import Mapping
from operator import gt, sub, truediv
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..cost import Lengths
from .caps import Caps, count_of
from .units import each, take

Array = NDArray[Any]

UNLIMITED = sys.maxsize
"""So many bins that there is no end of them."""


class Shelf(Protocol):
    """Open bins, and best fit into them.

    Attributes:
        opened: bins opened so far; they are numbered in the order of opening.
    """

    opened: int

    def fill(self, charges: Array) -> list[int]:
        """Put units into bins, one by one, until one fits in no open bin and no more may be opened.

        Args:
            charges: [budgets, units].

        Returns:
            the bin of each unit that was put into one.
        """


def make_shelf(limits: Array, most: int, width: int) -> Shelf:
    """Open bins of one or several caps.

    Args:
        limits: [budgets], the caps of every bin.
        most: how many bins may be opened in all; no more than there are units.
        width: how many bins may be open at a time; the fullest is closed before another is opened.
    """
    return OneCap(int(limits[0]), most, width) if len(limits) == 1 else ManyCaps(limits.tolist(), most, width)


class OneCap:
    """Best fit under one cap: a unit goes into the tightest open bin that holds it.

    An open bin is one integer, ``free space * 2^bits + number``. They are kept sorted, so that the tightest
    bin for a unit is found by bisection.
    """

    def __init__(self, cap: int, most: int, width: int) -> None:
        self.cap, self.most, self.width = cap, most, width
        self.opened = 0
        self._open: list[int] = []

    def fill(self, charges: Array) -> list[int]:
        """See :class:`Shelf`."""
        bins, width, most, opened = self._open, self.width, self.most, self.opened
        bits = most.bit_length()
        mask = (1 << bits) - 1
        empty = self.cap << bits
        chosen: list[int] = []
        for charge in charges[0].tolist():
            cost = charge << bits
            k = bisect_left(bins, cost)
            if k < len(bins):
                left = bins.pop(k) - cost
            elif opened < most:
                if len(bins) == width:
                    del bins[0]
                left = empty - cost + opened
                opened += 1
            else:
                break
            chosen.append(left & mask)
            insort(bins, left)
        self.opened = opened
        return chosen


class ManyCaps:
    """Best fit under several caps: of the bins that hold a unit in all, the tightest in the first.

    Bins are sorted by free space in the first cap, and ``SCAN`` of them are tried. A bin that has no room for
    the least of the units in some cap is closed.
    """

    SCAN = 16

    def __init__(self, caps: list[int], most: int, width: int) -> None:
        self.caps, self.most, self.width = caps, most, width
        self.opened = 0
        self._open: list[tuple[list[int], int]] = []

    def fill(self, charges: Array) -> list[int]:
        """See :class:`Shelf`."""
        bins = self._open
        chosen: list[int] = []
        least = charges.min(axis=1, initial=UNLIMITED).tolist()
        for cost in charges.T.tolist():
            k = bisect_left(bins, (cost, -1))
            stop = min(k + self.SCAN, len(bins))
            while k < stop and any(map(gt, cost, bins[k][0])):
                k += 1
            if k < stop:
                spaces, number = bins.pop(k)
            elif self.opened < self.most:
                if len(bins) == self.width:
                    del bins[self._fullest()]
                spaces, number = self.caps, self.opened
                self.opened += 1
            else:
                break
            chosen.append(number)
            left = list(map(sub, spaces, cost))
            if not any(map(gt, least, left)):
                insort(bins, (left, number))
        return chosen

    def _fullest(self) -> int:
        """The bin that is fullest in any of its caps."""
        return min(range(len(self._open)), key=lambda k: min(map(truediv, self._open[k][0], self.caps)))


def decreasing(shelf: Shelf, charges: Array, limits: Array) -> list[int]:
    """Best fit decreasing: put units into bins, those that take the largest share of a bin first.

    D. S. Johnson, Near-optimal bin packing algorithms, 1973.

    Returns:
        the bin of each unit; or nothing, if they do not all fit into the bins that may be opened.
    """
    order = np.argsort(-(charges / limits[:, None]).max(axis=0), kind="stable")
    placed = shelf.fill(charges[:, order])
    if len(placed) < len(order):
        return []
    bins = np.empty(len(order), dtype=np.int64)
    bins[order] = placed
    return bins.tolist()


def neighbours(lengths: Lengths, bins: int) -> Array:
    """An order of units in which neighbours have about the same lengths, all of them.

    By length where there is one. Where there are D, the units are parted by the first length, each part by
    the second, and so on, into as many parts at every level that about ``bins`` come out.

    Returns:
        a permutation of the units.
    """
    fields = list(lengths.values()) if isinstance(lengths, Mapping) else [lengths]
    columns = [column for field in fields for column in np.atleast_2d(field.T)]
    parts = max(round(bins ** (1 / len(columns))), 1)
    group = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns[:-1]:
        order = np.lexsort((column, group))
        ordered = group[order]
        first = np.searchsorted(ordered, ordered, side="left")
        size = np.searchsorted(ordered, ordered, side="right") - first
        group[order] = ordered * parts + (np.arange(len(order)) - first) * parts // size
    return np.lexsort((columns[-1], group))


def runs(caps: Caps, lengths: Lengths) -> Array:
    """Bins of padded batches: as many neighbours to a bin as its padded cost allows.

    The padded cost of a bin is the cost of the largest lengths in it times the number of its units.

    Args:
        caps: budgets and costs.
        lengths: of the units, in an order of :func:`neighbours`.

    Returns:
        splits [bins + 1].
    """
    if isinstance(lengths, Mapping) or lengths.ndim > 1:
        return _runs_of_several(caps, lengths)
    charges, limits = caps.charge(lengths)
    allowed = (limits[:, None] // np.maximum(charges, 1)).min(axis=0)
    allowed[(charges == 0).all(axis=0)] = len(lengths)
    splits, start = [0], 0
    for k, most in enumerate(allowed.tolist()):
        if k - start >= most and k > start:
            splits.append(k)
            start = k
    return np.array([*splits, len(lengths)] if len(lengths) else splits, dtype=np.int64)


def _runs_of_several(caps: Caps, lengths: Lengths) -> Array:
    splits, step, count = [0], 64, count_of(lengths)
    while splits[-1] < count:
        size = _longest_run(caps, lengths, splits[-1], step)
        splits.append(splits[-1] + size)
        step = 2 * size + 2
    return np.array(splits, dtype=np.int64)


def _longest_run(caps: Caps, lengths: Lengths, start: int, step: int) -> int:
    """How many units from ``start`` on share a bin; at least one."""
    while True:
        block = take(lengths, slice(start, start + step))
        charges, limits = caps.charge(each(block, np.maximum.accumulate))
        units = charges.shape[1]
        fits = (charges * np.arange(1, units + 1) <= limits[:, None]).all(axis=0)
        if not fits.all():
            return max(int(np.argmin(fits)), 1)
        if units < step:
            return units
        step *= 2

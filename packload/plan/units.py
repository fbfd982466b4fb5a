"""What a plan deals out: samples, or pieces of samples, and what each is charged.

A sample that costs more than the budget by itself is oversize. What becomes of it is asked for:

============  ==========================================================================
``raise``     an error that names it (the default)
``skip``      it is in no batch, and counted
``alone``     it is a batch by itself, above the budget; counted, and marked in ``alone``
``split``     it is cut to pieces as long as the budget allows, each a unit of its own
``truncate``  its first piece alone is kept
============  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..cost import Lengths
from .caps import Caps

Array = NDArray[Any]
Oversize = Literal["raise", "skip", "alone", "split", "truncate"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a sample along its ragged axis: positions ``start`` to ``stop`` of sample ``index``.

    It stands in a batch's list in place of the index. It is no integer on purpose: a data set that does not
    know it fails, where it would else return the whole sample. :class:`packload.plan.Cut` serves it.
    """

    index: int
    start: int
    stop: int


Item = int | Piece


@dataclass(frozen=True, eq=False)
class Units:
    """All units of a plan.

    Attributes:
        count: number of units.
        lengths: of each unit, [count], [count, D] or by field.
        charges: [budgets, count] int64, in the scale of ``limits``; no rows without a budget.
        limits: [budgets] int64, what a bin's charges may sum to.
        caps: budgets and costs.
        loads: [count], the cost that ranks are balanced by, in the user's scale.
        index: [count] the sample of each unit; None where unit u is sample u.
        bounds: [count, 2], start and stop of each unit; (0, -1) for a whole sample; None if all are.
        alone: [count] bool, units above the budget; None if there are none.
        counts: how many samples were oversize, by what became of them, and the pieces they gave.
        oversize: indices of the oversize samples.
    """

    count: int
    lengths: Lengths
    charges: Array
    limits: Array
    caps: Caps
    loads: Array
    index: Array | None
    bounds: Array | None
    alone: Array | None
    counts: dict[str, int]
    oversize: Array

    @cached_property
    def fraction(self) -> float:
        """The mean share of a bin that a unit takes up, in the budget where that is largest."""
        if not self.count or not len(self.limits):
            return 0.0
        return float((np.minimum(self.charges, self.limits[:, None]).mean(axis=1) / self.limits).max())

    def sample_of(self, units: Array) -> Array:
        """The data set's index of each unit."""
        return units if self.index is None else self.index[units]

    def items(self, units: Array) -> list[Item]:
        """What a batch's list holds for units: an index, or a Piece."""
        index = self.sample_of(units).tolist()
        if self.bounds is None:
            return index
        bounds = self.bounds[units].tolist()
        return [i if b[1] < 0 else Piece(i, b[0], b[1]) for i, b in zip(index, bounds)]

    def weigh(self, units: Array, splits: Array, padded: bool) -> Array:
        """The cost of bins [bins], in the user's scale: packed, or that of a padded batch."""
        if not len(splits) - 1:
            return self.loads[:0]
        starts = splits[:-1]
        if not padded:
            return np.add.reduceat(self.loads[units], starts)
        largest = take(self.lengths, units)
        largest = each(largest, lambda a: np.maximum.reduceat(a, starts, axis=0))
        return self.caps.load(largest) * np.diff(splits)


def take(lengths: Lengths, which: Array) -> Lengths:
    """Lengths of some samples."""
    return each(lengths, lambda a: a[which])


def each(lengths: Lengths, do: Any) -> Lengths:
    """Apply a function to lengths, or to those of every field."""
    return {k: do(v) for k, v in lengths.items()} if isinstance(lengths, Mapping) else do(lengths)


def make_units(lengths: Lengths, caps: Caps, oversize: Oversize) -> Units:
    """Charge samples, and do with oversize ones what is asked.

    Raises:
        ValueError: an oversize sample where ``oversize`` is ``"raise"``; a cost that is negative or not
            finite; samples to be cut that have more than one length, or a cost even of one position.
    """
    if oversize not in get_args(Oversize):
        raise ValueError(f"oversize={oversize!r} is none of {get_args(Oversize)}.")
    charges, limits, loads = caps.charge(lengths)
    above = (charges > limits[:, None]).any(axis=0)
    over = np.flatnonzero(above)
    counts = {"skipped": 0, "alone": 0, "split": 0, "pieces": 0, "truncated": 0}
    units = Units(len(loads), lengths, charges, limits, caps, loads, None, None, None, counts, over)
    if not len(over):
        return units
    if oversize == "raise":
        raise ValueError(_complaint(lengths, caps, over))
    if oversize == "alone":
        return replace(units, alone=above, counts={**counts, "alone": len(over)})
    if oversize == "skip":
        kept = np.flatnonzero(~above)
        return replace(
            units,
            count=len(kept),
            lengths=take(lengths, kept),
            charges=charges[:, kept],
            loads=loads[kept],
            index=kept,
            counts={**counts, "skipped": len(over)},
        )
    return _cut(units, above, oversize == "split")


def _cut(whole: Units, above: Array, split: bool) -> Units:
    """Cut oversize samples to pieces of the largest length that fits, or keep the first of these."""
    lengths, caps, over = whole.lengths, whole.caps, whole.oversize
    if isinstance(lengths, Mapping) or lengths.ndim != 1:
        raise ValueError(
            "oversize='split' and 'truncate' cut samples along one axis, and need lengths [N]. Samples with "
            "several lengths can be skipped, left alone, or resized in the data set."
        )
    longest = caps.longest(int(lengths[over].max()))
    if longest < 1:
        raise ValueError(f"a sample of one position is above the budget {caps.text()}: no piece fits.")
    pieces = np.ones(len(lengths), dtype=np.int64)
    if split:
        pieces[over] = -(-lengths[over] // longest)
    index = np.repeat(np.arange(len(lengths)), pieces)
    first = np.cumsum(pieces) - pieces
    start = (np.arange(len(index)) - first[index]) * longest
    stop = np.where(above[index], np.minimum(start + longest, lengths[index]), lengths[index])
    charges, _, loads = caps.charge(stop - start)
    made = {"split": len(over), "pieces": int(pieces[over].sum())} if split else {"truncated": len(over)}
    return replace(
        whole,
        count=len(index),
        lengths=stop - start,
        charges=charges,
        loads=loads,
        index=index,
        bounds=np.stack([start, np.where(above[index], stop, -1)], axis=1),
        counts={**whole.counts, **made},
    )


def _complaint(lengths: Lengths, caps: Caps, over: Array) -> str:
    first = int(over[0])
    size = each(take(lengths, over[:1]), lambda a: a[0].tolist())
    more = f" (and {len(over) - 1} more)" if len(over) > 1 else ""
    return (
        f"sample {first}{more} of length {size} costs more than the budget {caps.text()} by itself. Raise the "
        "budget, or say what is to become of such samples: oversize='skip', 'alone', 'split' or 'truncate'."
    )

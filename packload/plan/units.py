"""What a plan deals out: samples, or pieces of samples, and what each is charged.

A sample that costs more than the budget by itself is oversize. What becomes of it is asked for:

============  ==========================================================================
``raise``     an error that names it (the default)
``skip``      it is in no batch
``alone``     it is a batch by itself, above the budget
``split``     it is cut to pieces as long as the budget allows, each a unit of its own
``truncate``  the first of these pieces is kept
============  ==========================================================================

All but the first are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..cost import Lengths
from .caps import SCALE, Caps, evaluate

Array = NDArray[Any]
Oversize = Literal["raise", "skip", "alone", "split", "truncate"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a sample: positions ``start`` to ``stop`` (excluded) of sample ``index``.

    It stands in a batch's list in place of the index. It is no integer on purpose: a data set that does not
    know pieces fails, where it would return the whole sample. :class:`packload.CutDataset` serves them.
    """

    index: int
    start: int
    stop: int


Item = int | Piece


@dataclass(frozen=True, eq=False)
class Units:
    """All units of a plan.

    Attributes:
        lengths: of each unit, [count], [count, D] or by field.
        charges: [budgets, count] int64; no rows without a budget.
        limits: [budgets] int64, what the charges of a bin may sum to.
        loads: [count], the cost that ranks are balanced by, as its function gives it.
        caps: budgets and costs.
        counts: how many samples were oversize, by what became of them, and the pieces they gave.
        oversize: indices of the oversize samples.
        index: [count] the sample of each unit; None where unit u is sample u.
        bounds: [count, 2] start and stop of pieces, stop -1 for a whole sample; None if all are whole.
    """

    lengths: Lengths
    charges: Array
    limits: Array
    loads: Array
    caps: Caps
    counts: dict[str, int]
    oversize: Array
    index: Array | None = None
    bounds: Array | None = None

    @property
    def count(self) -> int:
        """Number of units."""
        return len(self.loads)

    @cached_property
    def share(self) -> float:
        """The mean share of a bin that a unit takes up, in the budget where that is largest."""
        capped = np.minimum(self.charges, self.limits[:, None]).sum(axis=1).tolist()
        return max(
            (c / (limit * self.count) for c, limit in zip(capped, self.limits.tolist()) if c), default=0.0
        )

    @cached_property
    def weights(self) -> Array:
        """[count] int64: the loads in integers, whose sums are the same on every machine."""
        if self.loads.dtype.kind == "i":
            return self.loads
        return np.ceil(self.loads * self._scale).astype(np.int64)

    @property
    def _scale(self) -> float:
        return SCALE / (float(self.loads.max(initial=0.0)) or 1.0)

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

    def weigh(self, units: Array, splits: Array, padded: bool) -> tuple[Array, Array]:
        """The cost of bins [bins], each of one unit at least: as users see it, and in integers.

        Args:
            units: of all bins, one bin after another.
            splits: [bins + 1].
            padded: charge the largest lengths of a bin for each of its units.
        """
        starts = splits[:-1]
        if not len(starts):
            return self.loads[:0], self.weights[:0]
        if not padded:
            costs = np.add.reduceat(self.loads[units], starts)
            exact = costs.dtype.kind == "i"
            return costs, costs if exact else np.add.reduceat(self.weights[units], starts)
        largest = each(take(self.lengths, units), lambda a: np.maximum.reduceat(a, starts, axis=0))
        costs = evaluate(self.caps.load, largest, "cost") * np.diff(splits)
        exact = costs.dtype.kind == "i"
        return costs, costs if exact else np.ceil(costs * self._scale).astype(np.int64)


def take(lengths: Lengths, which: Array | slice) -> Lengths:
    """Lengths of some samples."""
    return each(lengths, lambda a: a[which])


def each(lengths: Lengths, do: Callable[[Array], Any]) -> Any:
    """Apply a function to lengths, or to those of every field."""
    return {k: do(v) for k, v in lengths.items()} if isinstance(lengths, Mapping) else do(lengths)


def make_units(lengths: Lengths, caps: Caps, oversize: Oversize) -> Units:
    """Charge samples, and do with oversize ones what is asked.

    Raises:
        ValueError: an oversize sample where ``oversize`` is ``"raise"``; a cost that is negative or not
            finite; samples to be cut that have more than one length, or do not fit even as one position.
    """
    if oversize not in get_args(Oversize):
        raise ValueError(f"oversize={oversize!r} is none of {get_args(Oversize)}.")
    charges, limits = caps.charge(lengths)
    above = np.asarray((charges > limits[:, None]).any(axis=0))
    over = np.flatnonzero(above)
    counts = {"skipped": 0, "alone": 0, "split": 0, "pieces": 0, "truncated": 0}
    units = Units(lengths, charges, limits, evaluate(caps.load, lengths, "cost"), caps, counts, over)
    if not len(over):
        return units
    if oversize == "raise":
        raise ValueError(_complaint(units))
    if oversize == "alone":
        return replace(units, counts={**counts, "alone": len(over)})
    if oversize == "skip":
        kept = np.flatnonzero(~above)
        return replace(
            units,
            lengths=take(lengths, kept),
            charges=charges[:, kept],
            loads=units.loads[kept],
            counts={**counts, "skipped": len(over)},
            index=kept,
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
    made = {"split": len(over), "pieces": int(pieces[over].sum())} if split else {"truncated": len(over)}
    return replace(
        whole,
        lengths=stop - start,
        charges=caps.charge(stop - start)[0],
        loads=evaluate(caps.load, stop - start, "cost"),
        counts={**whole.counts, **made},
        index=index,
        bounds=np.stack([start, np.where(above[index], stop, -1)], axis=1),
    )


def _complaint(units: Units) -> str:
    first, more = int(units.oversize[0]), len(units.oversize) - 1
    size = each(units.lengths, lambda a: a[first].tolist())
    others = f" (and {more} more)" if more else ""
    return (
        f"sample {first}{others} of length {size} is above the budget {units.caps.text()} by itself. Raise "
        "the budget, or say what is to become of such samples: "
        "oversize='skip', 'alone', 'split' or 'truncate'."
    )

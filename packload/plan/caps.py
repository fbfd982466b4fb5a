"""Budgets: what samples are charged, in integers that sums never exceed by rounding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cost import COSTS, Cost, Lengths, tokens

Array = NDArray[Any]
Budget = float | Mapping[str, float]

_SCALE = 2.0**40


@dataclass(frozen=True, eq=False)
class Caps:
    """Budgets and their costs, the first the one that ranks are balanced by.

    Attributes:
        names: of the budgets; empty without one.
        caps: as the user gave them.
        costs: one function each.
        load: the cost that ranks are balanced by.
    """

    names: tuple[str, ...]
    caps: tuple[float, ...]
    costs: tuple[Cost, ...]
    load: Cost

    def charge(self, lengths: Lengths) -> tuple[Array, Array, Array]:
        """Charges [budgets, N] int64, the limit [budgets] int64 of each, and loads [N].

        Integer costs are charged as they are. Others are charged in units of 2^-40 of their cap, rounded up,
        so that no sum is above the cap for want of digits.

        Raises:
            ValueError: a cost is negative or not finite, or has another shape than [N].
        """
        count = count_of(lengths)
        loads = _checked(self.load, lengths, count, "cost")
        charges = np.empty((len(self.caps), count), dtype=np.int64)
        limits = np.empty(len(self.caps), dtype=np.int64)
        for k, (name, cap, cost) in enumerate(zip(self.names, self.caps, self.costs)):
            charges[k], limits[k] = _integers(_checked(cost, lengths, count, name), cap)
        return charges, limits, loads

    def longest(self, bound: int) -> int:
        """The largest length up to ``bound`` that no budget refuses; 0 if there is none."""
        low, high = 0, bound
        while low < high:
            middle = (low + high + 1) // 2
            charges, limits, _ = self.charge(np.array([middle]))
            low, high = (middle, high) if (charges[:, 0] <= limits).all() else (low, middle - 1)
        return low

    def text(self) -> str:
        """The budgets, as the user gave them."""
        return ", ".join(f"{name} {cap}" for name, cap in zip(self.names, self.caps))


def make_caps(
    budget: Budget | None, cost: Cost | str | Mapping[str, Cost | str] | None, lengths: Lengths
) -> Caps:
    """Read a budget and costs as users give them.

    Args:
        budget: one cap, or caps by name; None where a policy has none.
        cost: one cost, or costs by name. By default tokens, and of a named budget the cost of that name.
        lengths: the samples' lengths.

    Raises:
        ValueError: a budget that is not above 0, without a cost, or a cost without a budget; lengths that
            tell of no cost by themselves.
    """
    if budget is None:
        if isinstance(cost, Mapping):
            raise ValueError(f"costs {sorted(cost)} are given by name, and there is no budget by name.")
        return Caps((), (), (), _default(cost, lengths))
    if not isinstance(budget, Mapping):
        if isinstance(cost, Mapping):
            raise ValueError(
                f"costs {sorted(cost)} are given by name: give a budget for each name, as a dict."
            )
        one = _default(cost, lengths)
        return Caps(("cost",), (_positive(budget, "budget"),), (one,), one)
    if not budget:
        raise ValueError("the budget has no caps.")
    if cost is not None and not isinstance(cost, Mapping):
        raise ValueError("there are several budgets: give costs by the same names, as a dict.")
    given = {**COSTS, **(cost or {})}
    lost = [n for n in budget if n not in given] + [n for n in cost or {} if n not in budget]
    if lost:
        raise ValueError(
            f"budget {sorted(budget)} and cost {sorted(cost or {})} differ in {lost}. A budget without a cost of "
            f"its name must be called one of {sorted(COSTS)}."
        )
    caps = tuple(_positive(cap, f"budget {name!r}") for name, cap in budget.items())
    costs = tuple(_named(given[name]) for name in budget)
    return Caps(tuple(budget), caps, costs, costs[0])


def read_lengths(lengths: Any) -> Lengths:
    """Lengths as arrays: [N], [N, D], or by field.

    Args:
        lengths: a list, an array or a tensor of integers, or a mapping of these by field.

    Raises:
        TypeError: something else, as a data set or another sampler.
        ValueError: a negative length, another rank, or fields of different numbers of samples.
    """
    if isinstance(lengths, Mapping):
        fields = {str(name): _array(value, f"lengths of {name!r}") for name, value in lengths.items()}
        if len({len(a) for a in fields.values()}) != 1:
            raise ValueError(f"fields have lengths of { {k: len(a) for k, a in fields.items()} } samples.")
        return fields
    return _array(lengths, "lengths")


def count_of(lengths: Lengths) -> int:
    """Number of samples."""
    return len(next(iter(lengths.values()))) if isinstance(lengths, Mapping) else len(lengths)


def _array(value: Any, what: str) -> Array:
    if isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
        raise TypeError(f"{what}: {type(value).__name__} is no list or array of lengths.")
    array = np.asarray(value)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise ValueError(f"{what} must be integers [N] or [N, D]; got {array.dtype} {list(array.shape)}.")
    array = array.astype(np.int64)
    if array.size and array.min() < 0:
        at = int(np.argwhere(array < 0)[0][0])
        raise ValueError(f"{what}: sample {at} has the negative length {array[at].tolist()}.")
    return array


def _default(cost: Cost | str | None, lengths: Lengths) -> Cost:
    if cost is not None:
        return _named(cost)
    if isinstance(lengths, Mapping) or lengths.ndim != 1:
        raise ValueError(
            "samples with several lengths need a cost, e.g. cost=packload.cost.area for [N, 2] of height and "
            "width, or packload.cost.tokens for their sum."
        )
    return tokens


def _named(cost: Cost | str) -> Cost:
    if isinstance(cost, str):
        if cost not in COSTS:
            raise ValueError(f"cost {cost!r} is none of {sorted(COSTS)}. Give a function of lengths instead.")
        return COSTS[cost]
    if not callable(cost):
        raise TypeError(f"cost must be a function of lengths or one of {sorted(COSTS)}; got {cost!r}.")
    return cost


def _positive(cap: float, what: str) -> float:
    if isinstance(cap, bool) or not isinstance(cap, (int, float, np.number)) or not 0 < cap < float("inf"):
        raise ValueError(f"{what} must be a number above 0; got {cap!r}.")
    return cap.item() if isinstance(cap, np.number) else cap


def _checked(cost: Cost, lengths: Lengths, count: int, name: str) -> Array:
    values = np.asarray(cost(lengths))
    if values.shape != (count,) or values.dtype.kind not in "iuf":
        raise ValueError(
            f"{name}: a cost takes the lengths of all samples and returns a number for each, [{count}]; "
            f"got {values.dtype} {list(values.shape)}."
        )
    wrong = np.flatnonzero(~((values >= 0) & (values < 2.0**62)))
    if len(wrong):
        raise ValueError(f"{name}: sample {wrong[0]} costs {values[wrong[0]]}, which is not in [0, 2^62).")
    return values.astype(np.int64) if values.dtype.kind in "iu" else values.astype(np.float64)


def _integers(values: Array, cap: float) -> tuple[Array, int]:
    if values.dtype.kind == "i":
        return values, min(int(cap), 2**62)
    scaled = np.ceil(values * _SCALE / cap)
    return np.minimum(scaled, 2.0**62).astype(np.int64), int(_SCALE)

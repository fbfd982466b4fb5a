"""Budgets, read as users give them, and what samples are charged: integers, so that sums are exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from ..cost import COSTS, Cost, Lengths, tokens

Array = NDArray[Any]
Budget = float | Mapping[str, float]
Costs = Cost | str | Mapping[str, Cost | str] | None

SCALE = 2**32
"""A cap in the scale of costs that are fractions, or are too large for exact sums."""

_LARGEST = 2.0**53


@dataclass(frozen=True, eq=False)
class Caps:
    """Budgets and their costs; ranks are balanced by the first.

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

    def charge(self, lengths: Lengths) -> tuple[Array, Array]:
        """Charges [budgets, N] int64 and the limit [budgets] int64 of each.

        Integer costs are charged as they are. Fractions, and costs under caps above 2^32, are charged in
        units of 2^-32 of their cap, rounded up, so that no sum exceeds a cap for want of digits. What is
        above the limit is charged limit + 1.

        Raises:
            ValueError: a cost is negative or not finite, or has another shape than [N].
        """
        count = count_of(lengths)
        charges = np.empty((len(self.caps), count), dtype=np.int64)
        limits = np.empty(len(self.caps), dtype=np.int64)
        for k, (name, cap, cost) in enumerate(zip(self.names, self.caps, self.costs)):
            values = evaluate(cost, lengths, f"cost {name!r}")
            exact = values.dtype.kind == "i" and cap <= SCALE
            limits[k] = int(cap) if exact else SCALE
            charges[k] = np.minimum(values if exact else np.ceil(values * (SCALE / cap)), limits[k] + 1)
        return charges, limits

    def longest(self, bound: int) -> int:
        """The largest length up to ``bound`` that no budget refuses; 0 if there is none."""
        low, high = 0, bound
        while low < high:
            middle = (low + high + 1) // 2
            charges, limits = self.charge(np.array([middle]))
            low, high = (middle, high) if (charges[:, 0] <= limits).all() else (low, middle - 1)
        return low

    def text(self) -> str:
        """The budgets, as the user gave them."""
        return ", ".join(f"{cap} ({name})" for name, cap in zip(self.names, self.caps))


def make_caps(budget: Budget | None, cost: Costs, lengths: Lengths) -> Caps:
    """Read a budget and costs.

    Args:
        budget: one cap, or caps by name; None where a policy has none.
        cost: one cost, or costs by name. By default tokens, and of a named budget the cost of that name.
        lengths: the samples' lengths.

    Raises:
        ValueError: a budget that is not above 0, a budget without a cost or a cost without a budget; no cost
            where samples have several lengths.
    """
    if isinstance(budget, Mapping):
        return _several(budget, cost)
    if isinstance(cost, Mapping):
        raise ValueError(f"costs are given by name, {list(cost)}: give budgets by the same names, as a dict.")
    load = _default(cost, lengths)
    if budget is None:
        return Caps((), (), (), load)
    name = cost if isinstance(cost, str) else getattr(load, "__name__", "cost")
    return Caps((name,), (_positive(budget, "budget"),), (load,), load)


def _several(budget: Mapping[str, float], cost: Costs) -> Caps:
    if not budget:
        raise ValueError("the budget has no caps.")
    if cost is not None and not isinstance(cost, Mapping):
        raise ValueError(
            f"budgets are given by name, {list(budget)}: give costs by the same names, as a dict."
        )
    own = {} if cost is None else dict(cost)
    known = {**COSTS, **own}
    lost = [n for n in budget if n not in known] + [n for n in own if n not in budget]
    if lost:
        raise ValueError(
            f"the budgets are {list(budget)}, their costs {list(own)}: there is no match for {lost}. Only "
            f"budgets called {list(COSTS)} need no cost of their own."
        )
    caps = tuple(_positive(cap, f"budget {name!r}") for name, cap in budget.items())
    costs = tuple(_named(known[name]) for name in budget)
    return Caps(tuple(map(str, budget)), caps, costs, costs[0])


def read_lengths(lengths: Any) -> Lengths:
    """Lengths as int64 arrays: [N], [N, D], or by field.

    Args:
        lengths: a list, an array or a tensor of integers, or a mapping of these by field.

    Raises:
        TypeError: something else, as a data set.
        ValueError: a negative length, another rank, or fields of different numbers of samples.
    """
    if not isinstance(lengths, Mapping):
        return _array(lengths, "lengths")
    if not lengths:
        raise ValueError("lengths are given by field, and there is no field.")
    fields = {str(name): _array(value, f"lengths of {name!r}") for name, value in lengths.items()}
    counts = {name: len(array) for name, array in fields.items()}
    if len(set(counts.values())) != 1:
        raise ValueError(f"fields have lengths of different numbers of samples: {counts}.")
    return fields


def count_of(lengths: Lengths) -> int:
    """Number of samples."""
    return len(next(iter(lengths.values()))) if isinstance(lengths, Mapping) else len(lengths)


def evaluate(cost: Cost, lengths: Lengths, name: str) -> Array:
    """Costs of all samples, [N] int64 or float64.

    Raises:
        ValueError: a cost is negative, not finite or above 2^53, or they have another shape than [N].
    """
    values = np.asarray(cost(lengths))
    if values.dtype.kind == "f":
        values = values.astype(np.float64)
    count = count_of(lengths)
    if values.shape != (count,) or values.dtype.kind not in "iuf":
        raise ValueError(
            f"{name}: a cost takes the lengths of all samples and returns a number for each, here [{count}]; "
            f"got {values.dtype} {list(values.shape)}."
        )
    wrong = np.flatnonzero(~((values >= 0) & (values <= _LARGEST)))
    if len(wrong):
        raise ValueError(f"{name}: sample {wrong[0]} costs {values[wrong[0]]}; a cost is from 0 to 2^53.")
    return values if values.dtype.kind == "f" else values.astype(np.int64)


def _array(value: Any, what: str) -> Array:
    if isinstance(value, (str, bytes, Dataset)) or not hasattr(value, "__len__"):
        raise TypeError(
            f"{what}: a {type(value).__name__} is no list, array or tensor of integers, one for each sample."
        )
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(
            f"{what} must be integers [N] or [N, D]; got a {type(value).__name__}: {error}"
        ) from None
    if array.size == 0:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or 0 in array.shape[1:]:
        raise ValueError(f"{what} must be integers [N] or [N, D]; got {array.dtype} {list(array.shape)}.")
    if array.dtype.kind == "u" and array.size and array.max() >= 2**63:
        raise ValueError(f"{what}: {array.max()} is more than 64 bits with a sign hold.")
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
            "samples with several lengths need a cost, e.g. cost=packload.cost.area for heights and widths "
            "[N, 2], packload.cost.tokens for their sum, packload.cost.of('text') for those of a field."
        )
    return tokens


def _named(cost: Cost | str) -> Cost:
    if isinstance(cost, str):
        if cost not in COSTS:
            raise ValueError(f"cost {cost!r} is none of {list(COSTS)}. Give a function of lengths instead.")
        return COSTS[cost]
    if not callable(cost):
        raise TypeError(f"a cost is a function of lengths, or one of {list(COSTS)}; got {cost!r}.")
    return cost


def _positive(cap: float, what: str) -> float:
    if isinstance(cap, bool) or not isinstance(cap, (int, float, np.number)) or not 0 < cap < float("inf"):
        raise ValueError(f"{what} must be a number above 0; got {cap!r}.")
    return cap.item() if isinstance(cap, np.number) else cap

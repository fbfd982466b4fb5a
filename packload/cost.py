"""Cost models: what a sample is charged in a budget.

A cost is a function from lengths to costs, for all samples at once: lengths [N] (or [N, D] where a sample
has several, as height and width) give costs [N]. It must not fall when a length grows. Any function of this
form will do; these are ready:

==================  ==========================  =====================================
cost                of lengths                  is
==================  ==========================  =====================================
:func:`tokens`      [N], [N, D]                 n, the sum of a sample's lengths
:func:`area`        [N, 2]                      h * w
:func:`pair_cells`  [N], [N, 2]                 n * n, n * m
:func:`samples`     [N], [N, D]                 1
:class:`quadratic`  [N]                         a * n + b * n^2
:class:`of`         by field                    another cost, of one field
==================  ==========================  =====================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Lengths = Array | Mapping[str, Array]
"""Lengths of all samples: [N], [N, D], or several fields of one N by name."""

Cost = Callable[[Any], Array]


def tokens(lengths: Array) -> Array:
    """n: positions, the sum over a sample's lengths if it has several. [N] or [N, D] -> [N].

    Raises:
        ValueError: a sum that 64 bits do not hold.
    """
    one = _one_field(lengths, "tokens")
    if one.ndim == 1:
        return one
    if one.size and float(one.max()) * one.shape[1] >= 2.0**62:
        raise ValueError(f"lengths up to {one.max()} have a sum that 64 bits do not hold.")
    return one.sum(axis=1)


def area(lengths: Array) -> Array:
    """h * w. [N, 2] -> [N].

    Raises:
        ValueError: lengths of another shape.
    """
    one = _one_field(lengths, "area")
    if one.ndim != 2 or one.shape[1] != 2:
        raise ValueError(
            f"area needs lengths [N, 2], height and width of each sample; got {list(one.shape)}."
        )
    return _product(one[:, 0], one[:, 1])


def pair_cells(lengths: Array) -> Array:
    """n * n, or n * m if a sample has two lengths. [N] or [N, 2] -> [N].

    Raises:
        ValueError: lengths of another shape.
    """
    one = _one_field(lengths, "pair_cells")
    if one.ndim == 1:
        return _product(one, one)
    if one.shape[1] != 2:
        raise ValueError(f"pair_cells needs lengths [N] or [N, 2]; got {list(one.shape)}.")
    return _product(one[:, 0], one[:, 1])


def samples(lengths: Lengths) -> Array:
    """1 for each sample: a cap on the batch size. Any lengths -> [N]."""
    one = next(iter(lengths.values())) if isinstance(lengths, Mapping) else lengths
    return np.ones(len(one), dtype=np.int64)


@dataclass(frozen=True)
class quadratic:
    """a * n + b * n^2: a transformer's work, linear in its layers and quadratic in its attention. [N] -> [N].

    Attributes:
        a: cost of a position, >= 0.
        b: cost of a pair of positions, >= 0.

    Raises:
        ValueError: a or b is below 0; lengths of another shape.
    """

    a: float
    b: float

    def __post_init__(self) -> None:
        if self.a < 0 or self.b < 0:
            raise ValueError(f"{self}: a cost grows with length, so a and b must be 0 or above.")

    def __call__(self, lengths: Array) -> Array:
        one = _one_field(lengths, "quadratic")
        if one.ndim != 1:
            raise ValueError(f"quadratic needs lengths [N]; got {list(one.shape)}.")
        return self.a * one + self.b * _product(one, one)


@dataclass(frozen=True)
class of:
    """The cost of one field, where lengths are given by field: ``of("image", area)``.

    Attributes:
        field: its name.
        cost: what it is charged, a function of its lengths.

    Raises:
        ValueError: lengths without this field.
    """

    field: str
    cost: Cost = tokens

    def __call__(self, lengths: Lengths) -> Array:
        if not isinstance(lengths, Mapping) or self.field not in lengths:
            has = f"of the fields {list(lengths)}" if isinstance(lengths, Mapping) else "without names"
            raise ValueError(f"the cost is that of the field {self.field!r}; there are lengths {has}.")
        return self.cost(lengths[self.field])


#: Costs that can be asked for by name.
COSTS: dict[str, Cost] = {"tokens": tokens, "area": area, "pair_cells": pair_cells, "samples": samples}


def _one_field(lengths: Lengths, name: str) -> Array:
    if isinstance(lengths, Mapping):
        raise ValueError(
            f"lengths are given by field ({list(lengths)}): say which one {name} is charged for, e.g. "
            f"packload.cost.of({next(iter(lengths))!r}, packload.cost.{name})."
        )
    return lengths


def _product(a: Array, b: Array) -> Array:
    """a * b, which must be exact in 64 bits."""
    if len(a) and float(a.max()) * float(b.max()) >= 2.0**62:
        raise ValueError(f"lengths {a.max()} and {b.max()} have a product that 64 bits do not hold.")
    return a * b

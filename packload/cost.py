"""Cost models: what a sample is charged in a budget.

A cost is a function from lengths to costs, for all samples at once: lengths [N] (or [N, D] where a sample
has several, as height and width) give costs [N]. It must not fall when a length grows. The functions here
are plain: write your own in the same form.

==================  ==========================  =====================================
cost                of lengths                  is
==================  ==========================  =====================================
:func:`tokens`      [N], [N, D]                 n, the sum of a sample's lengths
:func:`area`        [N, 2]                      h * w
:func:`pair_cells`  [N], [N, 2]                 n * n, n * m
:func:`samples`     [N], [N, D]                 1
:func:`quadratic`   [N]                         a * n + b * n^2
==================  ==========================  =====================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Lengths = Array | Mapping[str, Array]
"""Lengths of all samples: [N], [N, D], or several fields of one N by name."""

Cost = Callable[[Any], Array]


def tokens(lengths: Array) -> Array:
    """n: positions, the sum over a sample's lengths if it has several. [N] or [N, D] -> [N]."""
    return lengths if lengths.ndim == 1 else lengths.sum(axis=1)


def area(lengths: Array) -> Array:
    """h * w. [N, 2] -> [N].

    Raises:
        ValueError: lengths of another shape.
    """
    if lengths.ndim != 2 or lengths.shape[1] != 2:
        raise ValueError(f"area needs lengths [N, 2], height and width of each sample; got {lengths.shape}.")
    return _product(lengths[:, 0], lengths[:, 1])


def pair_cells(lengths: Array) -> Array:
    """n * n, or n * m if a sample has two lengths. [N] or [N, 2] -> [N].

    Raises:
        ValueError: lengths of another shape.
    """
    if lengths.ndim == 1:
        return _product(lengths, lengths)
    if lengths.shape[1] != 2:
        raise ValueError(f"pair_cells needs lengths [N] or [N, 2]; got {lengths.shape}.")
    return _product(lengths[:, 0], lengths[:, 1])


def samples(lengths: Array) -> Array:
    """1 for each sample: a cap on the batch size. [N] or [N, D] -> [N]."""
    return np.ones(len(lengths), dtype=np.int64)


def quadratic(a: float, b: float) -> Cost:
    """a * n + b * n^2: a transformer's work, linear in its layers and quadratic in its attention.

    Args:
        a: cost of a position, >= 0.
        b: cost of a pair of positions, >= 0.

    Returns:
        a cost of lengths [N].
    """
    if a < 0 or b < 0:
        raise ValueError(f"quadratic needs a >= 0 and b >= 0, so that cost grows with length; got {a}, {b}.")

    def cost(lengths: Array) -> Array:
        if lengths.ndim != 1:
            raise ValueError(f"quadratic needs lengths [N]; got {lengths.shape}.")
        return a * lengths + b * _product(lengths, lengths)

    return cost


def of(field: str, cost: Cost = tokens) -> Cost:
    """The cost of one field, where lengths are given by field.

    Args:
        field: a key of the mapping of lengths.
        cost: what that field is charged.
    """

    def charge(lengths: Mapping[str, Array]) -> Array:
        if not isinstance(lengths, Mapping) or field not in lengths:
            has = f"fields {sorted(lengths)}" if isinstance(lengths, Mapping) else "one field without a name"
            raise ValueError(f"the cost is that of field {field!r}, and lengths have {has}.")
        return cost(lengths[field])

    return charge


#: Costs that can be asked for by name.
COSTS: dict[str, Cost] = {"tokens": tokens, "area": area, "pair_cells": pair_cells, "samples": samples}


def _product(a: Array, b: Array) -> Array:
    """a * b, which for integers must fit into 62 bits."""
    if len(a) and float(a.max()) * float(b.max()) >= 2.0**62:
        raise ValueError(f"lengths {a.max()} and {b.max()} have a product that 64 bits do not hold.")
    return a * b

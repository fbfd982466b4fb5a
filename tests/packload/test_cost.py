"""Costs of lengths."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from packload import cost

N = np.array([0, 3, 70_000])
HW = np.array([[2, 3], [0, 5], [4000, 3000]])


def test_costs_are_what_they_are_called():
    assert cost.tokens(N).tolist() == [0, 3, 70_000]
    assert cost.tokens(HW).tolist() == [5, 5, 7000]
    assert cost.area(HW).tolist() == [6, 0, 12_000_000]
    assert cost.pair_cells(N).tolist() == [0, 9, 4_900_000_000]
    assert cost.pair_cells(HW).tolist() == [6, 0, 12_000_000]
    assert cost.samples(N).tolist() == cost.samples({"x": HW}).tolist() == [1, 1, 1]
    assert cost.quadratic(2, 3)(N).tolist() == [0, 33, 140_000 + 3 * 4_900_000_000]
    assert cost.quadratic(0.5, 0)(N).tolist() == [0, 1.5, 35_000]
    assert cost.of("x")({"x": N, "y": HW}).tolist() == [0, 3, 70_000]
    assert cost.of("y", cost.area)({"x": N, "y": HW}).tolist() == [6, 0, 12_000_000]


def test_costs_of_no_samples_are_none():
    for function in (cost.tokens, cost.pair_cells, cost.samples, cost.quadratic(1, 1)):
        assert function(N[:0]).tolist() == []
    assert cost.area(HW[:0]).tolist() == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cost.area(N), r"area needs lengths \[N, 2\]"),
        (lambda: cost.pair_cells(np.ones((2, 3), dtype=int)), "pair_cells needs"),
        (lambda: cost.quadratic(1, 1)(HW), "quadratic needs"),
        (lambda: cost.quadratic(-1, 1), "must be 0 or above"),
        (lambda: cost.of("z")({"x": N}), r"field 'z'; there are lengths of the fields \['x'\]"),
        (lambda: cost.of("z")(N), "without names"),
        (lambda: cost.tokens({"x": N}), r"packload.cost.of\('x', packload.cost.tokens\)"),
        (lambda: cost.pair_cells(np.array([2**31])), "64 bits do not hold"),
        (lambda: cost.tokens(np.full((3, 4), 2**62)), "64 bits do not hold"),
    ],
)
def test_lengths_that_do_not_fit_a_cost_are_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_costs_can_be_pickled():
    for function in (*cost.COSTS.values(), cost.quadratic(1, 2), cost.of("x", cost.area)):
        assert pickle.loads(pickle.dumps(function)) == function

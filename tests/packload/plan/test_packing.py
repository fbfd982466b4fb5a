"""Packing, against plain loops over lists of bins."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packload.cost import area, quadratic, tokens
from packload.plan.caps import make_caps
from packload.plan.packing import UNLIMITED, decreasing, make_shelf, neighbours, runs

costs_and_cap = st.integers(1, 60).flatmap(
    lambda cap: st.tuples(st.lists(st.integers(0, cap), max_size=80), st.just(cap))
)


def best_fit(costs, cap, most, width):
    """Best fit into at most ``width`` open bins, as the textbook has it."""
    free, bins = {}, []
    for cost in costs:
        fitting = [b for b in free if free[b] >= cost]
        if fitting:
            b = min(fitting, key=lambda b: (free[b], b))
        elif len(bins) < most:
            if len(free) == width:
                del free[min(free, key=lambda b: (free[b], b))]
            b = len(bins)
            bins.append([])
            free[b] = cap
        else:
            break
        bins[b].append(cost)
        free[b] -= cost
    return bins


def grouped(costs, chosen):
    bins = [[] for _ in range(max(chosen, default=-1) + 1)]
    for cost, b in zip(costs, chosen):
        bins[b].append(cost)
    return bins


@given(costs_and_cap, st.integers(1, 9), st.integers(1, 12))
def test_one_cap_is_best_fit(drawn, width, most):
    costs, cap = drawn
    shelf = make_shelf(np.array([cap]), most, width)
    chosen = shelf.fill(np.array([costs], dtype=np.int64))
    assert grouped(costs, chosen) == best_fit(costs, cap, most, width)
    assert shelf.opened == len(set(chosen))


@given(costs_and_cap, st.integers(0, 80))
def test_filling_goes_on_where_it_stopped(drawn, cut):
    costs, cap = drawn
    shelf = make_shelf(np.array([cap]), max(len(costs), 1), 4)
    parts = [np.array([part], dtype=np.int64) for part in (costs[:cut], costs[cut:])]
    chosen = [b for part in parts for b in shelf.fill(part)]
    assert grouped(costs, chosen) == best_fit(costs, cap, UNLIMITED, 4)


@given(costs_and_cap)
def test_decreasing_is_best_fit_of_the_sorted(drawn):
    costs, cap = drawn
    shelf = make_shelf(np.array([cap]), max(len(costs), 1), UNLIMITED)
    chosen = decreasing(shelf, np.array([costs], dtype=np.int64), np.array([cap]))
    expected = best_fit(sorted(costs, reverse=True), cap, UNLIMITED, UNLIMITED)
    assert sorted(map(sorted, grouped(costs, chosen))) == sorted(map(sorted, expected))


def test_decreasing_places_all_or_nothing():
    charges = np.array([[5, 6, 7]])
    assert decreasing(make_shelf(np.array([10]), 2, UNLIMITED), charges, np.array([10])) == []
    assert sorted(decreasing(make_shelf(np.array([10]), 3, UNLIMITED), charges, np.array([10]))) == [0, 1, 2]


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), max_size=80),
    st.integers(1, 9),
    st.integers(1, 12),
)
def test_several_caps_are_all_kept_and_no_bin_is_opened_in_vain(costs, width, most):
    caps = [20, 9]
    shelf = make_shelf(np.array(caps), most, width)
    chosen = shelf.fill(np.array(costs, dtype=np.int64).reshape(-1, 2).T)
    bins = grouped(costs, chosen)
    assert len(bins) <= most
    for bin_ in bins:
        assert sum(a for a, _ in bin_) <= 20 and sum(b for _, b in bin_) <= 9
    if len(chosen) < len(costs):
        assert len(bins) == most
    if costs and width > 1:
        assert len(bins) == 1 or sum(a for a, _ in costs) > 20 or sum(b for _, b in costs) > 9


def test_a_unit_above_the_cap_gets_a_bin_of_its_own():
    for limits in ([10], [10, 10]):
        charges = np.array([[11, 3, 4, 11, 0]] * len(limits))
        chosen = make_shelf(np.array(limits), 5, 3).fill(charges)
        assert chosen[1] == chosen[2] == chosen[4] and len(set(chosen)) == 3


@pytest.mark.parametrize("cost", [tokens, quadratic(1, 1), quadratic(0.5, 0.01)])
@given(lengths=st.lists(st.integers(0, 30), max_size=60))
def test_runs_are_as_long_as_the_padded_cost_allows(cost, lengths):
    lengths = np.sort(np.array(lengths, dtype=np.int64))
    caps = make_caps(1000.0, cost, lengths)
    splits = runs(caps, lengths)
    assert splits[0] == 0 and splits[-1] == len(lengths) and (np.diff(splits) > 0).all()
    largest = [float(cost(np.array([n]))[0]) for n in lengths.tolist()]
    for start, stop in zip(splits[:-1], splits[1:]):
        assert largest[stop - 1] * (stop - start) <= 1000 or stop - start == 1
        if stop < len(lengths):
            assert largest[stop] * (stop + 1 - start) > 1000 - 1e-3


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), max_size=60))
def test_runs_of_images_pad_to_the_largest_height_and_width(sizes):
    sizes = np.array(sizes, dtype=np.int64).reshape(-1, 2)
    splits = runs(make_caps(2000, area, sizes), sizes)
    assert splits[0] == 0 and splits[-1] == len(sizes) and (np.diff(splits) > 0).all()
    for start, stop in zip(splits[:-1], splits[1:]):
        assert sizes[start:stop].max(axis=0).prod() * (stop - start) <= 2000
        if stop < len(sizes):
            assert sizes[start : stop + 1].max(axis=0).prod() * (stop + 1 - start) > 2000


def test_neighbours_are_alike_in_all_lengths():
    rng = np.random.default_rng(0)
    assert np.array_equal(neighbours(np.array([3, 1, 2]), 9), [1, 2, 0])
    sizes = rng.integers(1, 1000, (4096, 2))
    order = neighbours(sizes, 64)
    assert sorted(order.tolist()) == list(range(4096))
    blocks = sizes[order].reshape(64, 64, 2)
    assert np.ptp(blocks, axis=1).mean() < 150
    by_field = neighbours({"h": sizes[:, 0], "w": sizes[:, 1]}, 64)
    assert np.array_equal(order, by_field)

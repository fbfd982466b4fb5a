"""Windows: an even number of bins, dealt to ranks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from packload.plan import draw
from packload.plan.caps import make_caps
from packload.plan.units import Units, make_units
from packload.plan.window import Bins, deal, even, select


def units_of(lengths) -> Units:
    lengths = np.array(lengths, dtype=np.int64)
    return make_units(lengths, make_caps(None, None, lengths), "raise")


def bins_of(sizes) -> Bins:
    return Bins(np.arange(sum(sizes)), np.append(np.int64(0), np.cumsum(sizes)).astype(np.int64), sum(sizes))


def members(bins: Bins) -> list[list[int]]:
    return [b.tolist() for b in np.split(bins.units, bins.splits[1:-1])] if len(bins) else []


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.integers(1, 9))
def test_even_halves_the_largest_bins_and_keeps_each_inside_its_own(sizes, ranks):
    bins = bins_of(sizes)
    made = even(bins, ranks, False, units_of([1] * sum(sizes)), False)
    assert len(made) % ranks == 0 and len(made) - len(bins) < ranks
    old = [set(b) for b in members(bins)]
    new = members(made)
    assert all(b and any(set(b) <= o for o in old) for b in new)
    flat = [u for b in new for u in b]
    assert set(flat) == set(range(sum(sizes)))
    assert len(flat) - sum(sizes) == made.repeated == max(0, len(made) - sum(sizes))


def test_even_repeats_the_cheapest_units_where_none_can_be_split():
    made = even(bins_of([1, 1, 1]), 5, False, units_of([9, 1, 5]), False)
    assert members(made) == [[0], [1], [2], [1], [2]] and made.repeated == 2


def test_even_drops_the_cheapest_bins():
    made = even(bins_of([1, 2, 1, 1, 1]), 2, True, units_of([9, 1, 1, 1, 8, 7]), False)
    assert members(made) == [[0], [1, 2], [4], [5]]


@given(st.lists(st.integers(0, 100), min_size=1, max_size=20), st.integers(1, 5), st.integers(0, 99))
def test_the_bins_of_a_step_are_neighbours_in_cost(costs, ranks, cursor):
    weights = np.array(costs * ranks)
    cells = deal(weights, ranks, (0, 0, cursor))
    assert sorted(cells.tolist()) == list(range(len(weights)))
    steps = sorted(sorted(weights[step].tolist()) for step in cells.reshape(-1, ranks))
    assert [w for step in steps for w in step] == sorted(weights.tolist())


def test_no_rank_gets_the_dear_bins_and_no_step_its_place():
    weights = np.arange(8000)
    grid = weights[deal(weights, 8, (0, 0, 0))].reshape(-1, 8)
    shares = np.bincount(grid.argmax(axis=1), minlength=8) / len(grid)
    assert (abs(shares - 1 / 8) < 0.05).all()
    assert abs(np.corrcoef(grid[:-1, 0], grid[1:, 0])[0, 1]) < 0.1


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.data())
def test_select_takes_bins_in_the_order_asked_for(sizes, data):
    which = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=8))
    bins = bins_of(sizes)
    taken = members(select(bins, np.array(which, dtype=np.int64)))
    assert taken == [members(bins)[b] for b in which]


def test_draws_depend_on_their_key_alone_and_all_of_it():
    keys = [
        (0, 0, 0, 0),
        (1, 0, 0, 0),
        (0, 1, 0, 0),
        (0, 0, 1, 0),
        (0, 0, 0, 1),
        (-1, 0, 0, 0),
        (2**64, 1, 1, 1),
    ]
    drawn = [draw.bits(50, *key).tolist() for key in keys]
    assert len({tuple(d) for d in drawn}) == len(keys)
    assert len(set(sum(drawn, []))) == 50 * len(keys)
    assert draw.bits(20, *keys[0]).tolist() == drawn[0][:20]
    assert draw.bits(0, 0, 0, 0).tolist() == [] and draw.permutation(0, 0, 0, 0).tolist() == []


def test_permutations_are_uniform():
    seen = np.array([draw.permutation(6, seed, 0, 0) for seed in range(6000)])
    counts = np.stack([np.bincount(column, minlength=6) for column in seen.T])
    assert (np.sort(seen, axis=1) == np.arange(6)).all()
    assert ((counts - 1000) ** 2 / 1000).sum() < 60  # chi-squared, 25 degrees of freedom: p < 1e-4

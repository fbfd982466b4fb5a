import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from packload.shards.order import windowed_order

sizes = st.lists(st.integers(0, 20), min_size=1, max_size=12)


def shard_of(sizes):
    return np.repeat(np.arange(len(sizes)), sizes)


@given(sizes, st.integers(1, 15), st.integers(-5, 2**70), st.integers(0, 9))
def test_it_is_a_permutation_that_mixes_a_window_of_shards(sizes, window, seed, epoch):
    shards = shard_of(sizes)
    order = windowed_order(shards, window, seed, epoch)
    assert sorted(order.tolist()) == list(range(len(shards)))
    assert (order == windowed_order(shards, window, seed, epoch)).all()
    runs = shards[order].tolist()
    for shard in set(runs):
        first, last = runs.index(shard), len(runs) - 1 - runs[::-1].index(shard)
        assert len(set(runs[first : last + 1])) <= window


def test_epochs_and_seeds_differ_and_all_shards_are_mixed():
    shards = shard_of([100] * 4)
    one = windowed_order(shards, 2, 0, 0)
    assert (one != windowed_order(shards, 2, 0, 1)).any() and (one != windowed_order(shards, 2, 1, 0)).any()
    together = {frozenset(shards[windowed_order(shards, 2, 0, e)][:200].tolist()) for e in range(40)}
    assert len(together) == 6
    assert len(set(shards[one[:50]].tolist())) == 2


def test_every_place_is_as_likely_as_any_other():
    shards = shard_of([5, 5])
    places = [windowed_order(shards, 2, 0, e).tolist().index(3) for e in range(3000)]
    counts = np.bincount(places, minlength=10)
    assert ((counts - 300) ** 2 / 300).sum() < 30


def test_a_million_units_take_little_time_and_no_shards_are_fine():
    assert len(windowed_order(shard_of([250_000] * 4), 2, 0, 0)) == 10**6
    assert windowed_order(np.zeros(0, np.int64), 3, 0, 0).tolist() == []

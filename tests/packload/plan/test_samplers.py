"""The four samplers: every sample once, equal steps on all ranks, budgets kept, batches of about one cost."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

import packload
from packload import BucketBatchSampler, BudgetBatchSampler, FixedBatchSampler, Piece, RandomBatchSampler
from packload.plan import planner
from packload.plan.policy import STEPS
from tests.packload.plan.plans import POLICIES, all_ranks, occurrences, some_lengths

every_policy = pytest.mark.parametrize("name", POLICIES)


@every_policy
@given(
    lengths=st.lists(st.integers(0, 49), max_size=60),
    ranks=st.integers(1, 5),
    epoch=st.integers(0, 3),
    seed=st.integers(-5, 2**70),
)
def test_every_sample_is_served_once_on_equal_steps(name, lengths, ranks, epoch, seed):
    samplers = [POLICIES[name](lengths, rank=r, world_size=ranks, seed=seed) for r in range(ranks)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    batches = [list(sampler) for sampler in samplers]
    assert {len(b) for b in batches} == {len(samplers[0])}
    assert all(batch for rank in batches for batch in rank)
    seen = occurrences(batches)
    counts = samplers[0].counts
    assert set(seen) == set(range(len(lengths)))
    assert seen.total() - len(lengths) == counts["repeated"] < ranks
    assert counts["dropped"] == 0


@every_policy
@given(lengths=st.lists(st.integers(0, 49), max_size=60), ranks=st.integers(1, 5))
def test_what_is_dropped_is_counted(name, lengths, ranks):
    samplers = [POLICIES[name](lengths, rank=r, world_size=ranks, drop_last=True) for r in range(ranks)]
    batches = [list(sampler) for sampler in samplers]
    assert {len(b) for b in batches} == {len(samplers[0])}
    assert all(batch for rank in batches for batch in rank)
    seen = occurrences(batches)
    assert all(times == 1 for times in seen.values())
    counts = samplers[0].counts
    assert len(lengths) - len(seen) == counts["dropped"] and counts["repeated"] == 0


@every_policy
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_of_many_windows(name, ranks, drop_last):
    lengths = some_lengths(95_017 if name == "budget_of_small_samples" else 2 * STEPS * 3 * 10 + 17)
    sampler = POLICIES[name](lengths, rank=0, world_size=ranks, drop_last=drop_last)
    windows = list(sampler.windows())
    assert len(windows) > 1
    assert all(window.steps >= 100 for window in windows)
    assert [w.cursor for w in windows] == [0, *(w.end for w in windows[:-1])]
    seen = np.concatenate([w.indices for w in windows])
    assert len(seen) == len(lengths) - sampler.counts["dropped"] + sampler.counts["repeated"]
    assert len(np.unique(seen)) == len(lengths) - sampler.counts["dropped"]
    assert sampler.counts["dropped"] <= ranks * 1000 and sampler.counts["repeated"] < ranks
    assert all((window.sizes > 0).all() for window in windows)
    assert all(window.dropped == window.repeated == 0 for window in windows[:-1])
    batch = list(sampler)[windows[0].steps]
    assert batch == windows[1].cell(0, 0)


@given(lengths=st.lists(st.integers(1, 49), min_size=1, max_size=80), ranks=st.integers(1, 4))
def test_no_batch_is_above_a_packed_budget(lengths, ranks):
    for rank in all_ranks(POLICIES["budget_of_large_samples"], lengths, ranks):
        assert all(sum(lengths[i] for i in batch) <= 60 for batch in rank)
    for rank in all_ranks(POLICIES["several_budgets"], lengths, ranks):
        for batch in rank:
            assert len(batch) <= 4
            assert sum(lengths[i] for i in batch) <= 100
            assert sum(lengths[i] ** 2 for i in batch) <= 3000


@given(lengths=st.lists(st.integers(1, 49), min_size=1, max_size=80), ranks=st.integers(1, 4))
def test_no_batch_is_above_a_padded_budget(lengths, ranks):
    for rank in all_ranks(POLICIES["budget_padded"], lengths, ranks):
        assert all(max(lengths[i] for i in batch) * len(batch) <= 100 for batch in rank)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=60), st.booleans())
def test_no_batch_of_images_is_above_a_budget_of_area(sizes, padded):
    sampler = BudgetBatchSampler(sizes, 100, cost=packload.cost.area, padded=padded)
    for batch in sampler:
        h, w = zip(*(sizes[i] for i in batch))
        assert (max(h) * max(w) * len(batch) if padded else sum(a * b for a, b in zip(h, w))) <= 100
    assert sorted(i for batch in sampler for i in batch) == list(range(len(sizes)))


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=60), st.floats(0.1, 0.9))
def test_fractions_are_summed_without_rounding_above_the_cap(lengths, a):
    cap = a * 10**6
    for batch in BudgetBatchSampler(lengths, cap, cost=lambda n: a * n):
        assert sum(Fraction(float(a * lengths[i])) for i in batch) <= Fraction(cap)


def test_costs_of_several_fields_share_a_budget():
    lengths = {"text": [5, 9, 2, 7], "image": [[2, 3], [1, 1], [4, 4], [2, 2]]}
    cost = {
        "text": packload.cost.of("text"),
        "image": packload.cost.of("image", packload.cost.area),
    }
    batches = list(BudgetBatchSampler(lengths, {"text": 12, "image": 20}, cost=cost))
    assert sorted(i for b in batches for i in b) == [0, 1, 2, 3]
    for batch in batches:
        assert sum(lengths["text"][i] for i in batch) <= 12
        assert sum(h * w for h, w in (lengths["image"][i] for i in batch)) <= 20


def test_padded_and_packed_accounting_differ():
    lengths = [1, 1, 1, 1, 1, 20]
    padded = sorted(sorted(b) for b in BudgetBatchSampler(lengths, 50, padded=True))
    assert padded == [[0, 1, 2, 3, 4], [5]]
    assert [sorted(b) for b in BudgetBatchSampler(lengths, 50)] == [[0, 1, 2, 3, 4, 5]]


def test_a_sample_above_the_budget_is_an_error_that_names_it():
    with pytest.raises(ValueError, match=r"sample 1 of length 100 is above the budget 50 \(tokens\)"):
        BudgetBatchSampler([3, 100, 4], 50)
    with pytest.raises(ValueError, match=r"sample 1 \(and 1 more\) of length"):
        BudgetBatchSampler([3, 100, 4, 51], 50)
    with pytest.raises(ValueError, match="is none of"):
        BudgetBatchSampler([3], 50, oversize="drop")


@pytest.mark.parametrize(
    ("oversize", "items", "counted"),
    [
        ("skip", [0, 2], {"skipped": 1}),
        ("alone", [0, 1, 2], {"alone": 1}),
        ("split", [0, 2, Piece(1, 0, 50), Piece(1, 50, 100)], {"split": 1, "pieces": 2}),
        ("truncate", [0, 2, Piece(1, 0, 50)], {"truncated": 1}),
    ],
)
def test_what_becomes_of_an_oversize_sample(oversize, items, counted):
    sampler = BudgetBatchSampler([3, 100, 4], 50, oversize=oversize)
    batches = list(sampler)
    assert Counter(i for b in batches for i in b) == Counter(items)
    if oversize == "alone":
        assert [1] in batches
    if oversize == "split":
        assert {len(b) for b in batches if isinstance(b[0], Piece)} == {1}
    assert {k: v for k, v in sampler.counts.items() if v} == counted


@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=40),
    st.sampled_from(["skip", "alone", "split", "truncate"]),
    st.booleans(),
    st.integers(1, 3),
)
def test_oversize_samples_are_all_accounted_for(lengths, oversize, padded, ranks):
    cap = 60

    def make(lengths, **kw):
        return BudgetBatchSampler(lengths, cap, oversize=oversize, padded=padded, **kw)

    batches = [batch for rank in all_ranks(make, lengths, ranks) for batch in rank]
    over = [i for i, n in enumerate(lengths) if n > cap]
    covered = Counter()
    for batch in batches:
        sizes = [item.stop - item.start if isinstance(item, Piece) else lengths[item] for item in batch]
        cost = max(sizes) * len(sizes) if padded else sum(sizes)
        assert cost <= cap or (oversize == "alone" and len(batch) == 1 and batch[0] in over)
        for item, size in set(zip(batch, sizes)):
            covered[item.index if isinstance(item, Piece) else item] += size
    expected = {i: n for i, n in enumerate(lengths) if n <= cap or oversize in ("alone", "split")}
    if oversize == "truncate":
        expected.update({i: cap for i in over})
    sampler = make(lengths, rank=0, world_size=ranks)
    if sampler.counts["repeated"]:
        assert set(covered) == set(expected)
    else:
        assert covered == Counter(expected) and set(covered) == set(expected)
    assert sum(sampler.counts[k] for k in ("skipped", "alone", "split", "truncated")) == len(over)


def test_pieces_need_one_length_and_room_for_a_position():
    with pytest.raises(ValueError, match="need lengths"):
        BudgetBatchSampler([[9, 9]], 50, cost="area", oversize="split")
    with pytest.raises(ValueError, match="no piece fits"):
        BudgetBatchSampler([9], 5, cost=lambda n: 10 * n, oversize="truncate")


def test_pieces_follow_a_cost_that_is_not_linear():
    (pieces,) = zip(*BudgetBatchSampler([100], 50, cost="pair_cells", oversize="split"))
    assert sorted((p.start, p.stop) for p in pieces) == [(s, min(s + 7, 100)) for s in range(0, 100, 7)]


@pytest.mark.parametrize(
    ("lengths", "budget"),
    [
        *((("small", cap)) for cap in (8192, 8193, 12000)),
        *((("large", cap)) for cap in (8192, 8193, 12000)),
    ],
)
def test_budgets_are_full_and_ranks_level(lengths, budget):
    rng = np.random.default_rng(0)
    if lengths == "small":
        values, least = np.exp(rng.normal(np.log(499) - 0.5, 1, 100_000)), 0.99
    else:
        values, least = rng.normal(3016, 1500, 30_000), 0.98
    sampler = BudgetBatchSampler(np.clip(values, 1, 8192).astype(int), budget, rank=0, world_size=8)
    costs = np.concatenate([window.costs for window in sampler.windows()])
    assert costs.max() <= budget
    assert costs.mean() / budget >= least
    assert (costs.max(axis=1) / costs.mean(axis=1)).mean() <= 1.05


@pytest.mark.parametrize("name", ["random", "bucket"])
def test_batches_of_one_step_cost_about_the_same(name):
    lengths = np.exp(np.random.default_rng(0).normal(5, 1, 50_000)).astype(int) + 1
    sampler = POLICIES[name](lengths, rank=0, world_size=8)
    costs = np.concatenate([window.costs for window in sampler.windows()])
    assert (costs.max(axis=1) / costs.mean(axis=1)).mean() <= 1.05
    assert (np.argmax(costs, axis=1) != 0).any() and (np.argmax(costs, axis=1) != 7).any()


def test_costs_of_a_window_are_those_of_its_cells():
    lengths = some_lengths(500)
    for padded in (False, True):
        sampler = RandomBatchSampler(lengths, 7, rank=0, world_size=3, padded=padded)
        (window,) = sampler.windows()
        for step in range(window.steps):
            for rank in range(3):
                cell = lengths[window.cell(step, rank)]
                assert window.costs[step, rank] == (cell.max() * len(cell) if padded else cell.sum())
                assert window.sizes[step, rank] == len(cell)


def test_random_batches_are_full_but_for_the_last_step():
    batches = all_ranks(POLICIES["random"], [1] * 100, 4)
    assert sorted(len(b) for rank in batches for b in rank) == sorted([3] * 32 + [1, 1, 1, 1])


def test_buckets_hold_neighbours_in_length():
    lengths = some_lengths(3000, high=1000)
    ordered = np.sort(lengths)
    widest = max(ordered[k + 96] - ordered[k] for k in range(0, 2900, 32))
    for batch in BucketBatchSampler(lengths, 32, buckets=32):
        assert lengths[batch].max() - lengths[batch].min() <= 2 * widest
    batches = [tuple(b) for b in BucketBatchSampler(lengths, 32, buckets=[250, 500, 750])]
    mixed = [b for b in batches if len({np.searchsorted([250, 500, 750], lengths[i]) for i in b}) > 1]
    assert len(mixed) <= 3
    means = [lengths[list(b)].mean() for b in batches]
    assert means != sorted(means)


def test_buckets_are_laid_where_they_leave_least_to_pad():
    lengths = np.exp(np.random.default_rng(0).normal(5, 1, 20_000)).astype(int) + 1

    def padding(buckets):
        batches = list(BucketBatchSampler(lengths, 32, buckets=buckets))
        return sum(lengths[b].max() * len(b) for b in batches) / lengths.sum() - 1

    alike_in_size = np.unique(np.quantile(lengths, np.arange(1, 32) / 32).astype(int)).tolist()
    assert padding(32) < 0.6 * padding(alike_in_size)
    assert padding(128) < padding(32) < padding(8) < padding(1)
    assert BucketBatchSampler([7] * 50, 5, buckets=9).plan.policy.borders == (7,)


def test_fixed_batches_are_the_data_sets_own_in_every_epoch():
    sampler = FixedBatchSampler(some_lengths(10), 4)
    assert list(sampler) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    sampler.set_epoch(5)
    assert list(sampler) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    ranks = all_ranks(POLICIES["fixed"], [1] * 12, 2)
    assert ranks == [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 10, 11]]]


@every_policy
def test_epochs_and_seeds_differ_and_each_is_the_same_again(name):
    lengths = some_lengths(200)

    def epoch(number, **kw):
        sampler = POLICIES[name](lengths, **kw)
        sampler.set_epoch(number)
        return list(sampler)

    assert epoch(1) == epoch(1)
    if name != "fixed":
        assert epoch(0) != epoch(1)
        assert epoch(0) != epoch(0, seed=1)
    sampler = POLICIES[name](lengths)
    assert [list(sampler), list(sampler), list(sampler)] == [epoch(0), epoch(1), epoch(2)]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("lengths", [[37] * 300, [40, 3, 40] * 100, [60, 0, 25, 36] * 75])
def test_nothing_is_dropped_or_repeated_before_an_epochs_last_step(small_windows, lengths, padded, drop_last):
    sampler = BudgetBatchSampler(lengths, 60, padded=padded, drop_last=drop_last, rank=0, world_size=3)
    *windows, last = sampler.windows()
    assert windows and all(window.dropped == window.repeated == 0 for window in windows)
    assert last.repeated == 0 and last.dropped <= 2 * 100


def test_fewer_samples_than_ranks_are_repeated_or_dropped():
    batches = all_ranks(POLICIES["random"], [1, 2], 5)
    assert [len(rank) for rank in batches] == [1] * 5
    assert occurrences(batches).total() == 5 and set(occurrences(batches)) == {0, 1}
    sampler = RandomBatchSampler([1, 2], 3, rank=0, world_size=5)
    assert sampler.counts["repeated"] == 3
    sampler = RandomBatchSampler([1, 2], 3, rank=0, world_size=5, drop_last=True)
    assert list(sampler) == [] and len(sampler) == 0 and sampler.counts["dropped"] == 2


@every_policy
def test_no_samples_are_no_steps(name):
    sampler = POLICIES[name]([])
    assert len(sampler) == 0 and list(sampler) == [] and list(sampler) == []
    assert sampler.counts["dropped"] == 0


def test_samples_without_a_position_are_served():
    sampler = BudgetBatchSampler([0] * 100, 10, rank=0, world_size=4)
    assert len(sampler) == 1
    assert occurrences(all_ranks(POLICIES["budget_padded"], [0] * 10, 2)).total() == 10


def test_lengths_may_be_tensors_and_costs_names():
    lengths = torch.tensor([3, 1, 2])
    assert sorted(i for b in BudgetBatchSampler(lengths, 14, cost="pair_cells") for i in b) == [0, 1, 2]
    assert len(BudgetBatchSampler(lengths, np.int64(14), cost="pair_cells")) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomBatchSampler([1, -2], 2), "sample 1 has the negative length -2"),
        (lambda: RandomBatchSampler([1.5], 2), "must be integers"),
        (lambda: RandomBatchSampler([[[1]]], 2), "must be integers"),
        (lambda: RandomBatchSampler([1], 0), "batch_size"),
        (lambda: RandomBatchSampler([1], True), "batch_size"),
        (lambda: RandomBatchSampler([[1, 2]], 2), "need a cost"),
        (lambda: RandomBatchSampler([1], 2, cost={"tokens": "tokens"}), "by name"),
        (lambda: BucketBatchSampler([1], 2, buckets=0), "buckets"),
        (lambda: BucketBatchSampler([1], 2, buckets=[3, 2]), "grow"),
        (lambda: BudgetBatchSampler([1], 0), "above 0"),
        (lambda: BudgetBatchSampler([1], float("nan")), "above 0"),
        (lambda: BudgetBatchSampler([1], True), "above 0"),
        (lambda: BudgetBatchSampler([1], {}), "no caps"),
        (lambda: BudgetBatchSampler([1], {"words": 3}), "no match for.*words"),
        (lambda: BudgetBatchSampler([1], {"tokens": 3}, cost="tokens"), "by the same names"),
        (lambda: BudgetBatchSampler([1], 3, cost={"tokens": "tokens"}), "by name"),
        (lambda: BudgetBatchSampler([1], 3, cost="words"), "is none of"),
        (lambda: BudgetBatchSampler([1, 2], 3, cost=lambda n: n - 2), "sample 0 costs -1"),
        (lambda: BudgetBatchSampler([1, 2], 3, cost=lambda n: n / 0), "sample 0 costs inf"),
        (lambda: BudgetBatchSampler([1, 2], 3, cost=lambda n: n.sum()), "a number for each"),
        (lambda: BudgetBatchSampler({"a": [1], "b": [1, 2]}, 3), "different numbers"),
        (lambda: BudgetBatchSampler({"a": [1]}, 3), "need a cost"),
        (lambda: BudgetBatchSampler({"a": [1]}, 3, cost="tokens"), "packload.cost.of"),
        (lambda: BudgetBatchSampler([1], 3, rank=0), "both rank and world_size"),
        (lambda: BudgetBatchSampler([1], 3, rank=2, world_size=2), "rank 2"),
    ],
)
def test_wrong_arguments_are_errors_that_say_which(make, message):
    with np.errstate(divide="ignore"), pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("lengths", ["abc", 5, TensorDataset(torch.ones(3)), object()])
def test_what_is_no_list_of_lengths_is_refused(lengths):
    with pytest.raises(TypeError, match="lengths"):
        RandomBatchSampler(lengths, 2)


def test_a_sampler_in_place_of_lengths_is_refused_with_the_way_out():
    for make in (RandomBatchSampler, BudgetBatchSampler):
        with pytest.raises(TypeError, match="use_distributed_sampler=False"):
            make(SequentialSampler([1, 2]), batch_size=None, drop_last=False)


def test_a_batch_sampler_given_as_sampler_is_refused():
    loader = DataLoader(list(range(10)), batch_size=2, sampler=RandomBatchSampler([1] * 10, 2))
    with pytest.raises(TypeError, match="batch_sampler="):
        list(loader)


@every_policy
def test_a_sampler_can_be_copied_and_pickled(name):
    sampler = POLICIES[name](some_lengths(50))
    assert list(pickle.loads(pickle.dumps(sampler))) == list(copy.deepcopy(sampler)) == list(sampler)


def test_processes_that_do_not_know_of_each_other_are_warned(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(RuntimeWarning, match="every process serves all samples"):
        list(RandomBatchSampler([1] * 10, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(RandomBatchSampler([1] * 10, 2, rank=0, world_size=1))


def test_windows_that_are_not_kept_are_planned_again(monkeypatch, small_windows):
    monkeypatch.setattr(planner, "KEEP", 50)
    monkeypatch.setattr(planner, "KEEP_SPANS", 3)
    for name in POLICIES:
        sampler, lengths = POLICIES[name](some_lengths(3000)), some_lengths(3000)
        assert len(sampler) == len(list(sampler)) == len(list(POLICIES[name](lengths)))
        assert sampler.state_dict(consumed=len(sampler))["cursor"] == 3000


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: RandomBatchSampler([1], 1, seed=1.7), TypeError, "seed must be an integer; got 1.7"),
        (lambda: RandomBatchSampler([1], 1, seed="12"), TypeError, "seed must be an integer; got '12'"),
        (lambda: RandomBatchSampler([1], 1, rank=0.5, world_size=2), TypeError, "rank must be an integer"),
        (lambda: RandomBatchSampler([1], 1, rank=0, world_size="2"), TypeError, "world_size must be"),
        (lambda: RandomBatchSampler([1], 1).set_epoch(0.5), TypeError, "epoch must be an integer"),
        (lambda: RandomBatchSampler([1], 1).set_epoch(-1), ValueError, "epochs count from 0; got -1"),
        (lambda: RandomBatchSampler({}, 1), ValueError, "there is no field"),
        (lambda: RandomBatchSampler([[1], [2, 3]], 1), ValueError, "lengths must be integers .*got a list"),
        (
            lambda: RandomBatchSampler(np.ones((3, 0), int), 1, cost="tokens"),
            ValueError,
            r"got int64 \[3, 0\]",
        ),
        (
            lambda: RandomBatchSampler(np.array([3, 2**63], np.uint64), 1),
            ValueError,
            "9223372036854775808 is more",
        ),
        (lambda: BucketBatchSampler([1], 1, buckets=[float("nan")]), ValueError, "numbers that grow"),
    ],
)
def test_what_would_be_misread_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_cost_too_large_for_its_own_type_is_refused():
    with np.errstate(over="ignore"), pytest.raises(ValueError, match="sample 1 costs inf"):
        BudgetBatchSampler([3, 70_000], 9, cost=lambda n: n.astype(np.float16), oversize="skip")


def test_what_was_skipped_is_known_without_a_plan(monkeypatch):
    sampler = BudgetBatchSampler([3, 100, 4], 50, oversize="skip")
    monkeypatch.setattr(sampler.plan, "_plan", None)
    assert sampler.skipped == 1
    loader = packload.Loader([torch.arange(3)] * 3, sampler, workers=0)
    assert loader.stats().skipped == 1

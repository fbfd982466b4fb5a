"""State: wherever a run stops, the next one serves the same remaining batches in the same order."""

from __future__ import annotations

import copy
import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchdata.nodes import Loader, SamplerWrapper
from torchdata.stateful_dataloader import StatefulDataLoader

import packload
from packload import BudgetBatchSampler, RandomBatchSampler
from packload.plan import PlanSampler
from tests.packload.plan.plans import POLICIES, some_lengths

every_policy = pytest.mark.parametrize("name", POLICIES)
LENGTHS = some_lengths(400)


def make(name: str = "budget_of_large_samples", lengths=LENGTHS, **kw) -> PlanSampler:
    return POLICIES[name](lengths, **kw)


def through_json(state: dict) -> dict:
    return json.loads(json.dumps(state))


@every_policy
@pytest.mark.parametrize("ranks", [1, 3])
def test_resume_from_every_step_is_like_not_stopping(name, ranks, small_windows):
    lengths = some_lengths(90)
    whole = list(make(name, lengths, rank=0, world_size=ranks))
    following = make(name, lengths, rank=0, world_size=ranks)
    following.set_epoch(1)
    following = list(following)
    for stop in range(len(whole) + 1):
        first = make(name, lengths, rank=0, world_size=ranks)
        iterator = iter(first)
        assert list(islice(iterator, stop)) == whole[:stop]
        states = [iterator.state_dict(), first.state_dict(consumed=stop)]
        assert states[0] == states[1]
        again = make(name, lengths, rank=0, world_size=ranks)
        again.load_state_dict(through_json(states[0]))
        assert len(again) == len(whole) and again.step == stop
        assert list(again) == whole[stop:]
        assert list(again) == following


@every_policy
def test_two_resumes_in_a_row(name, small_windows):
    whole = list(make(name))
    first = make(name)
    list(islice(first, 5))
    second = make(name)
    second.load_state_dict(through_json(first.state_dict(consumed=5)))
    assert second.state_dict() == first.state_dict(consumed=5)
    assert list(islice(second, 3)) == whole[5:8]
    third = make(name)
    third.load_state_dict(through_json(second.state_dict(consumed=8)))
    assert list(third) == whole[8:]


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from(list(POLICIES)))
def test_resume_anywhere_in_a_plan_of_long_windows(stop, further, name):
    lengths = some_lengths(9000)
    whole = list(make(name, lengths, rank=1, world_size=2))
    stop %= len(whole) + 1
    first = make(name, lengths, rank=1, world_size=2)
    iterator = iter(first)
    list(islice(iterator, stop))
    second = make(name, lengths, rank=1, world_size=2)
    second.load_state_dict(iterator.state_dict())
    rest = list(islice(second, further % (len(whole) - stop + 1)))
    assert rest == whole[stop : stop + len(rest)]


@every_policy
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (1, 4)])
def test_the_world_may_change_where_a_window_ends(name, before, after, small_windows):
    lengths = some_lengths(1500)
    windows = list(make(name, lengths, rank=0, world_size=before).windows())
    assert len(windows) > 1
    steps = windows[0].steps
    old = [make(name, lengths, rank=r, world_size=before) for r in range(before)]
    served = [list(islice(sampler, steps)) for sampler in old]
    state = through_json(old[0].state_dict(consumed=steps))
    assert all(sampler.state_dict(consumed=steps) == state for sampler in old)
    new = [make(name, lengths, rank=r, world_size=after) for r in range(after)]
    for sampler in new:
        sampler.load_state_dict(state)
    rest = [list(sampler) for sampler in new]
    assert {len(batches) for batches in rest} == {len(new[0]) - steps}
    seen = Counter(i for rank in served + rest for batch in rank for i in batch)
    assert set(seen) == set(range(1500))
    assert seen.total() == 1500 + new[0].counts["repeated"]


def test_the_world_cannot_change_inside_a_window(small_windows):
    old = make(rank=0, world_size=2)
    list(islice(old, 3))
    with pytest.raises(ValueError, match=r"step 3 of epoch 0 .* planned for 2 ranks, and here are 3"):
        make(rank=0, world_size=3).load_state_dict(old.state_dict(consumed=3))


def test_a_state_says_what_it_is_not_of():
    state = make().state_dict()
    with pytest.raises(ValueError, match="another data: samples is 400 in the state, 399 here"):
        make(lengths=LENGTHS[1:]).load_state_dict(state)
    with pytest.raises(ValueError, match="another data: lengths is"):
        make(lengths=LENGTHS[::-1]).load_state_dict(state)
    with pytest.raises(ValueError, match="another policy: name is 'budget' in the state, 'random' here"):
        make("random").load_state_dict(state)
    with pytest.raises(ValueError, match=r"budget is \{'tokens': 60\} in the state, \{'tokens': 61\} here"):
        BudgetBatchSampler(LENGTHS, 61).load_state_dict(state)
    with pytest.raises(ValueError, match="drop_last is False in the state, True here"):
        make(drop_last=True).load_state_dict(state)
    with pytest.raises(ValueError, match="costs is"):
        BudgetBatchSampler(LENGTHS, 60, cost={"tokens": lambda n: n + 1}["tokens"]).load_state_dict(
            {**state, "policy": {**state["policy"], "budget": {"<lambda>": 60}}}
        )
    with pytest.raises(ValueError, match="another seed: 0 in the state, 1 here"):
        make(seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match="version 99"):
        make().load_state_dict({**state, "version": 99})
    with pytest.raises(ValueError, match="no state of a plan"):
        make().load_state_dict({})
    with pytest.raises(ValueError, match="lacks .*cursor"):
        make().load_state_dict({k: v for k, v in state.items() if k != "cursor"})
    with pytest.raises(ValueError, match="no place in an epoch"):
        make().load_state_dict({**state, "cursor": 401})


def test_a_state_is_small_json_and_stays_as_it_is():
    sampler = make("bucket")
    list(islice(sampler, 5))
    state = sampler.state_dict(consumed=5)
    kept = copy.deepcopy(state)
    assert through_json(state) == state and len(json.dumps(state)) < 1000
    sampler.load_state_dict(state)
    next(iter(sampler))
    assert state == kept
    state["policy"]["batch_size"] = 7
    assert sampler.state_dict(consumed=5) == kept


def test_what_was_used_must_be_said_once_batches_were_handed_out():
    sampler = make()
    assert sampler.state_dict() == sampler.state_dict(consumed=0)
    list(islice(sampler, 5))
    with pytest.raises(RuntimeError, match="5 batches of epoch 0 were handed out.*consumed"):
        sampler.state_dict()
    for wrong in (-1, 6):
        with pytest.raises(ValueError, match=f"consumed={wrong}: 5 batches"):
            sampler.state_dict(consumed=wrong)
    again = make()
    again.load_state_dict(sampler.state_dict(consumed=3))
    with pytest.raises(ValueError, match="3 of them before this run"):
        again.state_dict(consumed=2)


def test_loading_while_an_iterator_runs_ends_it_with_an_error():
    sampler = make()
    whole = list(make())
    iterator, fresh = iter(sampler), iter(sampler)
    list(islice(iterator, 5))
    sampler.load_state_dict(sampler.state_dict(consumed=2))
    with pytest.raises(RuntimeError, match="loaded into the sampler after this iterator began"):
        next(iterator)
    assert list(fresh) == whole[2:]


def test_a_state_loaded_into_an_iterator_takes_effect():
    whole = list(make())
    iterator = iter(make())
    list(islice(iterator, 5))
    state = iterator.state_dict()
    list(islice(iterator, 2))
    iterator.load_state_dict(state)
    assert list(iterator) == whole[5:]


def test_set_epoch_keeps_the_place_of_a_loaded_state_and_else_starts_over():
    whole = list(make())
    sampler = make()
    sampler.set_epoch(0)
    list(islice(sampler, 4))
    state = sampler.state_dict(consumed=4)
    sampler.load_state_dict(state)
    sampler.set_epoch(0)
    assert list(sampler) == whole[4:]
    sampler.set_epoch(0)
    assert list(sampler) == whole
    sampler.load_state_dict(state)
    sampler.set_epoch(1)
    sampler.sampler.set_epoch(0)
    assert list(sampler) == whole and sampler.epoch == 0


def test_set_epoch_leaves_a_running_iterator_alone():
    sampler = make()
    whole = list(make())
    iterator = iter(sampler)
    first = next(iterator)
    sampler.set_epoch(3)
    assert [first, *iterator] == whole
    assert sampler.epoch == 3 and next(iter(sampler)) != whole[0]


def test_an_epoch_that_was_left_early_begins_again():
    sampler = make()
    whole = list(make())
    assert list(islice(sampler, 3)) == whole[:3]
    assert list(islice(sampler, 3)) == whole[:3]


def test_an_epoch_is_over_with_its_last_batch():
    """Some loops take as many batches as there are, and never ask for one more."""
    sampler, expected = make(), make()
    for _ in range(3):
        total = len(sampler)
        batches = list(islice(sampler, total))
        assert batches == list(expected)
        assert len(sampler) == total and sampler.state_dict(consumed=total)["cursor"] == 400
    sampler.set_epoch(2)
    expected.set_epoch(2)
    assert list(sampler) == list(expected)


def test_an_epoch_is_over_where_only_dropped_samples_are_left(small_windows):
    old = make("random", some_lengths(49), drop_last=True)
    list(islice(old, 16))
    state = old.state_dict(consumed=16)
    state.update(cursor=48, window=1, served=16, step=0)
    sampler = make("random", some_lengths(49), drop_last=True)
    sampler.load_state_dict(state)
    assert list(islice(sampler, 0)) == [] and list(sampler) == []
    assert sampler.state_dict(consumed=16)["step"] == 0 and len(list(sampler)) == 16 and sampler.epoch == 1


def test_the_length_is_that_of_the_epoch_under_way():
    sampler = make()
    loader = DataLoader(range(400), batch_sampler=sampler, collate_fn=list)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = len(loader)
        served = 0
        for _ in loader:
            served += 1
            assert len(loader) == total
        assert served == total == len(loader)


class Samples:
    """A data set whose samples are their indices."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> int:
        return index


def workers(*counts: int):
    """Worker counts; processes start slowly."""
    return [pytest.param(n, marks=[pytest.mark.slow] if n not in (0, 2) else []) for n in counts]


@pytest.mark.parametrize("resumed", workers(0, 1, 2, 4))
def test_a_dataloader_resumes_with_other_workers(resumed):
    whole = list(make())
    for stop in (0, 5, len(whole) - 1, len(whole)):
        sampler = make()
        loader = DataLoader(Samples(), batch_sampler=sampler, num_workers=2, collate_fn=list)
        assert list(islice(loader, stop)) == whole[:stop]
        state = through_json(sampler.state_dict(consumed=stop))
        for _ in range(2):  # twice in a row
            again = make()
            again.load_state_dict(state)
            loader = DataLoader(Samples(), batch_sampler=again, num_workers=resumed, collate_fn=list)
            assert list(loader) == whole[stop:]
            state = through_json(again.state_dict(consumed=len(whole)))
            stop = len(whole)


@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_epochs_follow_under_a_dataloader_with_workers(persistent):
    expected = make()
    loader = DataLoader(
        Samples(),
        batch_sampler=make(),
        num_workers=2,
        persistent_workers=persistent,
        collate_fn=list,
    )
    for _ in range(3):
        assert list(loader) == list(expected)


@pytest.mark.parametrize("count", workers(0, 1, 2, 4))
def test_a_stateful_dataloader_is_exact_by_itself(count):
    expected = make()
    epochs = [list(expected), list(expected)]
    whole = epochs[0]

    def stateful() -> tuple[PlanSampler, StatefulDataLoader]:
        sampler = make()
        return sampler, StatefulDataLoader(
            Samples(), batch_sampler=sampler, num_workers=count, collate_fn=list
        )

    for stop in (0, 5, len(whole) - 1, len(whole)):
        _, loader = stateful()
        iterator = iter(loader)
        assert list(islice(iterator, stop)) == whole[:stop]
        state = loader.state_dict()
        _, again = stateful()
        again.load_state_dict(state)
        following = iter(again)
        assert list(islice(following, 1)) == whole[stop : stop + 1]
        second = again.state_dict()
        sampler, third = stateful()
        third.load_state_dict(second)
        if stop < len(whole):  # else the end was told already, and the next epoch is due
            assert list(third) == whole[stop + 1 :]
        assert list(third) == epochs[1]
        with pytest.raises(RuntimeError, match="handed out"):
            sampler.state_dict()


@pytest.mark.parametrize("count", workers(0, 2))
def test_a_stateful_dataloader_saved_after_an_epoch_goes_on_with_the_next(count):
    expected = make()
    epochs = [list(expected), list(expected)]
    loader = StatefulDataLoader(Samples(), batch_sampler=make(), num_workers=count, collate_fn=list)
    assert list(loader) == epochs[0]
    state = loader.state_dict()
    again = StatefulDataLoader(Samples(), batch_sampler=make(), num_workers=count, collate_fn=list)
    again.load_state_dict(state)
    assert list(again) == epochs[1]


@pytest.mark.parametrize(
    ("count", "mode"), [(0, "thread"), (3, "thread"), pytest.param(2, "process", marks=pytest.mark.slow)]
)
def test_a_loader_is_exact_by_itself_whatever_it_is_resumed_with(count, mode):
    expected = make()
    whole, following = list(expected), list(expected)
    for stop in (0, 5, len(whole) - 1, len(whole)):
        with packload.Loader(Samples(), make(), list, workers=2) as first:
            assert list(islice(first, stop)) == whole[:stop]
            state = through_json(first.state_dict())
        with packload.Loader(Samples(), make(), list, workers=count, mode=mode, context="fork") as again:
            again.load_state_dict(state)
            assert list(again) == whole[stop:]
            assert list(again) == following


def test_nodes_of_torchdata_are_exact_by_themselves():
    whole = list(make())
    loader = Loader(SamplerWrapper(make()))
    iterator = iter(loader)
    assert list(islice(iterator, 5)) == whole[:5]
    state = through_json(loader.state_dict())
    again = Loader(SamplerWrapper(make()))
    again.load_state_dict(state)
    assert list(again) == whole[5:]


def test_a_window_is_planned_the_same_whatever_was_planned_before(small_windows):
    plan = make(rank=0, world_size=2).plan
    first = plan.window(3, 0, 2)
    later = plan.window(3, first.end, 2)
    fresh = make(rank=0, world_size=2).plan.window(3, first.end, 2)
    assert np.array_equal(later.units, fresh.units) and np.array_equal(later.splits, fresh.splits)
    fresh = RandomBatchSampler(LENGTHS, 3).plan.window(0, 10, 1)
    assert not np.array_equal(fresh.units, RandomBatchSampler(LENGTHS, 3).plan.window(0, 12, 1).units)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 10_000}, "no place in its window"),
        ({"cursor": len(LENGTHS), "step": 1}, "no place in its window, which has 0 steps"),
        ({"policy": None}, "its policy is None"),
        ({"data": "x"}, "its data is 'x'"),
        ({"epoch": "x"}, "must be of integers"),
        ({"step": 1.5}, "must be of integers"),
    ],
)
def test_a_damaged_state_is_refused_when_it_is_loaded(change, message):
    with pytest.raises(ValueError, match=message):
        make().load_state_dict({**make().state_dict(), **change})

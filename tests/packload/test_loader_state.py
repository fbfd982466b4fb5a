"""Loader: its state, saved and loaded anywhere."""

import copy
import gc
import json

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler
from torchdata.stateful_dataloader.sampler import BatchSampler as StatefulBatchSampler
from torchdata.stateful_dataloader.sampler import RandomSampler as StatefulRandomSampler

import packload

from .loaders import every_way, indices, loader_of, same
from .samples import Bad, Ragged, batches, value_error


class Positions:
    """A batch sampler that keeps its own state, of the sampler's kind."""

    def __init__(self):
        self.at, self.epoch = 0, 0

    def __len__(self):
        return len(batches())

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = batches()
        order = order[self.epoch :] + order[: self.epoch]
        while self.at < len(order):
            self.at += 1
            yield order[self.at - 1]
        self.at = 0

    def state_dict(self):
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.at, self.epoch = state["at"], state["epoch"]


def iterator_s_own():
    """A batch sampler whose iterators keep the state."""
    generator = torch.Generator().manual_seed(3)
    return StatefulBatchSampler(StatefulRandomSampler(range(40), generator=generator), 4, False)


def plan():
    return packload.BudgetBatchSampler([k * 7 % 10 + 1 for k in range(40)], 30, seed=3)


SAMPLERS = {"list": batches, "sampler": Positions, "iterator": iterator_s_own}
if hasattr(packload, "BudgetBatchSampler"):
    SAMPLERS["plan"] = plan


def two_passes(kind, way="inline"):
    loader = loader_of(way, sampler=SAMPLERS[kind]())
    return [indices(loader) for _ in range(2)]


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("way", ["inline", "thread", "threads", "processes"])
def test_a_state_goes_on_with_the_batch_after_the_last_one_handed_out(way, kind):
    first, second = two_passes(kind)
    last = len(first)
    for step in (0, 1, last // 2, last - 1, last) if way != "processes" else (last // 2,):
        loader = loader_of("threads", sampler=SAMPLERS[kind]())
        iterator = iter(loader)
        assert [next(iterator).index.tolist() for _ in range(step)] == first[:step]
        state = json.loads(json.dumps(loader.state_dict())) if kind != "iterator" else loader.state_dict()
        for _ in range(2):  # twice in a row
            other = loader_of(way, sampler=SAMPLERS[kind]())
            other.load_state_dict(state)
            assert same(other.state_dict(), state)
            assert indices(other) == first[step:]
            if kind != "iterator":
                assert indices(other) == second


@pytest.mark.parametrize("kind", SAMPLERS)
def test_the_state_after_a_pass_has_ended_is_that_before_the_next(kind):
    first, second = two_passes(kind)
    loader = loader_of("threads", sampler=SAMPLERS[kind]())
    assert indices(loader) == first
    other = loader_of("threads", sampler=SAMPLERS[kind]())
    other.load_state_dict(loader.state_dict())
    if kind == "iterator":  # its next order depends on a generator that is not in the state
        assert sorted(sum(indices(other), [])) == list(range(40))
    else:
        assert indices(other) == second


@every_way
def test_a_chain_of_resumes_is_an_unbroken_run(way):
    got, state = [], None
    for steps in (3, 1, 4, 2):
        loader = loader_of(way)
        if state is not None:
            loader.load_state_dict(state)
        iterator = iter(loader)
        got += [next(iterator).index.tolist() for _ in range(steps)]
        state = loader.state_dict()
    assert got == batches()


@every_way
@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_state_loaded_while_an_iterator_is_alive_takes_effect(way, kind):
    first, _ = two_passes(kind)
    loader = loader_of(way, sampler=SAMPLERS[kind]())
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    state = loader.state_dict()
    for _ in range(3):
        next(iterator)
    loader.load_state_dict(state)
    assert same(loader.state_dict(), state)
    assert [batch.index.tolist() for batch in iterator] == first[2:]


def test_the_state_that_is_loaded_is_not_changed_and_not_kept():
    loader = loader_of("threads", sampler=Positions())
    next(iter(loader))
    state = loader.state_dict()
    before = copy.deepcopy(state)
    other = loader_of("threads", sampler=Positions())
    other.load_state_dict(state)
    state["root"]["source"]["state"]["at"] = 7
    assert indices(other) == batches()[1:]
    state["root"]["source"]["state"]["at"] = 1
    assert state == before


def test_leaving_a_loop_keeps_the_state():
    loader = loader_of("threads")
    for k, _ in enumerate(loader):
        if k == 3:
            break
    gc.collect()
    other = loader_of("inline")
    other.load_state_dict(loader.state_dict())
    assert indices(other) == batches()[4:]


def test_the_state_after_an_error_is_that_before_the_bad_batch():
    loader = loader_of("threads", Bad(batches()[4][2], value_error))
    with pytest.raises(ValueError):
        indices(loader)
    other = loader_of("threads")
    other.load_state_dict(loader.state_dict())
    assert indices(other) == batches()[4:]


def test_states_that_do_not_fit_are_refused():
    loader = loader_of("threads")
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(ValueError, match="saved with seed 0; this loader's is 1"):
        loader_of("threads", seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match="version"):
        loader.load_state_dict({**state, "version": 2})
    with pytest.raises(ValueError, match=r"lacks \['epoch', 'root', 'seed'\]"):
        loader.load_state_dict({"version": 1})
    with pytest.raises(ValueError, match="Positions, has a state of its own"):
        loader_of("threads", sampler=Positions()).load_state_dict(state)
    shorter = loader_of("inline", sampler=[])
    shorter.load_state_dict(state)
    with pytest.raises(ValueError, match="after 1 batches; the batch sampler has 0"):
        indices(shorter)


def test_an_iterator_ends_when_another_begins():
    loader = loader_of("threads")
    first = iter(loader)
    next(first)
    second = iter(loader)
    assert next(second).index.tolist() == batches()[0]
    with pytest.raises(RuntimeError, match="one is under way at once"):
        next(first)
    assert len(list(second)) == 9


def test_set_epoch_reaches_the_sampler_and_what_frameworks_look_at():
    loader = loader_of("inline", sampler=Positions())
    loader.sampler.set_epoch(3)
    assert loader.batch_sampler.epoch == 3 and indices(loader)[0] == batches()[3]
    distributed = DistributedSampler(Ragged(), num_replicas=2, rank=0, seed=1)
    loader = loader_of("inline", sampler=BatchSampler(distributed, 4, False))
    orders = []
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        orders.append(indices(loader))
    assert orders[0] == orders[2] != orders[1]
    assert loader.batch_size is None and len(loader) == 5


def test_set_epoch_keeps_a_state_that_stands_in_that_epoch():
    first = loader_of("inline", sampler=Positions())
    first.set_epoch(2)
    iterator = iter(first)
    expected = [next(iterator).index.tolist() for _ in range(3)]
    state = first.state_dict()
    for epoch, left in ((2, 7), (5, 7)):
        other = loader_of("inline", sampler=Positions())
        other.load_state_dict(state)
        other.set_epoch(epoch)
        got = indices(other)
        assert len(got) == left
        assert (expected + got == [*batches()[2:], *batches()[:2]]) == (epoch == 2)

import copy
import gc
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import BatchSampler as StatefulBatchSampler
from torchdata.stateful_dataloader.sampler import RandomSampler as StatefulRandomSampler

import packload
from packload import Collate, CollateError, Loader

from .samples import Bad, Fetched, Ragged, Random, Slow, batches, by_hand, check, value_error

#: Ways to run a loader. Forked processes start at once; what is particular to others is in test_processes.py.
WAYS = {
    "inline": {"workers": 0},
    "thread": {"workers": 1},
    "threads": {"workers": 4},
    "process": {"workers": 1, "mode": "process", "context": "fork"},
    "processes": {"workers": 3, "mode": "process", "context": "fork"},
}
every_way = pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow if way == "processes" else ()) for way in WAYS]
)


def loader_of(way, dataset=None, sampler=None, collate=None, **options):
    dataset = Ragged() if dataset is None else dataset
    sampler = batches() if sampler is None else sampler
    return Loader(dataset, sampler, collate, **{**WAYS[way], **options})


def indices(loader):
    return [batch.index.tolist() for batch in loader]


def ours():
    return [thread for thread in threading.enumerate() if thread.name.startswith("packload")]


def shared_names():
    """Names of shared memory. Semaphores are other programs': there are none here."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def soon(condition, seconds=5.0):
    """Whether a condition holds within some seconds."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def same(one, other):
    """Whether two states are equal, tensors inside too."""
    (leaves, spec), (others, other_spec) = map(pytree.tree_flatten, (one, other))
    equal = (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(leaves, others))
    return spec == other_spec and all(equal)


# ---------------------------------------------------------------- what comes


@every_way
@pytest.mark.parametrize("dataset", [Ragged(), Fetched(), Slow()], ids=lambda d: type(d).__name__)
def test_batches_come_in_the_sampler_s_order(way, dataset):
    loader = loader_of(way, dataset)
    for _ in range(2):
        seen = 0
        for batch, expected in zip(loader, batches(), strict=True):
            check(batch, expected)
            seen += 1
        assert seen == len(loader) == 10


@every_way
def test_batches_that_are_kept_stay_as_they_were(way):
    kept = list(loader_of(way, prefetch=1, hold=1))
    for batch, expected in zip(kept, batches(), strict=True):
        check(batch, expected)


@every_way
def test_a_field_that_is_kept_outlives_its_batch_and_its_loader(way):
    loader = loader_of(way, hold=0)
    fields = [batch.x.values[:3] for batch in loader]
    expected = [field.clone() for field in fields]
    again = indices(loader)
    del loader
    gc.collect()
    assert again == batches()
    assert all(map(torch.equal, fields, expected))


@every_way
def test_what_other_collate_functions_make_goes_through(way):
    for batch, expected in zip(loader_of(way, collate=by_hand), batches(), strict=True):
        assert batch["index"] == expected and batch["text"] == "abc"
        assert torch.equal(batch["x"], by_hand([Ragged()[k] for k in expected])["x"])


@every_way
def test_samples_that_are_leaves_give_the_field_alone(way):
    data = [torch.arange(k % 5) for k in range(40)]
    for field, expected in zip(loader_of(way, data), batches(), strict=True):
        assert isinstance(field, packload.PackedTensor)
        assert [x.tolist() for x in field.unbind()] == [data[k].tolist() for k in expected]


@every_way
def test_a_schema_and_keys_of_any_kind(way):
    data = {f"key {k}": {"pair": np.ones((k, k)), "n": k} for k in range(6)}
    collate = Collate({"pair": "n n"})
    sampler = [["key 2", "key 5"], ["key 0"]]
    sizes = [[len(x) for x in batch.pair.unbind()] for batch in loader_of(way, data, sampler, collate)]
    assert sizes == [[2, 5], [0]]


@every_way
@pytest.mark.parametrize("sampler", [[], [[3]], [[k] for k in range(40)]], ids=["none", "one", "many"])
def test_passes_of_any_length(way, sampler):
    assert indices(loader_of(way, sampler=sampler)) == sampler


@every_way
def test_a_batch_of_no_samples_is_an_error(way):
    with pytest.raises(CollateError, match="no samples"):
        indices(loader_of(way, sampler=[[1], []]))


def test_slots_are_used_again_when_the_loop_keeps_one_batch():
    loader = loader_of("threads")
    for _ in range(3):
        for batch in loader:
            del batch
    assert loader.stats().overflows == 0
    loader = loader_of("processes", persistent_workers=True)
    for _ in range(3):
        for batch in loader:
            assert batch.batch_size == 4
    assert loader.stats().overflows == 0
    loader.close()


def test_what_a_dataloader_gives_is_what_a_loader_gives():
    plain = DataLoader(Ragged(), batch_sampler=batches(), collate_fn=packload.collate)
    for batch, other in zip(plain, loader_of("threads"), strict=True):
        assert torch.equal(batch.x.values, other.x.values) and torch.equal(batch.index, other.index)


# ---------------------------------------------------------------- other loaders


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_collate_works_in_other_loaders(kind, workers):
    loader = kind(
        Ragged(), batch_sampler=batches(), collate_fn=packload.collate, num_workers=workers, pin_memory=True
    )
    for _ in range(2):
        for batch, expected in zip(loader, batches(), strict=True):
            check(batch, expected)


def test_a_stateful_dataloader_goes_on_where_it_stood():
    def make():
        return StatefulDataLoader(
            Ragged(), batch_sampler=batches(), collate_fn=packload.collate, num_workers=2
        )

    loader = make()
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    other = make()
    other.load_state_dict(loader.state_dict())
    assert indices(other) == batches()[3:]


# ---------------------------------------------------------------- state


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
    assert list(first) == []
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


# ---------------------------------------------------------------- errors and endings


@every_way
def test_an_error_in_a_sample_names_it_and_keeps_its_type(way):
    at = batches()[5][1]
    loader = loader_of(way, Bad(at, value_error))
    got = []
    with pytest.raises(ValueError, match="a bad sample") as caught:
        for batch in loader:
            got.append(batch.index.tolist())
    assert got == batches()[:5], "what comes before is handed out"
    notes = "\n".join(caught.value.__notes__)
    assert f"sample {at} of the dataset" in notes
    assert f"fetch of batch 5, samples {batches()[5]}" in notes
    assert soon(lambda: not ours())


@every_way
def test_an_error_in_collate_names_key_field_and_both_shapes(way):
    data = {f"k{i}": {"__key__": f"k{i}", "x": np.ones((i, 3)), "y": np.ones(i)} for i in range(4)}
    data["k2"]["y"] = np.ones(7)
    schema = Collate({"x": "n _", "y": "n"})
    with pytest.raises(CollateError, match=r"'k2'.*'y'.*\(7,\).*\(2, 3\)") as caught:
        list(loader_of(way, data, [["k0", "k1"], ["k3", "k2"]], schema))
    assert "collate of batch 1, samples ['k3', 'k2']" in "\n".join(caught.value.__notes__)
    data["k2"] = {"__key__": "k2", "x": np.ones((2, 3))}
    with pytest.raises(CollateError, match=r"'k2'.*'y'.*missing"):
        list(loader_of(way, data, [["k3", "k2"]], schema))
    data["k2"] = {"__key__": "k2", "x": np.ones((2, 3), np.float32), "y": np.ones(2)}
    with pytest.raises(CollateError, match=r"'k2'.*'x'.*float32.*\(2, 3\).*float64.*\(3, 3\)"):
        list(loader_of(way, data, [["k3", "k2"]], schema))


@every_way
def test_an_error_of_the_sampler_is_raised_in_its_turn(way):
    def sampler():
        yield [1]
        raise KeyError("sampler")

    iterator = iter(loader_of(way, sampler=sampler()))
    assert next(iterator).index.tolist() == [1]
    with pytest.raises(KeyError, match="sampler"):
        next(iterator)
    assert list(iterator) == []


@every_way
def test_an_error_in_worker_init_is_raised(way):
    def init(dataset, worker):
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        list(loader_of(way, worker_init=init))
    assert soon(lambda: not ours())


@every_way
def test_every_worker_may_have_a_dataset_of_its_own(way):
    def init(dataset, worker):
        own = copy.copy(dataset)
        own.worker = worker
        return own

    class Own(Ragged):
        worker = None

        def __getitem__(self, index):
            return {"x": np.zeros(1), "index": self.worker}

    seen = {k for batch in loader_of(way, Own(), worker_init=init) for k in batch.index.tolist()}
    assert seen <= set(range(max(1, WAYS[way]["workers"]))) and seen


@every_way
@pytest.mark.parametrize("leave", ["break", "error", "delete", "close", "end"])
def test_leaving_a_loop_ends_all_workers(way, leave):
    names, files = shared_names(), os.listdir("/proc/self/fd")
    loader = loader_of(way)
    iterator = iter(loader)
    next(iterator)
    if leave == "break":
        for batch in loader:
            del batch
            break
        del iterator
    elif leave == "error":
        try:
            for batch in loader:
                del batch
                raise RuntimeError
        except RuntimeError:
            pass
    elif leave == "delete":
        del loader, iterator
    elif leave == "close":
        with loader:
            next(iterator)
    else:
        list(iterator)
    loader = iterator = None
    gc.collect()
    assert soon(lambda: not ours())
    assert soon(lambda: shared_names() <= names)
    assert len(os.listdir("/proc/self/fd")) <= len(files)


def test_persistent_workers_are_kept_until_closed():
    seen = set()

    def init(dataset, worker):
        seen.add(threading.get_ident())

    loader = loader_of("threads", worker_init=init, persistent_workers=True)
    for _ in range(3):
        assert indices(loader) == batches()
        assert len(ours()) == 4
    for _ in loader:
        break
    assert indices(loader) == batches()
    assert len(seen) == 4
    loader.close()
    assert soon(lambda: not ours())
    assert indices(loader) == batches(), "a closed loader starts new ones"
    loader.close()


@pytest.mark.parametrize("way", ["thread", "process"])
def test_a_batch_that_takes_too_long_is_an_error(way):
    loader = loader_of(way, Bad(batches()[1][0], lambda: time.sleep(0.8)), timeout=0.1)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(TimeoutError, match="batch 1 was not ready 0.1 seconds"):
        next(iterator)
    assert soon(lambda: not ours())


def test_workers_leave_torch_s_threads_as_they_were():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        indices(loader_of("threads"))
        found: queue.SimpleQueue[int] = queue.SimpleQueue()
        thread = threading.Thread(target=lambda: found.put(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert torch.get_num_threads() == found.get() == 2
    finally:
        torch.set_num_threads(before)


INTERRUPTED = """
import sys, time, threading
from tests.packload.samples import Ragged, Bad, batches, sleep_long
from packload import Loader
loader = Loader(Bad(batches()[3][0], sleep_long) if {stuck} else Ragged(), batches(), **{way})
if __name__ == "__main__":
    for batch in loader:
        print("ready", flush=True)
        {then}
    print("not reached")
"""


@pytest.mark.parametrize("stuck", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_keyboard_interrupt_ends_a_program_within_seconds(way, stuck, tmp_path):
    names = shared_names()
    program = INTERRUPTED.format(stuck=stuck, way=WAYS[way], then="pass" if stuck else "time.sleep(60)")
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    )
    for _ in range(3 if stuck else 1):
        assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    begin = time.monotonic()
    out, errors = process.communicate(timeout=30)
    assert time.monotonic() - begin < 10  # 5 seconds, on a machine that has nothing else to do
    assert "KeyboardInterrupt" in errors and "not reached" not in out
    assert process.returncode in (1, -signal.SIGINT, 130)
    assert soon(lambda: shared_names() <= names)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


# ---------------------------------------------------------------- randomness, arguments


def test_seeds_follow_from_the_batch_alone_and_change_with_epoch_and_seed():
    def numbers(way, epochs=1, **options):
        loader = loader_of(way, Random(), **options)
        return [torch.cat(list(loader)).tolist() for _ in range(epochs)]

    expected = numbers("inline", 2)
    assert expected[0] != expected[1]
    for way in WAYS:
        assert numbers(way, 2) == expected
    assert numbers("threads", seed=1)[0] != expected[0]
    loader = loader_of("threads", Random())
    iterator = iter(loader)
    got = torch.cat([next(iterator) for _ in range(4)])
    other = loader_of("process", Random())
    other.load_state_dict(loader.state_dict())
    assert torch.cat([got, *other]).tolist() == expected[0]
    with pytest.raises(RuntimeError, match="loader calls"):
        packload.batch_seed()


def test_random_samplers_of_torch_work():
    order = BatchSampler(RandomSampler(range(40)), 4, False)
    assert sorted(sum(indices(loader_of("threads", sampler=order)), [])) == list(range(40))
    order = BatchSampler(SequentialSampler(range(40)), 7, True)
    assert sum(indices(loader_of("threads", sampler=order)), []) == list(range(35))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"workers": -1}, ValueError, "workers >= 0"),
        ({"prefetch": 0}, ValueError, "prefetch >= 1"),
        ({"hold": -1}, ValueError, "hold >= 0"),
        ({"mode": "fiber"}, ValueError, "'thread' or 'process', not 'fiber'"),
        ({"sampler": 3}, TypeError, "batch sampler, int"),
        ({"dataset": iter(())}, TypeError, "no __getitem__"),
    ],
)
def test_wrong_arguments_are_errors(options, error, text):
    with pytest.raises(error, match=text):
        loader_of("thread", **options)


def test_a_cpu_is_no_device_to_copy_to():
    loader = loader_of("threads", device="cpu", pin_memory=True)
    assert indices(loader) == batches() and loader.stats().copied_per_byte == 1.0


def test_a_device_gets_all_batches():
    for batch in loader_of("threads", device="meta"):
        assert batch.x.values.device.type == "meta"

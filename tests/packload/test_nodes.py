import gc
import os
import signal
import threading

import numpy as np
import pytest
import torch
from torchdata import nodes as tn

import packload.nodes as pn
from packload import Batch, Collate, Loader, PackedTensor
from packload.transfer import DeviceStreams, Ring

from .loaders import ours, soon
from .samples import Bad, Ragged, Slow, batches, check, value_error
from .streams import FakeStreams

PROCESS = {"mode": "process", "context": "fork"}


def chain(dataset=None, sampler=None, **options):
    node = pn.Indices(batches() if sampler is None else sampler)
    return pn.Collate(pn.Fetch(node, Ragged() if dataset is None else dataset), **options)


def indices(node):
    return [batch.index.tolist() for batch in node]


def twice(batch):
    return batch, batch.index * 2


def double(x):
    return 2 * x


# ---------------------------------------------------------------- composing


def test_stages_run_one_after_the_other_without_workers():
    node = chain()
    node.reset()
    for batch, expected in zip(node, batches(), strict=True):
        check(batch, expected)


@pytest.mark.parametrize("options", [{}, {"workers": 0}, {"workers": 1}, {"workers": 2, **PROCESS}])
def test_workers_change_nothing_about_what_comes(options):
    node = pn.Parallel(chain(Slow()), **options)
    for _ in range(2):
        node.reset()
        for batch, expected in zip(node, batches(), strict=True):
            check(batch, expected)


@pytest.mark.parametrize("options", [{"workers": 0}, {"workers": 2}, {"workers": 2, **PROCESS}])
def test_functions_of_one_s_own_are_stages(options):
    node = pn.Parallel(pn.Map(pn.Map(tn.IterableWrapper(range(30)), double), str, name="text"), **options)
    assert list(node) == [str(2 * k) for k in range(30)]


def test_a_stage_after_collating_sees_the_batch():
    node = pn.Parallel(pn.Map(chain(), twice), workers=2)
    for (batch, doubled), expected in zip(node, batches(), strict=True):
        assert doubled.tolist() == [2 * k for k in expected]
        check(batch, expected)


def test_a_stream_of_samples_needs_no_dataset():
    samples = tn.Mapper(tn.IterableWrapper(range(10)), Ragged().__getitem__)
    node = pn.Parallel(pn.Collate(tn.Batcher(samples, 4, drop_last=False)), workers=2)
    assert indices(node) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("around", [lambda node: node, lambda node: tn.Prefetcher(node, 2)])
def test_nodes_of_torchdata_go_around_and_keep_the_state(around):
    def make():
        return tn.Loader(around(pn.Parallel(chain(), workers=2)))

    loader = make()
    iterator = iter(loader)
    got = [next(iterator).index.tolist() for _ in range(4)]
    other = make()
    other.load_state_dict(loader.state_dict())
    assert got + indices(other) == batches()
    del iterator, loader, other
    gc.collect()
    assert soon(lambda: not ours())


def test_torchdata_s_own_mapper_runs_the_stages():
    fetched = pn.Fetch(pn.Indices(batches()), Ragged())
    node = tn.ParallelMapper(fetched, Collate(), num_workers=2, method="thread")
    assert indices(node) == batches()


def test_a_chain_of_maps_has_a_state():
    node = chain()
    node.reset()
    for _ in range(3):
        next(node)
    other = chain()
    other.reset(node.state_dict())
    assert indices(other) == batches()[3:]


def test_a_node_asked_for_its_state_first_gives_everything():
    node = pn.Parallel(chain(), workers=2)
    state = node.state_dict()
    assert not ours(), "workers start with the first item"
    assert indices(node) == batches()
    node.reset(state)
    assert indices(node) == batches()


@pytest.mark.parametrize("sampler", [range(4), torch.utils.data.SequentialSampler(range(4))])
def test_a_sampler_of_single_numbers_is_refused(sampler):
    with pytest.raises(TypeError, match="gave 0 where a list of indices .*BatchSampler"):
        list(Loader(Ragged(), sampler))


def test_a_finished_node_gives_nothing_more_until_it_is_reset():
    node = pn.Parallel(chain(), workers=2)
    assert len(list(node)) == 10 and list(node) == []
    node.reset()
    assert len(list(node)) == 10


def test_a_failed_node_ends_and_can_be_reset():
    node = pn.Parallel(chain(Bad(batches()[2][0], value_error)), workers=2)
    for _ in range(2):
        node.reset()
        assert [next(node).batch_size for _ in range(2)] == [4, 4]
        with pytest.raises(ValueError, match="bad sample"):
            next(node)
        assert list(node) == []


def test_stages_of_this_process_come_after_those_of_others():
    node = pn.Parallel(pn.Map(pn.Pin(chain()), str), workers=1, **PROCESS)
    with pytest.raises(ValueError, match=r"come first.*\['fetch', 'collate', 'pin', 'str'\]"):
        next(node)


def test_a_map_without_a_function_is_an_error():
    with pytest.raises(TypeError, match="Map has no function"):
        next(pn.Map(tn.IterableWrapper([1])))


def test_deleting_a_node_ends_its_workers():
    node = pn.Parallel(chain(), workers=3, persistent=True)
    assert len(list(node)) == 10 and len(ours()) == 3
    del node
    gc.collect()
    assert soon(lambda: not ours())


def test_a_bare_leaf_goes_through_stages_as_a_batch_and_comes_out_as_the_field():
    seen = []

    def look(batch):
        seen.append(batch)
        return batch

    data = [np.arange(k) for k in range(5)]
    node = pn.Map(pn.Collate(pn.Fetch(pn.Indices([[3, 4]]), data)), look)
    field = next(node)
    assert isinstance(seen[0], Batch) and isinstance(field, PackedTensor)
    assert field.values.tolist() == [0, 1, 2, 0, 1, 2, 3]


# ---------------------------------------------------------------- copies


@pytest.fixture
def streams(monkeypatch):
    streams = FakeStreams()
    monkeypatch.setattr("packload.loader.streams_of", lambda device: streams)
    return streams


def test_copies_are_issued_by_workers_and_awaited_by_the_consumer_in_order():
    streams = FakeStreams(at_once=True)
    node = pn.Parallel(pn.Copy(pn.Pin(chain()), "cpu", streams), workers=3)
    for k, (batch, expected) in enumerate(zip(node, batches(), strict=True)):
        check(batch, expected)
        arrived = [number for what, number in streams.log if what == "arrive"]
        assert len(arrived) == k + 1
    issued = [entry for entry in streams.log if entry[0] in ("copy", "record")]
    assert issued == [(what, k) for k in range(10) for what in ("copy", "record")]
    for k in range(10):
        assert streams.log.index(("record", k)) < streams.log.index(("arrive", k))


@pytest.mark.parametrize("way", [{"workers": 0}, {"workers": 1}, {"workers": 3}])
def test_a_loader_s_slots_are_page_locked_and_wait_for_their_copies(streams, way):
    loader = Loader(Ragged(), batches(), device="meta", **way)
    slots = loader._ring.slots
    iterator = iter(loader)
    first = next(iterator)
    check(first, batches()[0])
    assert soon(lambda: len(streams.events) == max(1, min(10, 2 * way["workers"] + 1)))
    assert loader._ring.free <= slots - len(streams.events) and streams.made
    for event in streams.events:
        event.complete = True
    for batch, expected in zip(iterator, batches()[1:], strict=True):
        for event in streams.events:
            event.complete = True
        check(batch, expected)
    check(first, batches()[0])
    del batch, first, iterator
    gc.collect()
    assert loader._ring.free == slots, "leaving a pass waits for the copies that are under way"
    stats = loader.stats()
    assert stats.copied_per_byte == 2.0 and stats.stages["copy"].total > 0


def test_slots_that_copies_hold_make_a_loader_take_fresh_memory_not_wait(streams):
    loader = Loader(Ragged(), batches(), device="meta", workers=1, prefetch=1, hold=0)
    for batch, expected in zip(loader, batches(), strict=True):
        check(batch, expected)
    assert loader.stats().overflows == 9
    assert [entry for entry in streams.log if entry[0] == "finish"] == [("finish", k) for k in range(10)]


def test_processes_write_into_pages_that_are_locked_here(streams):
    streams.at_once = True
    loader = Loader(Ragged(), batches(), device="meta", workers=2, **PROCESS)
    for batch, expected in zip(loader, batches(), strict=True):
        check(batch, expected)
    assert 0 < len(streams.locked) <= loader.root._ring.slots
    del loader, batch
    gc.collect()
    assert not streams.locked


def test_a_ring_of_one_s_own_serves_a_collate_stage():
    ring = Ring(1)
    node = chain(ring=ring)
    node.reset()
    for batch in node:
        assert ring.free == 0
        del batch
        assert ring.free == 1
    assert ring.overflows == 0


def test_the_device_streams_of_torch_have_the_same_methods():
    names = [name for name in vars(FakeStreams) if not name.startswith("_")]
    assert all(hasattr(DeviceStreams, name) for name in names)


def test_pinning_other_objects_is_the_identity_without_an_accelerator():
    value = {"a": torch.ones(2)}
    node = pn.Pin(tn.IterableWrapper([value]))
    assert torch.accelerator.is_available() or next(node) is value


# ---------------------------------------------------------------- ends that are none


def stop_iteration():
    raise StopIteration("used up")


@pytest.mark.parametrize("options", [{"workers": 0}, {"workers": 2}, {"workers": 1, **PROCESS}])
def test_a_sample_that_raises_stop_iteration_is_an_error_and_no_end(options):
    with pytest.raises(RuntimeError, match="only the source says") as caught:
        list(Loader(Bad(17, stop_iteration), batches(), **options))
    assert any("sample 17" in note for note in caught.value.__notes__)


def test_a_stage_without_workers_that_raises_stop_iteration_is_an_error():
    node = chain(Bad(17, stop_iteration))
    node.reset()
    with pytest.raises(RuntimeError, match="only the source says"):
        list(node)


@pytest.mark.parametrize("options", [{"workers": 0}, {"workers": 2}, {"workers": 1, **PROCESS}])
def test_closing_in_the_middle_of_a_pass_loses_no_batches(options):
    loader = Loader(Ragged(), batches(), **options)
    iterator = iter(loader)
    found = [next(iterator).index.tolist() for _ in range(3)]
    loader.close()
    assert found + [batch.index.tolist() for batch in iterator] == batches()


def test_a_loader_can_be_closed_from_another_thread_while_the_loop_waits():
    asked, free = threading.Event(), threading.Event()

    def wait():
        asked.set()
        free.wait()

    loader = Loader(Bad(0, wait), batches(), workers=1)
    raised = []

    def loop():
        try:
            list(loader)
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    asked.wait()
    threading.Timer(0.1, free.set).start()
    loader.close()
    thread.join(5)
    assert not thread.is_alive() and "ended" in raised[0]


class Held:
    """Index lists; the third waits to be let go, and says when it is asked for."""

    def __init__(self):
        self.asked, self.free = threading.Event(), threading.Event()

    def __iter__(self):
        for k, indices in enumerate(batches()):
            if k == 2:
                self.asked.set()
                self.free.wait()
            yield indices


@pytest.mark.parametrize("load", [False, True])
def test_no_worker_is_inside_the_sampler_when_it_begins_anew(load):
    sampler = Held()
    loader = Loader(Ragged(), sampler, workers=1, persistent_workers=True)
    state = loader.state_dict()
    iterator = iter(loader)
    next(iterator)
    sampler.asked.wait()
    threading.Timer(0.1, sampler.free.set).start()
    if load:
        loader.load_state_dict(state)
    else:
        iterator = iter(loader)
    assert next(iterator).index.tolist() == batches()[0]
    assert loader.state_dict()["root"]["source"]["count"] == 1
    assert [batch.index.tolist() for batch in iterator] == batches()[1:]
    loader.close()


def _exit_code(child):
    """Of a child; it is killed if it takes more than some seconds."""
    killer = threading.Timer(20.0, os.kill, (child, signal.SIGKILL))
    killer.start()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    killer.cancel()
    return code


@pytest.mark.parametrize("options", [{}, PROCESS], ids=["thread", "process"])
@pytest.mark.parametrize("served", [3, 10])
def test_a_fork_of_a_program_with_workers_has_workers_of_its_own(options, served):
    loader = Loader(Ragged(), batches(), workers=1, persistent_workers=True, **options)
    iterator = iter(loader)
    for _ in range(served):
        next(iterator)
    child = os.fork()
    if child == 0:
        try:
            rest = [batch.index.tolist() for batch in iterator]
            loader.close()
            os._exit(0 if rest == batches()[served:] else 1)
        finally:
            os._exit(2)
    code = _exit_code(child)
    assert code == 0
    assert [batch.index.tolist() for batch in iterator] == batches()[served:]
    loader.close()


class Epochs:
    """Index lists that differ from epoch to epoch, of a sampler without a state."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([[self.epoch, k] for k in range(5)])


@pytest.mark.parametrize("served", [0, 2, 5])
def test_a_state_brings_the_epoch_to_a_sampler_that_has_no_state(served):
    loader, other = (Loader(Ragged(), Epochs(), workers=1) for _ in range(2))
    loader.set_epoch(3)
    iterator = iter(loader) if served else loader
    for _ in range(served):
        next(iterator)
    other.load_state_dict(loader.state_dict())
    assert indices(other) == indices(iterator)
    assert indices(other) == indices(loader)

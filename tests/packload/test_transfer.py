import gc
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packload import Collate
from packload.block import ALIGNMENT, fresh_memory
from packload.transfer import Arriving, Ring, Transfer, move, pinned, streams_of

from .streams import FakeStreams


def field(array, length=8):
    """A float32 tensor over the storage of an array, as batches make their fields."""
    storage = torch.from_numpy(array[: 4 * length]).untyped_storage()
    return torch.empty(0, dtype=torch.float32).set_(storage, 0, (length,), (1,))


def in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@pytest.mark.parametrize("nbytes", [1, 63, 64, 1000, 1 << 20])
def test_memory_is_aligned_and_long_enough(nbytes):
    for ring in (Ring(1), Ring(0)):
        memory = ring.allocate(nbytes)
        assert memory.dtype == np.uint8 and memory.nbytes >= nbytes and memory.ctypes.data % ALIGNMENT == 0


KEPT = {
    "tensor": lambda x: x,
    "slice": lambda x: x[2:3],
    "detached": lambda x: x.detach(),
    "array": lambda x: x.numpy(),
    "storage": lambda x: x.untyped_storage(),
    "graph": lambda x: (x * torch.ones(8, requires_grad=True)).sum(),
    "leaf": lambda x: x.requires_grad_().exp(),
    "other view": lambda x: x.view(torch.int32).view(2, 4).T,
}


@pytest.mark.parametrize("kept", KEPT)
def test_a_slot_returns_when_the_last_that_needs_it_dies(kept):
    ring = Ring(1)
    held = KEPT[kept](field(ring.allocate(64)))
    gc.collect()
    assert ring.free == 0
    del held
    assert ring.free == 1


def test_a_slot_returns_after_backward():
    ring = Ring(1)
    weight = torch.ones(8, requires_grad=True)
    memory = ring.allocate(32)
    memory[:] = 0
    loss = (field(memory) * weight).sum()
    del memory
    loss.backward()
    del loss
    assert ring.free == 1 and weight.grad.tolist() == [0.0] * 8


def test_a_slot_returns_from_another_thread():
    ring = Ring(1)
    held = [field(ring.allocate(64))]
    in_thread(held.clear)
    assert ring.free == 1


def test_a_slot_returns_when_collating_fails():
    ring = Ring(1)

    def fail():
        memory = ring.allocate(64)
        field(memory)
        raise ValueError

    with pytest.raises(ValueError):
        fail()
    gc.collect()
    assert ring.free == 1


def test_a_slot_is_lent_again_and_grows_when_something_does_not_fit():
    ring = Ring(1)
    first = ring.allocate(100).ctypes.data
    assert ring.allocate(100).ctypes.data == first
    assert ring.allocate(5000).nbytes >= 5000
    assert ring.free == 1 and ring.overflows == 0


def test_a_slot_is_not_lost_when_there_is_no_memory():
    def make(nbytes):
        if nbytes > 1000:
            raise MemoryError
        return fresh_memory(nbytes)

    ring = Ring(1, make)
    with pytest.raises(MemoryError):
        ring.allocate(10_000)
    assert ring.free == 1
    assert ring.allocate(10).nbytes >= 10


def test_a_live_view_at_exit_is_no_error():
    program = (
        "import torch; from packload.transfer import Ring; ring = Ring(2)\n"
        "a = torch.from_numpy(ring.allocate(64)); b = [a[3:]]; b.append(b)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


MOVES = st.lists(st.tuples(st.booleans(), st.integers(0, 300), st.integers(0, 7)), max_size=40)


@given(MOVES, st.integers(0, 3))
def test_what_is_held_never_changes_and_overflows_are_counted(moves, slots):
    ring = Ring(slots)
    held, lent, overflows = [], 0, 0
    for number, (take, nbytes, which) in enumerate(moves):
        if take:
            array = ring.allocate(nbytes)
            array[:] = number % 251
            from_ring = lent < slots
            lent, overflows = lent + from_ring, overflows + (not from_ring)
            held.append((torch.from_numpy(array), number % 251, from_ring))
            del array
        elif held:
            lent -= held.pop(which % len(held))[2]
        assert all(bool((tensor == value).all()) for tensor, value, _ in held)
        assert (ring.free, ring.overflows) == (slots - lent, overflows)


# ---------------------------------------------------------------- copies


def packed(ring=None):
    return Collate().pack([{"x": np.arange(3)}, {"x": np.arange(5)}], ring and ring.allocate)


def test_a_copy_is_issued_on_the_side_stream_and_the_consumer_waits_for_its_event():
    streams = FakeStreams()
    transfer = Transfer(torch.device("cpu"), streams)
    first, second = transfer.copy(packed()), transfer.copy(packed())
    assert streams.log == [("copy", 0), ("record", 0), ("copy", 1), ("record", 1)]
    assert transfer.arrive(first).x.values.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    transfer.arrive(second)
    assert streams.log[4:] == [("arrive", 0), ("arrive", 1)]


def test_a_slot_is_used_again_only_after_the_copy_out_of_it_has_run():
    streams = FakeStreams()
    ring = Ring(2, streams.memory)
    transfer = Transfer(torch.device("cpu"), streams)
    ring.reclaim = transfer.reclaim
    arriving = [transfer.copy(packed(ring)) for _ in range(2)]
    assert all(isinstance(one, Arriving) for one in arriving)
    transfer.reclaim()
    assert ring.free == 0
    transfer.copy(packed(ring))
    assert ring.overflows == 1, "no event is complete"
    streams.events[1].complete = True
    transfer.reclaim()
    assert ring.free == 0, "copies end in order: the first is still under way"
    streams.events[0].complete = True
    transfer.copy(packed(ring))
    assert ring.overflows == 1 and ring.free == 1


def test_finish_waits_for_all_copies():
    streams = FakeStreams()
    ring = Ring(2)
    transfer = Transfer(torch.device("cpu"), streams)
    for _ in range(2):
        transfer.copy(packed(ring))
    transfer.finish()
    assert streams.log[-2:] == [("finish", 0), ("finish", 1)] and ring.free == 2


def test_a_copy_that_fails_leaves_nothing_behind():
    streams = FakeStreams()
    transfer = Transfer(torch.device("cpu"), streams)
    with pytest.raises(AttributeError):
        transfer.copy(object())
    assert transfer.copy(packed()).event is streams.events[0]


def test_without_streams_a_copy_is_done_when_it_returns():
    transfer = Transfer(torch.device("meta"), streams_of(torch.device("meta")))
    arriving = transfer.copy({"a": torch.ones(3), "b": ["text", torch.ones(2)]})
    moved = transfer.arrive(arriving)
    assert moved["a"].device.type == moved["b"][1].device.type == "meta" and moved["b"][0] == "text"
    transfer.reclaim()
    transfer.finish()


def test_a_device_without_streams_has_none():
    assert streams_of(torch.device("cpu")) is None


def test_an_object_moves_by_its_own_method():
    class Own:
        def to(self, device, non_blocking):
            return device, non_blocking

    assert move(Own(), torch.device("meta")) == (torch.device("meta"), True)


def test_pinning_is_nothing_without_an_accelerator():
    batch = packed()
    assert torch.accelerator.is_available() or pinned(batch) is batch

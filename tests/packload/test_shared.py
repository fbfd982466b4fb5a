import gc
import multiprocessing
import os
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packload.block import ALIGNMENT, fresh_memory
from packload.shared import SharedFile, SharedRing, dump, dumps, load

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8,
    torch.bool, torch.complex64,
]  # fmt: skip


def round_trip(value):
    dumped, memory = dump(value, fresh_memory)
    return load(dumped, memory)


def descriptors():
    return len(os.listdir("/proc/self/fd"))


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 2))
def test_tensors_come_back_as_they_were(dtype, shape, turned):
    tensor = torch.randint(0, 2, [5, *shape]).to(dtype)[2:]
    tensor = tensor.transpose(0, tensor.ndim - 1) if turned else tensor
    for back in (round_trip(tensor), pickle.loads(dumps(tensor))):
        assert back.dtype == dtype and back.shape == tensor.shape and back.is_contiguous()
        assert torch.equal(back, tensor)
        back.zero_()


def test_structures_of_anything_come_back():
    value = {"a": [torch.ones(2), (np.arange(6).reshape(2, 3).T, "text")], 3: None, "t": torch.tensor(5)}
    back = round_trip(value)
    assert back["a"][1][0].tolist() == [[0, 3], [1, 4], [2, 5]] and back["t"].item() == 5
    assert torch.equal(back["a"][0], torch.ones(2)) and back["a"][1][1] == "text" and back[3] is None


def test_a_view_ships_its_own_bytes_alone():
    big = torch.zeros(1 << 20)
    dumped, memory = dump([big[:10], np.zeros(1 << 20)[5:7]], fresh_memory)
    assert dumped.nbytes <= 2 * ALIGNMENT and len(dumped.pickle) < 1000
    back = load(dumped, memory)
    assert back[0].tolist() == [0.0] * 10


def test_tensors_have_version_counters_of_their_own():
    first, second = round_trip([torch.ones(3), torch.ones(3)])
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * first).sum()
    second.add_(1)
    loss.backward()
    assert weight.grad.tolist() == [1, 1, 1]


def test_parameters_and_leaves_keep_their_flags():
    leaf, parameter = round_trip(
        [torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(2), False)]
    )
    assert leaf.requires_grad and leaf.is_leaf
    assert isinstance(parameter, torch.nn.Parameter) and not parameter.requires_grad


def test_a_tensor_of_a_graph_is_refused():
    with pytest.raises(pickle.PicklingError, match=r"shape \(2,\).*detach"):
        dump(torch.ones(2, requires_grad=True) * 2, fresh_memory)


def test_conjugates_and_sparse_tensors_are_left_to_torch():
    value = [torch.ones(2, dtype=torch.complex64).mul(1j).conj(), torch.eye(2).to_sparse()]
    back = round_trip(value)
    assert torch.equal(back[0].resolve_conj(), value[0].resolve_conj())
    assert torch.equal(back[1].to_dense(), torch.eye(2))


def test_what_was_loaded_keeps_its_memory():
    ring = SharedRing(1)
    slot = ring.take()
    dumped, memory = dump([torch.ones(4), torch.zeros(4)], lambda n: ring.memory(slot, n))
    first, second = load(dumped, ring.lease(slot, memory.nbytes))
    del first, memory
    gc.collect()
    assert ring.free == 0 and second.tolist() == [0] * 4
    del second
    assert ring.free == 1


def _grow(file, done):
    file.memory(10_000)[-1] = 7
    done.send(None)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_another_process_makes_a_file_longer(method):
    context = multiprocessing.get_context(method)
    file = SharedFile()
    before = file.memory(100)
    before[3] = 5
    receive, send = context.Pipe(False)
    process = context.Process(target=_grow, args=(file, send))
    process.start()
    receive.recv()
    process.join(10)
    memory = file.memory(10_000)
    assert memory[3] == 5 and memory[9_999] == 0 and memory[-1] == 7
    memory[4] = 6
    assert before[4] == 6, "the mapping that was there is still one of the same memory"


def test_a_private_mapping_is_written_for_itself_alone():
    file = SharedFile()
    file.memory(10)[:] = 1
    own = file.private_memory()
    own[:] = 2
    assert file.memory(10)[0] == 1
    assert SharedFile().private_memory().nbytes == 0


def test_files_have_no_name_and_close_their_descriptors():
    names, before = os.listdir("/dev/shm"), descriptors()
    files = [SharedFile() for _ in range(5)]
    arrays = [file.memory(1 << 16) for file in files]
    assert os.listdir("/dev/shm") == names
    del files
    gc.collect()
    arrays[0][:] = 3
    assert arrays[0][-1] == 3
    del arrays
    gc.collect()
    assert descriptors() == before


def test_a_file_cannot_be_pickled_outside_of_starting_a_process():
    with pytest.raises(RuntimeError, match="inheritance"):
        pickle.dumps(SharedFile())


def test_an_empty_ring_lends_nothing_and_counts():
    ring = SharedRing(2)
    slots = {ring.take(), ring.take()}
    assert slots == {0, 1} and ring.take() is None and ring.overflows == 1
    ring.give_back(1)
    assert ring.take() == 1


def test_pages_are_locked_once_for_each_mapping_and_unlocked_at_the_end():
    locked, log = [], []

    def lock(memory):
        locked.append(memory.nbytes)
        log.append(memory.nbytes)
        return lambda: locked.remove(memory.nbytes)

    ring = SharedRing(1, lock)
    for nbytes in (100, 200, 10_000, 300):
        slot = ring.take()
        ring.lease(slot, nbytes)
    assert log == [4096, 12288] and locked == [12288]
    del ring
    gc.collect()
    assert not locked

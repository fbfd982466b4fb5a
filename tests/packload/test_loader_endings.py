"""Loader: errors, and every way in which a pass ends."""

import copy
import gc
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

from packload import Collate, CollateError

from .loaders import WAYS, every_way, indices, loader_of, ours, shared_names, soon
from .samples import Bad, Ragged, batches, value_error


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

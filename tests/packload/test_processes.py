import gc
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torchdata import nodes as tn

import packload.nodes as pn
from packload import Collate, Loader

from .loaders import indices, ours, shared_names, soon
from .samples import (
    Bad,
    GloballyRandom,
    Ragged,
    batches,
    check,
    exit_process,
    kill_process,
    many_tensors,
    named_error,
    sleep_long,
    value_error,
)

#: Spawned processes take seconds to start: in the fast tests one loader is.
spawned = pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])


def loader_of(dataset=None, sampler=None, collate=None, **options):
    dataset = Ragged() if dataset is None else dataset
    sampler = batches() if sampler is None else sampler
    return Loader(
        dataset, sampler, collate, **{"mode": "process", "workers": 1, "context": "fork", **options}
    )


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_spawned_processes_give_the_same_batches_pass_after_pass():
    names = shared_names()
    with loader_of(workers=2, context="spawn", persistent_workers=True) as loader:
        for _ in range(2):
            for batch, expected in zip(loader, batches(), strict=True):
                check(batch, expected)
        del batch
        children = [remote.process for remote in loader.root._pool._remotes]
        assert all(child.is_alive() for child in children)
        assert shared_names() <= names
    assert not any(child.is_alive() for child in children)
    assert all(child.exitcode == 0 for child in children)


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_one_pass_by_other_ways_to_start(context):
    assert indices(loader_of(context=context)) == batches()


@spawned
def test_many_held_batches_of_many_tensors_cost_no_descriptors(context):
    """256 descriptors, 20 held batches of 64 tensors each."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        loader = loader_of(sampler=[[k] for k in range(20)], collate=many_tensors, context=context)
        held, counts = [], []
        for batch in loader:
            held.append(batch)
            counts.append(descriptors())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(held) == 20 and max(counts) - counts[0] <= 20
    for first, batch in enumerate(held):
        assert [tensor.tolist() for tensor in batch] == [[first + k] * 10 for k in range(64)]


def test_held_batches_take_descriptors_of_the_ring_alone():
    data = [{f"f{k}": np.ones(3, np.float32) for k in range(50)} for _ in range(4)]
    held, counts = [], []
    for batch in loader_of(data, [[0, 1, 2, 3]] * 30):
        held.append((batch, dict(batch.items())))
        counts.append(descriptors())
    assert counts[-1] - counts[0] <= 10 and len(held) == 30


@spawned
def test_a_worker_that_is_killed_is_an_error_that_says_how_and_where(context):
    at = batches()[4][0]
    loader = loader_of(Bad(at, kill_process), context=context)
    with pytest.raises(
        RuntimeError, match=rf"worker process 0 \(pid \d+\) was killed by SIGKILL.*batch 4.*{at}"
    ):
        indices(loader)
    assert soon(lambda: not ours())
    del loader
    gc.collect()


def test_a_worker_that_is_killed_while_it_waits_is_an_error():
    loader = loader_of(workers=2, prefetch=1)
    iterator = iter(loader)
    next(iterator)
    for remote in loader.root._pool._remotes:
        os.kill(remote.process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="worker process [01] .* was killed by SIGKILL"):
        list(iterator)
    assert soon(lambda: not ours())


def test_a_worker_that_exits_is_an_error():
    with pytest.raises(SystemExit) as caught:
        indices(loader_of(Bad(3, exit_process)))
    assert "sample 3 of the dataset" in "\n".join(caught.value.__notes__)


@pytest.mark.slow
def test_a_worker_that_is_stuck_is_killed():
    loader = loader_of(Bad(batches()[1][0], sleep_long), workers=2)
    iterator = iter(loader)
    next(iterator)
    pids = [remote.process.pid for remote in loader.root._pool._remotes]
    begin = time.monotonic()
    del iterator
    gc.collect()
    assert time.monotonic() - begin < 6 and not ours()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_errors_keep_their_traceback_and_those_that_cannot_be_pickled_their_text():
    with pytest.raises(ValueError, match="a bad sample") as caught:
        indices(loader_of(Bad(3, value_error)))
    notes = "\n".join(caught.value.__notes__)
    assert "in worker process" in notes and "def value_error" in notes or "in value_error" in notes
    with pytest.raises(RuntimeError, match="Named: the sample has 3"):
        indices(loader_of(Bad(3, named_error)))


def test_what_cannot_be_pickled_is_refused_with_ways_out():
    with pytest.raises((TypeError, AttributeError), match="pickle") as caught:
        iter(loader_of([lambda: 3], context="spawn"))
    assert "context='fork'" in "\n".join(caught.value.__notes__)


def test_a_batch_that_cannot_be_pickled_is_an_error_that_names_it():
    def collate(samples):
        return {"f": lambda: 3}

    with pytest.raises((TypeError, AttributeError), match="pickle") as caught:
        list(loader_of(collate=collate))
    assert "batch 0, samples" in "\n".join(caught.value.__notes__)


def test_slots_grow_to_the_largest_batch():
    data = [np.full(n, n, np.float32) for n in (10, 100_000, 10, 1_000_000, 5)]
    loader = loader_of(data, [[k] for k in range(5)] * 3)
    for k, field in enumerate(loader):
        n = len(data[k % 5])
        assert field.values.shape == (n,) and bool((field.values == n).all())
    assert loader.stats().overflows == 0


def test_batches_without_a_buffer_and_texts_arrive():
    data = [{"text": f"sample {k}", "n": k, "tags": ["a"] * k} for k in range(4)]
    batch = next(iter(loader_of(data, [[2, 3]])))
    assert batch.text == ["sample 2", "sample 3"] and batch.tags == [["a"] * 2, ["a"] * 3]
    assert batch.n.tolist() == [2, 3]
    texts = next(iter(loader_of(["a", "b"], [[1, 0]])))
    assert texts == ["b", "a"]


def test_a_batch_made_inside_of_another_function_arrives_in_the_slot():
    collate = Collate({"x": "n"})

    def wrapped(samples):
        return collate(samples)

    def twice(samples):
        return {"one": collate(samples), "two": [collate(samples)]}

    for batch, expected in zip(loader_of(collate=wrapped), batches(), strict=True):
        check(batch, expected)
    for both, expected in zip(loader_of(collate=twice), batches(), strict=True):
        check(both["one"], expected)
        check(both["two"][0], expected)


def test_samples_share_no_memory_with_the_batch_of_another_task():
    """A view of the samples that a collate function returns is copied before its memory is used again."""
    data = [torch.full((5,), float(k)) for k in range(40)]
    for got, expected in zip(loader_of(data, batches(), torch.stack), batches(), strict=True):
        assert got[:, 0].tolist() == expected


def test_the_generators_of_a_process_are_seeded_for_every_batch():
    def numbers(workers, seed=0):
        loader = loader_of(GloballyRandom(), workers=workers, seed=seed)
        return [[x.tolist() for x in batch] for batch in loader]

    assert numbers(1) == numbers(3) != numbers(1, seed=1)


def test_every_worker_has_its_number_and_dataset():
    def init(dataset, worker):
        dataset.size = 1000 + worker
        return None

    class Sized(Ragged):
        def __getitem__(self, index):
            return self.size

    dataset = Sized()
    seen = {x for batch in loader_of(dataset, workers=2, worker_init=init) for x in batch.tolist()}
    assert seen <= {1000, 1001} and dataset.size == 40


ORPHANED = """
import json, sys, time
from packload import Loader
from tests.packload.samples import Bad, batches, sleep_long
if __name__ == "__main__":
    dataset = Bad(batches()[2][0], sleep_long)
    loader = Loader(dataset, batches(), mode="process", workers=2, context="{context}")
    iterator = iter(loader)
    next(iterator)
    print(json.dumps([r.process.pid for r in loader.root._pool._remotes]), flush=True)
    time.sleep(60)
"""


@spawned
def test_processes_end_when_the_main_process_is_killed(context, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(ORPHANED.format(context=context))
    root = Path(__file__).parents[2]
    names = shared_names()
    process = subprocess.Popen(
        [sys.executable, str(program)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    pids = json.loads(process.stdout.readline())
    process.kill()
    process.wait()

    def gone(pid):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        return state == "Z"

    assert soon(lambda: all(map(gone, pids)))
    assert soon(lambda: shared_names() <= names)


def test_large_items_and_large_replies_do_not_wait_for_each_other():
    samples = [[{"text": "x" * 300_000, "k": k}] for k in range(6)]
    node = pn.Parallel(
        pn.Collate(tn.IterableWrapper(samples)), workers=1, mode="process", context="fork", timeout=20.0
    )
    assert [batch.k.tolist() for batch in node] == [[k] for k in range(6)]

"""Ways to run a loader, and what tests of it look at."""

import os
import threading
import time

import pytest
import torch
import torch.utils._pytree as pytree

from packload import Loader

from .samples import Ragged, batches

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

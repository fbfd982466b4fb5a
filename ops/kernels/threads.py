"""Work on samples in parallel: a pool of threads, each of which runs PyTorch's operators on itself alone.

A loop over samples that hands each one to all cores waits for the slowest thread at every operator. Here
each thread takes the next sample, the longest first, and works on it to the end. PyTorch releases the
interpreter's lock inside its operators. The number of threads is that of the caller
(``torch.get_num_threads()``); with one thread, inside a dispatch mode (which belongs to one thread) and
where one sample is most of the work, the caller's thread does it all.

OpenMP's own threads, which ran the operator before, do not sleep at once: they spin for up to 8 ms (GNU's
with its defaults), on cores that the pool's threads then lack. So the caller, while the pool works, lets them
go, which is ``omp_pause_resource_all`` (OpenMP 5.0, 3.2.44); its next operator makes new ones.

The pool is made on first use and belongs to the process that made it: a fork makes its own.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

#: ``omp_pause_soft``.
_SOFT = 1

_lock = threading.Lock()
_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def for_each(work: Callable[[Any], None], items: Sequence[Any], costs: Sequence[float], least: float) -> None:
    """Call ``work`` on every item, in parallel where it pays; without gradients and autocast.

    Args:
        work: writes to places of its own; the order of calls is not known.
        costs: what each item costs, in any unit.
        least: the cost in all below which the caller's thread does it.

    Raises:
        Exception: what ``work`` raised first.
    """
    threads = min(torch.get_num_threads(), len(items))
    total = sum(costs)
    if threads < 2 or total < least or max(costs) * threads > 1.5 * total or _has_modes():
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for item in items:
                work(item)
        return
    order = sorted(range(len(items)), key=costs.__getitem__, reverse=True)
    queue = iter([items[i] for i in order])  # next() on it is atomic
    inference = torch.is_inference_mode_enabled()

    def run() -> None:
        with torch.inference_mode(inference), torch.no_grad(), torch.autocast("cpu", enabled=False):
            for item in queue:
                work(item)

    at_work = [_pool(torch.get_num_threads()).submit(run) for _ in range(threads)]
    if _pause is not None and total >= 16 * least:
        _pause(_SOFT)
    for one in at_work:
        one.result()


def _find_pause() -> Callable[[int], int] | None:
    """OpenMP's ``omp_pause_resource_all``, where the process has it: PyTorch loads its library for all."""
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)


_pause = _find_pause()


def _has_modes() -> bool:
    return torch._C._len_torch_dispatch_stack() > 0


def _pool(threads: int) -> ThreadPoolExecutor:
    key = (os.getpid(), threads)
    found = _pools.get(key)
    if found is None:
        with _lock:
            found = _pools.get(key) or _made(threads)
            _pools[key] = found
    return found


def _made(threads: int) -> ThreadPoolExecutor:
    """A pool whose threads are all there and run operators on one thread.

    ``torch.set_num_threads`` counts for the thread that calls it and for threads to come, so the caller says
    its own number again. A thread takes over the process's number when it first asks: before it sets its own.
    """
    here = threading.Barrier(threads + 1)

    def begin() -> None:
        torch.get_num_threads()
        torch.set_num_threads(1)
        here.wait()

    pool = ThreadPoolExecutor(threads, "packed-samples")
    try:
        for _ in range(threads):
            pool.submit(begin)
        here.wait()
    finally:
        torch.set_num_threads(threads)
    return pool


def _forget() -> None:
    """In a child of a fork: the parent's threads are not here, its lock may be held."""
    global _lock
    _lock = threading.Lock()
    _pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)

"""Workers: threads that run stages on what they draw of a feed, in this process or in one of their own.

A thread of :class:`Threads` runs all stages itself. A thread of :class:`Processes` has a process for those
that may run elsewhere, and runs the others: it sends a task and, so that the process never waits for it, the
one after; what comes back lies in shared memory (see :class:`packload.shared.SharedRing`) and is not copied.

A worker thread that has nothing to do waits for a feed. Only :meth:`Threads.close` ends it.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from time import monotonic, perf_counter
from typing import Any, Protocol

import numpy as np
import torch

from .block import Bytes
from .feed import Done, Feed, Seconds, Task

PATIENCE = 4.0
"""Seconds that workers have to end what they are at, before processes are killed and threads left alone."""

_MOST_INDICES = 128
_here = threading.local()
_alive: weakref.WeakSet[Threads] = weakref.WeakSet()


@dataclass
class Worker:
    """What a stage may know of the worker that it runs on.

    Attributes:
        number: which, from 0.
        count: of how many.
        allocate: memory for a batch, to be used instead of a stage's own ring; None for that.
    """

    number: int = 0
    count: int = 1
    allocate: Callable[[int], Bytes] | None = None


class Stage(Protocol):
    """What workers run."""

    name: str
    remote: bool

    def bind(self, worker: Worker) -> Callable[[Any], Any]:
        """The function of one item that a worker runs; asked for once a worker."""


def batch_seed() -> int:
    """A seed, below 2^63, for the randomness in the samples of the batch that the calling worker is at.

    It follows from the loader's seed, the epoch and the number of the batch alone, whatever the number and
    kind of workers. Worker threads share the generators of ``random``, ``numpy`` and ``torch``, so that the
    order in which they draw from these is chance; a generator made from this seed is repeatable. (Worker
    processes also seed those generators with it.)

    Raises:
        RuntimeError: no batch is being made in this thread.
    """
    key = getattr(_here, "key", None)
    if key is None:
        raise RuntimeError("batch_seed() is for datasets and collate functions that a packload loader calls")
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)


def run(
    steps: Sequence[tuple[str, Callable[[Any], Any]]], task: Task, key: tuple[int, ...], item: Any
) -> tuple[Any, BaseException | None, Seconds]:
    """Run steps on an item; what came of it, what was raised, how long each took."""
    seconds: Seconds = []
    outer = getattr(_here, "key", None)  # of a loader whose dataset uses this one
    _here.key = (*key, task.number)
    begin, name = perf_counter(), ""
    try:
        for name, step in steps:
            item = step(item)
            end = perf_counter()
            seconds.append((name, end - begin))
            begin = end
    except BaseException as raised:
        error = no_end(raised)
        error.add_note(f"packload: in {name} of batch {task.number}{describe(task.item)}")
        return None, error, seconds
    finally:
        _here.key = outer
    return item, None, seconds


def no_end(error: BaseException) -> BaseException:
    """An error of a stage; a RuntimeError for a StopIteration, which would end the loop without a word."""
    if not isinstance(error, StopIteration):
        return error
    instead = RuntimeError(f"a stage raised {error!r}; only the source says where a pass ends")
    instead.__cause__ = error
    for note in getattr(error, "__notes__", ()):
        instead.add_note(note)
    return instead


def describe(item: Any) -> str:
    """The indices of a batch, for errors."""
    if not isinstance(item, (list, tuple)) or not item or not isinstance(item[0], (int, str, np.integer)):
        return ""
    shown = ", ".join(repr(k.item() if isinstance(k, np.integer) else k) for k in item[:_MOST_INDICES])
    return f", samples [{shown}{', ...' if len(item) > _MOST_INDICES else ''}]"


class Threads:
    """A number of threads, each of which runs all stages.

    Args:
        stages: in order.
        count: how many threads.
    """

    def __init__(self, stages: Sequence[Stage], count: int) -> None:
        self.stages = list(stages)
        self.count = count
        self._inboxes: list[SimpleQueue[tuple[Feed, tuple[int, ...]] | None]] = []
        self._threads: list[threading.Thread] = []
        self._feed: Feed | None = None
        self._closed = False
        self._owner = os.getpid()

    @property
    def here(self) -> bool:
        """Whether the workers are this process's, and not those of one that it was forked from."""
        return self._owner == os.getpid()

    def begin(self, feed: Feed, key: tuple[int, ...]) -> None:
        """Serve a feed, when what was left of the one before is done with.

        Args:
            feed: what to draw of.
            key: with the number of a task, what its seed follows from.
        """
        self.halt()
        if not self._threads:
            self._start()
        self._feed = feed
        for inbox in self._inboxes:
            inbox.put((feed, key))

    def halt(self) -> None:
        """Serve the feed no longer."""
        if self._feed is not None:
            self._feed.stop()
            self._feed = None

    def close(self) -> None:
        """End all workers; returns when they have ended, or after :data:`PATIENCE` and a little more."""
        if self._closed or not self.here:
            return
        self._closed = True
        self.halt()
        for inbox in self._inboxes:
            inbox.put(None)
        self._end(monotonic() + PATIENCE)

    def _start(self) -> None:
        intra = torch.get_num_threads()
        ready: SimpleQueue[None] = SimpleQueue()
        self._inboxes = [SimpleQueue() for _ in range(self.count)]
        self._threads = [
            threading.Thread(target=self._main, args=(k, ready), name=f"packload-{k}", daemon=True)
            for k in range(self.count)
        ]
        _alive.add(self)
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            ready.get()
        torch.set_num_threads(intra)  # what workers set for themselves is also the default of new threads

    def _main(self, number: int, ready: SimpleQueue[None]) -> None:
        torch.set_num_threads(1)
        ready.put(None)
        inbox, failed = self._inboxes[number], None
        try:
            serve = self._server(number)
        except BaseException as error:
            error.add_note(f"packload: while worker {number} was made ready")
            failed = error
        while (message := inbox.get()) is not None:
            feed, key = message
            if failed is not None:
                feed.fail(failed)
                continue
            try:
                serve(feed, key)
            except BaseException as error:
                feed.fail(error)
            del feed, message
        self._leave(number)

    def _leave(self, number: int) -> None:
        """What a thread does last."""

    def _server(self, number: int) -> Callable[[Feed, tuple[int, ...]], None]:
        worker = Worker(number, self.count)
        steps = [(stage.name, stage.bind(worker)) for stage in self.stages]

        def serve(feed: Feed, key: tuple[int, ...]) -> None:
            while (task := feed.draw()) is not None:
                result, error, seconds = run(steps, task, key, task.item)
                feed.put(Done(task, result, error, task.seconds + seconds))
                del task, result, error

        return serve

    def _end(self, until: float) -> None:
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - monotonic()))


@atexit.register
def _close_all() -> None:
    """End the workers that are left, before the interpreter goes and their threads with it."""
    for workers in list(_alive):
        workers.close()

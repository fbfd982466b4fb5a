"""Feed: one pass over a source, of which several workers draw and which one consumer reads in order.

    source --draw, one at a time--> worker --put, as it is done--> consumer, in the order drawn
       ^                              |
       +--- permits: so many items may be drawn and not read yet

All waiting is on queues that are written in C and have neither timeouts nor a polling thread: handing an item
over takes some microseconds.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import Lock
from time import perf_counter
from typing import Any, NamedTuple

Seconds = list[tuple[str, float]]
"""What was waited for or worked at, and for how long."""


class Task(NamedTuple):
    """An item that was drawn.

    Attributes:
        number: of how many that were drawn before it.
        item: what the source gave.
        state: the source's state after it.
        seconds: waiting for a permit, and drawing.
    """

    number: int
    item: Any
    state: Any
    seconds: Seconds


class Done(NamedTuple):
    """What became of a task.

    Attributes:
        task: which.
        result: what the workers made of it.
        error: what was raised instead.
        seconds: of all stages.
        last: nothing was drawn: the source has ended.
        moves: how often its bytes were copied on the way.
    """

    task: Task
    result: Any
    error: BaseException | None
    seconds: Seconds
    last: bool = False
    moves: int = 0


class Feed:
    """See the module.

    Args:
        source: an iterator; only one thread at a time is inside.
        get_state: the source's state, asked for after every item.
        permits: how many items may be drawn and not read yet.
        first: the number of the first item.
    """

    def __init__(
        self, source: Iterator[Any], get_state: Callable[[], Any], permits: int, first: int = 0
    ) -> None:
        self._source = source
        self._get_state = get_state
        self._lock = Lock()
        self._permits: SimpleQueue[bool] = SimpleQueue()
        for _ in range(permits):
            self._permits.put(True)
        self._results: SimpleQueue[Done | BaseException] = SimpleQueue()
        self._early: dict[int, Done] = {}
        self._drawn = first
        self._next = first
        self._ended = False
        self.stopped = False

    # ------------------------------------------------------------ for workers

    def draw(self, wait: bool = True) -> Task | None:
        """The next task; None when there is no more, or none at once and ``wait`` is False."""
        begin = perf_counter()
        try:
            permit = self._permits.get(wait)
        except queue.Empty:
            return None
        if not permit or self._ended:
            self._permits.put(False)  # for the next one that waits
            return None
        full = perf_counter()
        with self._lock:
            if self._ended:
                return None
            number, item, state, error = self._drawn, None, None, None
            try:
                item = next(self._source)
                state = self._get_state()
            except StopIteration:
                self._ended = True
                state, error = self._final_state()
            except BaseException as raised:
                self._ended = True
                error = raised
            self._drawn += 1
        seconds = [("full", full - begin), ("draw", perf_counter() - full)]
        task = Task(number, item, state, seconds)
        if self._ended:
            self.put(Done(task, None, error, seconds, last=error is None))
            self._permits.put(False)
            return None
        return task

    def put(self, done: Done) -> None:
        """Hand over what became of a task."""
        if not self.stopped:
            self._results.put(done)

    def fail(self, error: BaseException) -> None:
        """Raise an error in the consumer, whatever it waits for."""
        self._results.put(error)

    def _final_state(self) -> tuple[Any, BaseException | None]:
        try:
            return self._get_state(), None
        except BaseException as error:
            return None, error

    # ------------------------------------------------------------ for the consumer

    def read(self, timeout: float | None = None) -> Done:
        """What became of the next task in order.

        Raises:
            queue.Empty: it took longer than ``timeout`` seconds.
            BaseException: what a worker failed with outside of any task.
        """
        while self._next not in self._early:
            done = self._results.get(True, timeout)
            if isinstance(done, BaseException):
                raise done
            self._early[done.task.number] = done
        self._next += 1
        return self._early.pop(self._next - 1)

    def permit(self) -> None:
        """Let one more item be drawn."""
        self._permits.put(True)

    def stop(self) -> None:
        """Let nothing more be drawn, and drop what was not read; who waits in :meth:`read` gets an error."""
        self.stopped = self._ended = True
        self._permits.put(False)
        self._early.clear()
        while True:
            try:
                self._results.get_nowait()
            except queue.Empty:
                break
        self._results.put(RuntimeError("the pass was ended while a batch of it was waited for"))

    def settle(self, timeout: float) -> None:
        """Wait until no worker is inside the source, after :meth:`stop`.

        Raises:
            TimeoutError: one still is after ``timeout`` seconds.
        """
        if not self._lock.acquire(timeout=timeout):
            raise TimeoutError(
                f"a worker has been inside the source, such as a batch sampler, for {timeout} seconds after "
                "the pass was ended; no other pass can begin before it comes back"
            )
        self._lock.release()

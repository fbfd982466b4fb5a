"""Streams of no device, which keep a record of what was asked of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from packload import Batch
from packload.block import Bytes, fresh_memory


class Event:
    """Completes when a test says so."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.complete = False


class FakeStreams:
    """See :class:`packload.transfer.Streams`.

    Attributes:
        log: pairs of what was asked and the number of the copy or event.
        events: all of them.
        at_once: whether events are complete as soon as they are recorded.
    """

    def __init__(self, at_once: bool = False) -> None:
        self.log: list[tuple[str, int]] = []
        self.events: list[Event] = []
        self.at_once = at_once
        self.made: list[int] = []
        self.locked: list[int] = []
        self._inside = threading.local()
        self._copies = 0

    def memory(self, nbytes: int) -> Bytes:
        self.made.append(nbytes)
        return fresh_memory(nbytes)

    def lock(self, memory: Bytes) -> Callable[[], None]:
        address = memory.ctypes.data
        self.locked.append(address)
        return lambda: self.locked.remove(address)

    @contextlib.contextmanager
    def side(self) -> Iterator[None]:
        self._inside.now = True
        yield
        self._inside.now = False

    def move(self, batch: Any) -> Any:
        assert self._inside.now, "a copy was issued outside of the side stream"
        self.log.append(("copy", self._copies))
        self._copies += 1
        return Batch.from_buffer(batch.buffer.clone(), batch.header())

    def record(self) -> Event:
        assert self._inside.now, "an event was recorded outside of the side stream"
        event = Event(len(self.events))
        event.complete = self.at_once
        self.events.append(event)
        self.log.append(("record", event.number))
        return event

    def done(self, event: Event) -> bool:
        return event.complete

    def finish(self, event: Event) -> None:
        self.log.append(("finish", event.number))
        event.complete = True

    def arrive(self, batch: Any, event: Event) -> None:
        self.log.append(("arrive", event.number))

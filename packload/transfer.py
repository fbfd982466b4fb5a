"""Transfer: memory that is used again, and copies to a device that run beside the work.

    worker threads                    side stream                     consumer
    slot <- collate                   wait for nothing
    copy(batch) ------ issued on ---> copy, record event
                                          |------- event -----------> its stream waits, is recorded
    slot <- returned  <---- event --------|

A :class:`Ring` lends slots of memory. A slot returns when the last view of it dies, be that a tensor, a slice
of one, or what autograd kept: a batch that is kept stays valid. Who finds no slot free gets fresh memory,
which is counted, and never waits.

A :class:`Transfer` copies batches to a device on one side stream. Nobody waits for a copy on the host: the
consumer's stream waits for the copy's event, and the batch in host memory, with it its slot, is let go of
once that event has completed. What of the device's memory is reused when is the business of its allocator,
which is told that the consumer's stream uses the batch (``record_stream``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from threading import RLock
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils.data._utils.pin_memory import pin_memory

from .block import Bytes, fresh_memory

_ROOM = 8
"""A slot that grows gets one part in this many more than was asked for."""


T = TypeVar("T")


class Lease:
    """The right to use memory, held by every view of it; given back when the last one dies.

    An array made from it, ``numpy.asarray(lease)``, has the lease as its base, and so have its slices and the
    storage of a tensor made from any of them. (A finalizer on an array would not do: the base of a slice is
    the owner of the memory, not the array that was sliced.)

    Args:
        memory: uint8 [n], kept alive.
        give_back: called once, with ``token``, in whatever thread the last view dies; must not take a lock.
        token: what is given back.
    """

    __slots__ = ("__array_interface__", "__weakref__", "_give_back", "_memory", "_token")

    def __init__(self, memory: Bytes, give_back: Callable[[Any], None], token: Any) -> None:
        self._memory = memory
        self._give_back = give_back
        self._token = token
        self.__array_interface__ = {
            "data": (memory.ctypes.data, False),
            "shape": memory.shape,
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        self._give_back(self._token)


class Slot:
    """Memory of a ring, which grows when a batch does not fit."""

    __slots__ = ("memory",)

    def __init__(self) -> None:
        self.memory: Bytes | None = None


class FreeSlots(Generic[T]):
    """The slots that nobody uses, taken and given back by any thread without a lock.

    Args:
        slots: all of them.
    """

    def __init__(self, slots: Iterable[T]) -> None:
        self._free = deque(slots)
        self.slots = len(self._free)
        self._overflows: deque[None] = deque()

    @property
    def free(self) -> int:
        """How many slots nobody uses."""
        return len(self._free)

    @property
    def overflows(self) -> int:
        """How often no slot was free where one was wanted."""
        return len(self._overflows)

    def _take(self) -> T | None:
        """The slot that was used last, which is warm; None if there is none."""
        try:
            return self._free.pop()
        except IndexError:
            return None

    def _overflow(self) -> None:
        self._overflows.append(None)

    def _lease(self, memory: Bytes, slot: T) -> Bytes:
        """The memory of a slot, which is given back when the last view dies."""
        return np.asarray(Lease(memory, self._free.append, slot))


class Ring(FreeSlots[Slot]):
    """Lends memory that is used again.

    Args:
        slots: how many; none is made before it is needed.
        make: makes memory of a number of bytes, aligned to 64.
        reclaim: called when no slot is free; may cause some to be given back.
    """

    def __init__(
        self,
        slots: int,
        make: Callable[[int], Bytes] = fresh_memory,
        reclaim: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(Slot() for _ in range(slots))
        self._make = make
        self.reclaim = reclaim

    def allocate(self, nbytes: int) -> Bytes:
        """Memory of at least ``nbytes``, uint8, aligned to 64; the slot used last comes first, it is warm."""
        slot = self._take()
        if slot is None and self.reclaim is not None:
            self.reclaim()
            slot = self._take()
        if slot is None:
            self._overflow()
            return self._make(nbytes)
        memory = slot.memory
        if memory is None or memory.nbytes < nbytes:
            try:
                memory = slot.memory = self._make(nbytes + nbytes // _ROOM)
            except BaseException:
                self._free.append(slot)
                raise
        return self._lease(memory, slot)


class Streams(Protocol):
    """What a :class:`Transfer` needs of an accelerator. Tests have one of their own that keeps a record."""

    def memory(self, nbytes: int) -> Bytes:
        """New page-locked host memory."""

    def lock(self, memory: Bytes) -> Callable[[], None] | None:
        """Lock the pages of memory that is there, and return what unlocks them; None where that cannot be."""

    def side(self) -> AbstractContextManager[Any]:
        """The side stream: copies that are issued inside run on it."""

    def move(self, batch: Any) -> Any:
        """Issue the copy of a batch to the device."""

    def record(self) -> Any:
        """An event that completes when all that was issued on the side stream has run."""

    def done(self, event: Any) -> bool:
        """Whether an event has completed; does not wait."""

    def finish(self, event: Any) -> None:
        """Wait on the host for an event."""

    def arrive(self, batch: Any, event: Any) -> None:
        """Let the calling thread's stream wait for an event, and record that it uses the batch."""


class DeviceStreams:
    """Streams of an accelerator, ``torch.cuda`` or one with the same functions.

    Args:
        device: which; without an index the current one.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        if device.index is None:
            device = torch.device(device.type, self._module.current_device())
        self.device = device
        self._stream = self._module.Stream(device=device)

    def memory(self, nbytes: int) -> Bytes:
        """See :class:`Streams`."""
        with self._module.device(self.device):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()

    def lock(self, memory: Bytes) -> Callable[[], None] | None:
        """See :class:`Streams`; CUDA can, others are not asked."""
        if self.device.type != "cuda" or torch.version.hip is not None:
            return None
        runtime, address = torch.cuda.cudart(), memory.ctypes.data
        with self._module.device(self.device):
            if int(runtime.cudaHostRegister(address, memory.nbytes, 1)) != 0:  # 1: for all contexts
                return None
        return lambda: runtime.cudaHostUnregister(address)

    def side(self) -> AbstractContextManager[Any]:
        """See :class:`Streams`."""
        return self._module.stream(self._stream)

    def move(self, batch: Any) -> Any:
        """See :class:`Streams`."""
        return move(batch, self.device)

    def record(self) -> Any:
        """See :class:`Streams`."""
        event = self._module.Event()
        event.record(self._stream)
        return event

    def done(self, event: Any) -> bool:
        """See :class:`Streams`."""
        return event.query()

    def finish(self, event: Any) -> None:
        """See :class:`Streams`."""
        event.synchronize()

    def arrive(self, batch: Any, event: Any) -> None:
        """See :class:`Streams`."""
        stream = self._module.current_stream(self.device)
        stream.wait_event(event)
        record_stream(batch, stream)


def streams_of(device: torch.device) -> Streams | None:
    """The streams of a device; None for one without (a CPU, or memory that both share)."""
    if device.type in ("cpu", "meta"):
        return None
    module = torch.get_device_module(device)
    return DeviceStreams(device) if hasattr(module, "Stream") and hasattr(module, "stream") else None


class Arriving(NamedTuple):
    """A batch whose copy was issued, and the event that completes with it."""

    batch: Any
    event: Any


class Transfer:
    """Copies batches to a device on a side stream; see the module's picture.

    Any thread may call :meth:`copy`. Without streams the copy is done when it returns, and there is nothing
    to wait for.

    Args:
        device: where to.
        streams: None for a device without.
    """

    def __init__(self, device: torch.device, streams: Streams | None) -> None:
        self.device = device
        self.streams = streams
        self._under_way: deque[tuple[Any, Any]] = deque()
        self._lock = RLock()  # letting go of a batch can run any finalizer, also one that ends up here

    def copy(self, batch: Any) -> Arriving:
        """Issue the copy of a batch; it is kept until the copy has run."""
        streams = self.streams
        if streams is None:
            return Arriving(move(batch, self.device), None)
        with self._lock:  # one at a time: the event is that of this copy, and events complete in order
            with streams.side():
                moved = streams.move(batch)
                event = streams.record()
            self._under_way.append((event, batch))
        del batch
        self.reclaim()
        return Arriving(moved, event)

    def arrive(self, arriving: Arriving) -> Any:
        """The batch, for use on the calling thread's stream."""
        if arriving.event is not None and self.streams is not None:
            self.streams.arrive(arriving.batch, arriving.event)
        return arriving.batch

    def reclaim(self) -> None:
        """Let go of the batches whose copies have run."""
        streams = self.streams
        if streams is None:
            return
        with self._lock:
            while self._under_way and streams.done(self._under_way[0][0]):
                self._under_way.popleft()

    def finish(self) -> None:
        """Wait for all copies, and let go of their batches."""
        streams = self.streams
        if streams is None:
            return
        with self._lock:
            while self._under_way:
                event, _ = self._under_way.popleft()
                streams.finish(event)


def move(batch: Any, device: torch.device) -> Any:
    """Issue the copy of a batch of any kind to a device: by its own ``to``, or all tensors inside."""
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True)
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)


def record_stream(batch: Any, stream: Any) -> None:
    """Record that a stream uses a batch of any kind."""
    if hasattr(batch, "record_stream"):
        batch.record_stream(stream)
        return
    for leaf in pytree.tree_leaves(batch):
        if hasattr(leaf, "record_stream"):
            leaf.record_stream(stream)


def pinned(batch: Any) -> Any:
    """A batch of any kind in page-locked memory; itself without an accelerator, or if it is there."""
    if not torch.accelerator.is_available():
        return batch
    buffer = getattr(batch, "buffer", None)
    return batch if isinstance(buffer, Tensor) and buffer.is_pinned() else pin_memory(batch)

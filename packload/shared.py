"""Memory that processes share, and objects whose bytes lie in it.

A :class:`SharedFile` is a file without a name: nothing is left of it when the last process that has it open
ends, however that happens. Every process maps it once. Who needs more room than there is makes it longer, and
the other processes map it anew when they come to what lies behind the end of theirs.

:func:`dump` and :func:`load` are pickle, with the bytes of arrays and tensors in one block of memory outside
of the pickle (protocol 5). Each tensor ships its own elements only, whatever it is a view of, and no
descriptor.
"""

from __future__ import annotations

import io
import itertools
import mmap
import operator
import os
import pickle
import tempfile
from collections.abc import Callable
from multiprocessing import context, reduction
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .block import ALIGNMENT, Bytes
from .transfer import FreeSlots

Ints = tuple[int, ...]


class SharedFile:
    """Memory without a name that can be handed to a process that is being started.

    Its descriptor is inherited by forked processes and duplicated for spawned ones.
    """

    def __init__(self) -> None:
        self._descriptor = _anonymous_file()
        self._memory: Bytes | None = None

    def memory(self, nbytes: int, room: int = 0) -> Bytes:
        """The file's memory in this process, uint8, at least ``nbytes`` long.

        Args:
            nbytes: what must be there.
            room: what is added where the file has to become longer.

        Raises:
            OSError: there is no memory left.
        """
        if self._memory is None or self._memory.nbytes < nbytes:
            size = os.fstat(self._descriptor).st_size
            if size < nbytes:
                size = -(-(nbytes + room) // mmap.PAGESIZE) * mmap.PAGESIZE
                os.ftruncate(self._descriptor, size)
            mapped = mmap.mmap(self._descriptor, size) if size else bytearray()
            self._memory = np.frombuffer(mapped, np.uint8)
        return self._memory

    def private_memory(self) -> Bytes:
        """A mapping of its own, in which writing is seen by nobody else and is not kept."""
        size = os.fstat(self._descriptor).st_size
        mapped = mmap.mmap(self._descriptor, size, access=mmap.ACCESS_COPY) if size else bytearray()
        return np.frombuffer(mapped, np.uint8)

    def __getstate__(self) -> Any:
        context.assert_spawning(self)
        return reduction.DupFd(self._descriptor)

    def __setstate__(self, state: Any) -> None:
        self._descriptor = state.detach()
        self._memory = None

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        descriptor = self.__dict__.pop("_descriptor", None)
        if descriptor is not None:
            close(descriptor)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("packload")
    descriptor, path = tempfile.mkstemp(prefix="packload-")
    os.unlink(path)
    return descriptor


class SharedRing(FreeSlots[int]):
    """Slots of shared memory, owned by one process and written by others.

    Args:
        slots: how many.
        lock: locks the pages of memory, so that devices can read it, and returns what unlocks them.
    """

    def __init__(self, slots: int, lock: Callable[[Bytes], Callable[[], None] | None] | None = None) -> None:
        super().__init__(range(slots))
        self.files = [SharedFile() for _ in range(slots)]
        self._lock = lock
        self._locked: dict[int, tuple[Bytes, Callable[[], None] | None]] = {}

    def reserve(self, count: int) -> None:
        """Make files for ``count`` more, which are never taken or lent."""
        while len(self.files) < self.slots + count:
            self.files.append(SharedFile())

    def take(self) -> int | None:
        """A free slot, the one used last; None if there is none."""
        slot = self._take()
        if slot is None:
            self._overflow()
        return slot

    def memory(self, slot: int, nbytes: int) -> Bytes:
        """A slot's memory, at least ``nbytes`` long."""
        return self.files[slot].memory(nbytes)

    def lease(self, slot: int, nbytes: int) -> Bytes:
        """A slot's memory; the slot is given back when the last view dies."""
        memory = self.memory(slot, nbytes)
        if self._lock is not None:
            known = self._locked.get(slot)
            if known is None or known[0] is not memory:
                self._unlock(slot)
                self._locked[slot] = memory, self._lock(memory)
        return self._lease(memory, slot)

    def give_back(self, slot: int) -> None:
        """Give a slot back that was taken and not lent."""
        self._free.append(slot)

    def _unlock(self, slot: int) -> None:
        _, unlock = self._locked.pop(slot, (None, None))
        if unlock is not None:
            unlock()

    def __del__(self) -> None:
        for slot in list(self.__dict__.get("_locked", ())):
            self._unlock(slot)


class Dumped(NamedTuple):
    """A pickle, and the places of its buffers in a block of memory: pairs of start and size in bytes."""

    pickle: bytes
    places: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the block."""
        return sum(self.places[-1]) if self.places else 0


def dump(value: Any, allocate: Callable[[int], Bytes]) -> tuple[Dumped, Bytes]:
    """Pickle an object.

    Args:
        value: what can be pickled. Arrays and tensors in host memory may lie anywhere inside.
        allocate: gives memory for their bytes, aligned to 64; called once.

    Returns:
        The pickle, and the memory.

    Raises:
        Exception: what pickle raises for what it cannot do.
    """
    buffers: list[Bytes] = []

    def keep(buffer: pickle.PickleBuffer) -> None:
        buffers.append(np.frombuffer(buffer.raw(), np.uint8))

    stream = io.BytesIO()
    _Pickler(stream, 5, buffer_callback=keep).dump(value)
    places, end = [], 0
    for buffer in buffers:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        places.append((start, buffer.nbytes))
        end = start + buffer.nbytes
    memory = allocate(end)
    for (start, size), buffer in zip(places, buffers):
        memory[start : start + size] = buffer
    return Dumped(stream.getvalue(), tuple(places)), memory


def dumps(value: Any) -> bytes:
    """Pickle an object, its arrays and tensors inside; ``pickle.loads`` makes it again."""
    stream = io.BytesIO()
    _Pickler(stream, 5).dump(value)
    return stream.getvalue()


def load(dumped: Dumped, memory: Bytes) -> Any:
    """The object; its arrays and tensors lie in ``memory`` and keep it alive."""
    return pickle.loads(
        dumped.pickle, buffers=[memory[start : start + size] for start, size in dumped.places]
    )


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) not in (Tensor, torch.nn.Parameter) or not _plain(value):
            return NotImplemented
        if value.requires_grad and not value.is_leaf:
            raise pickle.PicklingError(
                f"a tensor of shape {tuple(value.shape)} is part of an autograd graph, which cannot leave "
                "its process: detach() it"
            )
        flat = value.detach().contiguous().reshape(-1)
        strides = tuple(itertools.accumulate(value.shape[:0:-1], operator.mul, initial=1))[::-1]
        array = pickle.PickleBuffer(flat.view(torch.uint8).numpy())
        parameter = isinstance(value, torch.nn.Parameter)
        shape = tuple(value.shape)
        return _tensor, (array, value.dtype, shape, strides[: len(shape)], value.requires_grad, parameter)


def _plain(value: Tensor) -> bool:
    plain = value.device.type == "cpu" and value.layout is torch.strided and not value.is_quantized
    return plain and not value.is_conj() and not value.is_neg()


def _tensor(
    buffer: Any, dtype: torch.dtype, shape: Ints, strides: Ints, requires_grad: bool, parameter: bool
) -> Tensor:
    storage = torch.from_numpy(np.frombuffer(buffer, np.uint8)).untyped_storage()
    tensor = torch.empty(0, dtype=dtype).set_(storage, 0, shape, strides)  # a version counter of its own
    return torch.nn.Parameter(tensor, requires_grad) if parameter else tensor.requires_grad_(requires_grad)

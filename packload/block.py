"""A batch's buffer: where partitions, maps and fields lie in it, and how tensors are made from it.

    | numbers | lengths [P, B] | offsets [P, B + 1] | maps ... | fields ... |

Every part begins at a multiple of 64 bytes. A :class:`Spec` says what is in a buffer; it is the same for all
batches of one kind. The *numbers* say how much of it there is in this batch, and lie at the buffer's head, so
that another process needs the buffer and the spec alone. P partitions are the batch's axes, then its grids
of several axes.

Fields are made on first access, each with a storage of its own that begins at its part of the buffer and
keeps all of it alive, and with it whatever owns the memory. They are not views of one tensor: views share a
version counter, so that writing into one field would break another one's backward; and where a tensor begins
in its storage is a number that a compiler guards on. Lengths are copied out.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from ops import Axis, Grid, PackedTensor
from ops.axis import Partition, delivered_grid, map_name
from ops.kernels import structure

ALIGNMENT = 64
_SPECS_KEPT = 1024
_DLPACK = ("cuda", "xpu")

#: The types that numpy has too.
NUMPY_DTYPES = {
    kind: np.dtype(str(kind).removeprefix("torch."))
    for kind in (
        *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    )
}

Bytes = NDArray[np.uint8]


class Map(NamedTuple):
    """A map that is delivered: of which partition, which kind, and onto which of a grid's axes."""

    part: int
    kind: str
    kept: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """What ``ops`` calls it."""
        return self.kind if self.kept is None else map_name(self.kind, self.kept)


class Leaf(NamedTuple):
    """A field: ``packed`` over a partition, ``dense`` [B, *static], or ``kept`` outside of the buffer.

    Attributes:
        slot: its place among the fields in the buffer, or among those kept outside.
        dtype: ``"float32"``.
        static: the trailing dims of ``values``.
        order: see :class:`~ops.PackedTensor`.
        part: the partition it lies over.
    """

    kind: Literal["packed", "dense", "kept"]
    slot: int
    dtype: str = ""
    static: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    part: int = -1

    def layout(self) -> Layout:
        """How its values lie in memory."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return Layout(
            dtype, NUMPY_DTYPES.get(dtype), dtype.itemsize * prod(self.static), self.static, self.part
        )


class Layout(NamedTuple):
    """How a field's values lie in memory; ``known`` is the numpy dtype, None where numpy has none."""

    dtype: torch.dtype
    known: np.dtype[Any] | None
    row_bytes: int
    static: tuple[int, ...]
    part: int


class Node(NamedTuple):
    """A Batch: whether samples were tuples, the fields' names, and what they are."""

    ordered: bool
    names: tuple[Any, ...]
    parts: tuple[Any, ...]


Tree = Leaf | Node


@dataclass(frozen=True)
class Spec:
    """What lies in a buffer.

    Attributes:
        axes: the names of the ragged axes.
        grids: the products of several axes, as indices into ``axes``.
        maps: the maps that are delivered.
        tree: the fields, by name.
    """

    axes: tuple[str | None, ...]
    grids: tuple[tuple[int, ...], ...]
    maps: tuple[Map, ...]
    tree: Tree

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """The fields in the buffer, by slot."""
        found = [leaf for leaf in _leaves(self.tree) if leaf.kind != "kept"]
        return tuple(sorted(found, key=lambda leaf: leaf.slot))

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """How the fields in the buffer lie there, by slot."""
        return tuple(leaf.layout() for leaf in self.leaves)

    @cached_property
    def maps_of(self) -> tuple[tuple[tuple[str, int], ...], ...]:
        """The name and the place among all maps of every map of a partition, by partition."""
        return tuple(
            tuple((m.name, k) for k, m in enumerate(self.maps) if m.part == part)
            for part in range(self.partitions)
        )

    @cached_property
    def partitions(self) -> int:
        """Number of partitions P."""
        return len(self.axes) + len(self.grids)

    def axes_of(self, part: int) -> tuple[int, ...]:
        """The axes of a partition."""
        return (part,) if part < len(self.axes) else self.grids[part - len(self.axes)]

    @cached_property
    def count(self) -> int:
        """How many numbers a batch has: bytes, B, cells and maxima of partitions, rows of maps, starts."""
        return 4 + 2 * self.partitions + 2 * len(self.maps) + len(self.leaves)

    @cached_property
    def text(self) -> str | None:
        """The spec as text, see :func:`parse_spec`; None where a field's name is not a literal."""
        text = repr((self.axes, self.grids, tuple(map(tuple, self.maps)), _plain(self.tree)))
        try:
            return text if parse_spec(text) == self else None
        except (ValueError, SyntaxError):
            return None


def _leaves(tree: Tree) -> list[Leaf]:
    return [tree] if isinstance(tree, Leaf) else [leaf for part in tree.parts for leaf in _leaves(part)]


def _plain(tree: Tree) -> tuple[Any, ...]:
    return (
        tuple(tree) if isinstance(tree, Leaf) else (tree.ordered, tree.names, tuple(map(_plain, tree.parts)))
    )


def _tree(plain: tuple[Any, ...]) -> Tree:
    if isinstance(plain[0], str):
        return Leaf(*plain)
    return Node(plain[0], plain[1], tuple(map(_tree, plain[2])))


@lru_cache(_SPECS_KEPT)
def parse_spec(text: str) -> Spec:
    """Read a spec from its text; the same text gives the same object."""
    axes, grids, maps, tree = ast.literal_eval(text)
    return Spec(axes, grids, tuple(Map(*m) for m in maps), _tree(tree))


def _over(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    first: int,
    shape: tuple[int, ...],
    device: torch.device,
) -> Tensor:
    strides = [1]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * size)
    return torch.empty(0, dtype=dtype, device=device).set_(storage, first, shape, tuple(reversed(strides)))


def aligned(size: int) -> int:
    """The next multiple of the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def fresh_memory(size: int) -> Bytes:
    """New aligned memory of ``size`` bytes."""
    block = np.empty(size + ALIGNMENT, np.uint8)
    skip = -block.ctypes.data % ALIGNMENT
    return block[skip : skip + size]


class Extents:
    """How much of everything there is in one batch, and where it lies: the numbers of a buffer.

    Args:
        spec: what is in the buffer.
        lengths: int64 [P, B]: of every axis and grid the cells of every sample.
        cells: their sums.

    Raises:
        ValueError: a partition has more cells than 32-bit indices reach.
    """

    def __init__(self, spec: Spec, lengths: NDArray[np.int64], cells: list[int]) -> None:
        structure.check_indices(max(cells, default=0))
        self.cells = cells
        self.batch_size = lengths.shape[1]
        self.peaks: list[int] = [max(sizes) for sizes in lengths.tolist()]
        self.rows = [map_rows(spec, m, lengths, cells) for m in spec.maps]
        self.offsets_stride = aligned(4 * (self.batch_size + 1)) // 4
        sizes = [lengths.nbytes, spec.partitions * self.offsets_stride * 4, *(4 * rows for rows in self.rows)]
        for layout in spec.layouts:
            sizes.append(layout.row_bytes * (cells[layout.part] if layout.part >= 0 else self.batch_size))
        self.starts: list[int] = []
        end = 8 * spec.count
        for size in sizes:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            self.starts.append(start)
            end = start + size
        self.nbytes = end

    def numbers(self) -> list[int]:
        """All of them in one list."""
        return [self.nbytes, self.batch_size, *self.cells, *self.peaks, *self.rows, *self.starts]

    @classmethod
    def read(cls, spec: Spec, buffer: Tensor) -> Extents:
        """The numbers at the head of a buffer in host memory."""
        numbers = buffer.numpy()[: 8 * spec.count].view(np.int64).tolist()
        self = cls.__new__(cls)
        self.nbytes, self.batch_size = numbers[:2]
        self.offsets_stride = aligned(4 * (self.batch_size + 1)) // 4
        first, second = 2 + spec.partitions, 2 + 2 * spec.partitions
        third = second + len(spec.maps)
        self.cells, self.peaks = numbers[2:first], numbers[first:second]
        self.rows, self.starts = numbers[second:third], numbers[third:]
        return self


def map_rows(spec: Spec, wanted: Map, lengths: NDArray[np.int64], cells: Sequence[int]) -> int:
    """Length of a map: one entry a cell, and for splits one more than there are rows."""
    if wanted.kept is None or wanted.kind != "splits":
        return cells[wanted.part]
    axes = spec.axes_of(wanted.part)
    kept = [axes[k] for k in wanted.kept]
    return (cells[kept[0]] if len(kept) == 1 else int(lengths[kept].prod(0).sum())) + 1


class Block:
    """A buffer with its spec and numbers, and the structure that its fields share.

    Args:
        spec: what is in the buffer.
        buffer: uint8 [nbytes], on any device.
        extents: the numbers.
        lengths: int64 [P, B] on the host, not in the buffer.
        kept: the fields that lie outside of it.

    Attributes:
        host: a buffer of host memory as an array, None for others. Fields lie in this, not in the storage of
            the buffer that is shown: pickling for another process moves that, and frees where it was.
    """

    def __init__(
        self,
        spec: Spec,
        buffer: Tensor,
        extents: Extents,
        lengths: NDArray[np.int64],
        kept: list[Any] | None = None,
    ) -> None:
        self.spec = spec
        self.host: Bytes | None = buffer.numpy() if buffer.device.type == "cpu" else None
        if self.host is not None and not buffer.is_shared():
            buffer = torch.from_numpy(self.host)
        self.buffer = buffer
        self.extents = extents
        self.lengths = lengths
        self.kept: list[Any] = [] if kept is None else kept
        self._grids: dict[int, Grid] = {}
        self._made: list[tuple[Any, Tensor, int]] = []

    @classmethod
    def read(cls, spec: Spec, buffer: Tensor, kept: list[Any]) -> Block:
        """The block in a buffer of host memory."""
        extents = Extents.read(spec, buffer)
        size = 8 * spec.partitions * extents.batch_size
        start = extents.starts[0]
        lengths = buffer.numpy()[start : start + size].view(np.int64).copy()
        lengths = lengths.reshape(spec.partitions, extents.batch_size)
        return cls(spec, buffer, extents, lengths, kept)

    def on(self, buffer: Tensor) -> Block:
        """The same over a copy of the buffer."""
        return Block(self.spec, buffer, self.extents, self.lengths, self.kept)

    def make(self, leaf: Leaf) -> Any:
        """The field that a leaf stands for."""
        if leaf.kind == "kept":
            return self.kept[leaf.slot]
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self._make(leaf)
        return self._make(leaf)

    def place(self, slot: int) -> tuple[Bytes, tuple[int, ...]]:
        """The bytes of a field in host memory, and its shape [rows, *static]."""
        layout, start, shape = self._lies(slot)
        memory: Bytes = self.host  # type: ignore[assignment]
        return memory[start : start + layout.row_bytes * shape[0]], shape

    def _lies(self, slot: int) -> tuple[Layout, int, tuple[int, ...]]:
        layout, extents = self.spec.layouts[slot], self.extents
        rows = extents.cells[layout.part] if layout.part >= 0 else extents.batch_size
        return layout, extents.starts[2 + len(self.spec.maps) + slot], (rows, *layout.static)

    def _make(self, leaf: Leaf) -> Any:
        layout, start, shape = self._lies(leaf.slot)
        end = start + layout.row_bytes * shape[0]
        if self.host is not None and layout.known is not None:
            flat = self.host[start:end].view(layout.known)
            values = torch.from_numpy(flat.reshape(shape) if layout.static else flat)
        else:
            values = self._tensor(layout.dtype, start, end, shape)
        field: Any = values
        if layout.part >= 0:
            grid = self._grids.get(layout.part) or self.grid(layout.part)
            field = PackedTensor(values, grid, leaf.order)
        self._made.append((field, values, values.data_ptr()))
        return field

    def _tensor(self, dtype: torch.dtype, start: int, end: int, shape: tuple[int, ...]) -> Tensor:
        """A contiguous tensor over bytes of the buffer, with a storage of its own that begins there."""
        if self.host is not None:
            storage = torch.from_numpy(self.host[start:end]).untyped_storage()
            return _over(storage, dtype, 0, shape, self.buffer.device)
        first = (int(self.buffer.storage_offset()) + start) // dtype.itemsize
        inside = _over(self.buffer.untyped_storage(), dtype, first, shape, self.buffer.device)
        if inside.device.type in _DLPACK:
            try:
                return from_dlpack(to_dlpack(inside))
            except (BufferError, RuntimeError):  # a type that the exchange lacks
                pass
        return inside

    def _indices(self, start: int, count: int) -> Tensor:
        """Integers of 32 bits in the buffer."""
        end = start + 4 * count
        if self.host is not None:
            return torch.from_numpy(self.host[start:end].view(np.int32))
        return self._tensor(torch.int32, start, end, (count,))

    def grid(self, part: int) -> Grid:
        """The grid of a partition; made once."""
        if part not in self._grids:
            self._make_grid(part)
        return self._grids[part]

    def _make_grid(self, part: int) -> None:
        count = len(self.spec.axes)
        if part < count:
            self._grids[part] = Grid((self._axis(part),))
            for k, ids in enumerate(self.spec.grids, count):
                if ids[0] == part:  # operators that make this product find it, whether it has a field or not
                    self.grid(k)
            return
        axes = [self.grid(k).axes[0] for k in self.spec.grids[part - count]]
        if part not in self._grids:  # its first axis brought it
            self._grids[part] = delivered_grid(axes, Partition(*self._partition(part), maps=self._maps(part)))

    def _axis(self, part: int) -> Axis:
        lengths, offsets, extent = self._partition(part)
        sizes = extent, structure.extent(self.extents.peaks[part])
        name = self.spec.axes[part]
        return Axis(lengths, offsets, name=name, maps=self._maps(part), sizes=sizes)

    def _partition(self, part: int) -> tuple[Tensor, Tensor, Tensor]:
        start = self.extents.starts[1] + 4 * part * self.extents.offsets_stride
        offsets = self._indices(start, self.extents.batch_size + 1)
        return torch.from_numpy(self.lengths[part]), offsets, structure.extent(self.extents.cells[part])

    def _maps(self, part: int) -> dict[str, Tensor]:
        starts, rows = self.extents.starts, self.extents.rows
        return {name: self._indices(starts[2 + k], rows[k]) for name, k in self.spec.maps_of[part]}

    @property
    def intact(self) -> bool:
        """Whether the buffer still says all about the fields that were made from it.

        It does not once a field's values were replaced, moved to other memory (as sending them to a process
        does) or need a gradient, or once its structure was marked or got more maps; writing into values is
        seen by the buffer, too.
        """
        for field, values, place in self._made:
            now = field.values if isinstance(field, PackedTensor) else field
            if now is not values or values.requires_grad or values.data_ptr() != place:
                return False
        return all(self._as_delivered(part, grid) for part, grid in self._grids.items())

    def _as_delivered(self, part: int, grid: Grid) -> bool:
        found = grid.part
        maps = len(self.spec.maps_of[part])
        products = sum(axes[0] == part for axes in self.spec.grids)
        same = len(found.maps) == maps and len(found.products) == products
        return same and not found.parts and found.dynamic is None

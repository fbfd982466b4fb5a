"""Collate: samples to a Batch.

The first sample's signature (containers, types and ranks of leaves) and the schema give a recipe, worked
out once and kept. By the recipe the samples are turned into columns, one list of B leaves a field:

    leaves -> arrays -> lengths, dtypes, static dims -> one buffer -> structure, maps, one copy each

The buffer's layout is known before it is taken, so that every sample is written once, into memory that may
be used again and again (``allocate``). A sample's ragged dims go to the front, as
:class:`~ops.PackedTensor` stores them. What comes out never shares memory with a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from math import prod
from operator import attrgetter, itemgetter
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info

from ops import PackedTensor

from . import maps as coordinate_maps
from .batch import Batch
from .block import Block, Extents, Leaf, Node, Spec, Tree, fresh_memory
from .columns import Column, arrays_of, text_of, unmark
from .errors import CollateError, locate
from .maps import Maps
from .mistakes import Mistakes
from .schema import (
    AxisKey,
    Changes,
    Field,
    Group,
    Recipe,
    Schema,
    axis_name,
    build,
    leaves,
    parse_schema,
    signature,
)

#: Gives memory for a batch: bytes wanted -> uint8 [>= bytes], contiguous, at a multiple of 64 bytes.
Allocate = Callable[[int], "NDArray[np.uint8] | Tensor"]

_KEPT = 256


class Collate:
    """Turns a list of samples into a :class:`Batch`; the ``collate_fn`` of a ``DataLoader``.

    What becomes of a leaf depends on its type and rank, and on what is declared for it; see
    :mod:`packload.schema`. It can be pickled, so that workers may be started by any method.

    Args:
        schema: patterns by path, for example ``{"tokens": "n", "pair": "n n _", "box": "4"}``. Axes that
            are declared with one name are one :class:`~ops.Axis`. Fields it does not name follow the
            default rule. ``""`` or None as pattern declares a number; the path of samples that are leaves
            themselves is ``""``.
        maps: which coordinate maps a batch brings, see :mod:`packload.maps`; None for those that the
            patterns imply, ``[]`` for none.
        drop: paths of fields that a batch does not have.
        rename: new names by path; a new name takes the place of the path's last part.
        cast: dtypes by path, e.g. ``{"image": torch.float16}``. Integers become narrower ones only if all
            values fit, and never stand for fractions.

    Raises:
        CollateError: a pattern or a map's name cannot be read.
    """

    def __init__(
        self,
        schema: Schema | None = None,
        maps: Iterable[str] | None = None,
        *,
        drop: Iterable[str] = (),
        rename: Mapping[str, str] | None = None,
        cast: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        if isinstance(drop, str) or isinstance(maps, str):
            raise CollateError("drop and maps are lists of names, not one string")
        if not (schema is None or isinstance(schema, Mapping)):
            raise CollateError(
                f"schema: {schema!r} is no mapping of fields' paths to patterns, e.g. {{'tokens': 'n'}}; "
                "where samples are bare leaves, without fields, the path is empty: {'': 'n _'}"
            )
        self.schema = dict(schema or {})
        self.maps = None if maps is None else tuple(maps)
        self.changes = Changes(frozenset(drop), dict(rename or {}), dict(cast or {}))
        self._patterns = parse_schema(schema)
        self._maps = Maps(self.maps)
        self._recipes: dict[Hashable, _Kind] = {}

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Collate samples.

        Args:
            samples: B samples of one structure.

        Returns:
            A Batch. If the samples are leaves themselves, the field alone: a PackedTensor, a tensor [B],
            or a list.

        Raises:
            CollateError: there are no samples; a sample lacks a field, or has one of another type, dtype
                or rank; a static dim or a shared axis disagrees. Sample, field and shapes are named.
        """
        return self.pack(samples).unwrap()

    def pack(self, samples: Sequence[Any], allocate: Allocate | None = None) -> Batch:
        """Collate samples into memory of the caller's.

        Args:
            samples: B samples of one structure.
            allocate: called once with the number of bytes. The batch keeps what it returns alive for
                as long as any tensor of it lives. By default fresh memory, in a DataLoader's worker process
                shared memory.

        Returns:
            A Batch; :meth:`Batch.unwrap` gives what :meth:`__call__` returns.

        Raises:
            CollateError: as :meth:`__call__`.
        """
        samples = samples if isinstance(samples, list) else list(samples)
        if not samples:
            raise CollateError("there are no samples to collate: their fields are unknown")
        kind = self._kind(samples)
        job = _Job(kind, samples)
        job.measure(kind.recipe, samples)
        return job.write(self._maps, allocate or _default_memory)

    def _kind(self, samples: list[Any]) -> _Kind:
        sign = signature(samples[0])
        kind = self._recipes.get(sign)
        if kind is None:
            if len(self._recipes) >= _KEPT:
                self._recipes.clear()
            try:
                kind = self._recipes[sign] = _Kind(build(sign, self._patterns, self.changes), self._maps)
            except CollateError as error:
                raise CollateError(f"{locate(samples, 0, '')}: {error}") from None
        return kind

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_recipes": {}}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.schema})"


_default = Collate()


def collate(samples: Sequence[Any]) -> Any:
    """Collate samples by the default rule and by marks: ``DataLoader(ds, collate_fn=packload.collate)``.

    See :class:`Collate`, which this is without a schema, for arguments, result and errors.
    """
    return _default(samples)


def _default_memory(size: int) -> NDArray[np.uint8] | Tensor:
    """Fresh memory; in a worker process memory that can be handed over as it is."""
    if get_worker_info() is None:
        return fresh_memory(size)
    storage = torch.UntypedStorage._new_shared(size)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


class _Kind:
    """What batches of one recipe have in common: axes, grids, and the specs seen so far.

    Attributes:
        axes: what identifies each axis, in the order in which fields bring them.
        grids: products of several axes, as indices into ``axes``: those of fields, then those asked for.
        parts: the partition of each ragged field, by path.
    """

    def __init__(self, recipe: Recipe, maps: Maps) -> None:
        self.recipe = recipe
        self.fields = list(leaves(recipe))
        self.axes: list[AxisKey] = list(dict.fromkeys(key for f in self.fields for key in f.axes))
        grids = [self._ids(f.axes) for f in self.fields] + [self._named(product) for product in maps.products]
        self.grids = list(dict.fromkeys(grid for grid in grids if len(grid) > 1))
        self.parts = {f.path: self._part(self._ids(f.axes)) for f in self.fields if f.axes}
        self.specs: dict[Hashable, Spec] = {}

    def _ids(self, keys: Sequence[AxisKey]) -> tuple[int, ...]:
        return tuple(map(self.axes.index, keys))

    def _named(self, product: tuple[str, ...]) -> tuple[int, ...]:
        for name in product:
            if name not in self.axes:
                known = [key for key in self.axes if isinstance(key, str)]
                raise CollateError(f"maps: {' '.join(product)!r} has no axis '{name}': declared are {known}")
        return self._ids(product)

    def _part(self, ids: tuple[int, ...]) -> int:
        return ids[0] if len(ids) == 1 else len(self.axes) + self.grids.index(ids)

    def spec(self, columns: Sequence[Any], large: tuple[int, ...], maps: Maps) -> Spec:
        """The spec of columns: their dtypes and static dims decide.

        Args:
            columns: a :class:`Column` for each field, None for text.
            large: partitions that bring maps only if these were asked for.
        """
        key = large, tuple([c and (c.dtype, c.static, c.loose) for c in columns])
        spec = self.specs.get(key)
        if spec is None:
            if len(self.specs) >= _KEPT:
                self.specs.clear()
            spec = self.specs[key] = self._make(columns, large, maps)
        return spec

    def _make(self, columns: Sequence[Any], large: tuple[int, ...], maps: Maps) -> Spec:
        found: list[Leaf] = []
        slots = {True: 0, False: 0}
        for field, column in zip(self.fields, columns):
            kept = column is None or column.loose
            found.append(self._leaf(field, column, kept, slots[kept]))
            slots[kept] += 1
        single = {self._ids(f.axes)[0] for f in self.fields if len(f.axes) == 1}
        wanted = maps.of(len(self.axes), self.grids, single)
        if maps.implied:
            wanted = tuple(m for m in wanted if m.part < len(self.axes) or m.part not in large)
        names = tuple(axis_name(key) for key in self.axes)
        return Spec(names, tuple(self.grids), wanted, self._tree(self.recipe, iter(found)))

    def _leaf(self, field: Field, column: Column | None, kept: bool, slot: int) -> Leaf:
        if kept or column is None:
            return Leaf("kept", slot)
        dtype = str(column.dtype).removeprefix("torch.")
        if not field.axes:
            return Leaf("dense", slot, dtype, column.static)
        return Leaf("packed", slot, dtype, column.static, column.pattern.order, self.parts[field.path])

    def _tree(self, recipe: Recipe, found: Iterator[Leaf]) -> Tree:
        if isinstance(recipe, Field):
            return next(found)
        kept = [(title, part) for title, part in zip(recipe.titles, recipe.parts) if part is not None]
        parts = tuple(self._tree(part, found) for _, part in kept)
        ordered = recipe.structure in ("tuple", "named tuple")
        return Node(ordered, tuple(title for title, _ in kept), parts)


class _Job:
    """One call: the columns of samples, and the memory they are written into."""

    def __init__(self, kind: _Kind, samples: list[Any]) -> None:
        self.kind = kind
        self.samples = samples
        self.mistakes = Mistakes(samples)
        self.axes: dict[AxisKey, tuple[list[int], Column]] = {}
        self.columns: list[Column | None] = []
        self.texts: list[list[Any] | None] = []

    def measure(self, recipe: Recipe, column: list[Any]) -> None:
        """Measure a column of B values, and all columns inside of it."""
        if isinstance(recipe, Field):
            self._field(recipe, column)
            return
        for part, values in zip(recipe.parts, self._split(recipe, column)):
            if part is not None:
                self.measure(part, values)

    def _split(self, group: Group, column: list[Any]) -> list[list[Any]]:
        """Turn a column of containers into a column for each part."""
        named = group.structure in ("mapping", "tuple")
        getters: Iterable[Callable[[Any], Any]] = map(itemgetter if named else attrgetter, group.names)
        if len(set(map(type, column))) > 1 or (named and set(map(len, column)) != {len(group.names)}):
            self.mistakes.check_containers(group, column)
        try:
            return [list(map(get, column)) for get in getters]
        except (KeyError, AttributeError):
            self.mistakes.check_containers(group, column)
            raise

    def _field(self, field: Field, values: list[Any]) -> None:
        if field.marked:
            values = unmark(field, values, self.mistakes)
        if field.pattern is None:
            self.texts.append(text_of(field, values, self.mistakes))
            self.columns.append(None)
            return
        column = Column(field, arrays_of(field, values, self.mistakes), self.mistakes)
        for key, lengths in zip(field.axes, column.lengths):
            known = self.axes.setdefault(key, (lengths, column))
            if known[0] != lengths:
                self._fail_axis(key, known[1], column)
        self.texts.append(None)
        self.columns.append(column)

    def _fail_axis(self, key: AxisKey, first: Column, other: Column) -> NoReturn:
        for column in (first, other):
            column.explain()
        sides = [(c.field, c.arrays, c.lengths[c.field.axes.index(key)]) for c in (first, other)]
        self.mistakes.fail_axis(key, sides[0], sides[1])

    def write(self, maps: Maps, allocate: Allocate) -> Batch:
        """Take memory, write, and return the Batch over it."""
        lengths, cells = self._lengths()
        first = len(self.axes)
        large = tuple([k for k, n in enumerate(cells[first:], first) if n > coordinate_maps.PAIR_CELLS])
        spec = self.kind.spec(self.columns, large, maps)
        try:
            extents = Extents(spec, lengths, cells)
        except ValueError as error:
            self._fail_size(cells.index(max(cells)), error)
        memory = allocate(extents.nbytes)
        if isinstance(memory, np.ndarray):
            memory = torch.from_numpy(memory)  # keeps the array itself; a slice of it would keep its base
        block = Block(spec, memory[: extents.nbytes], extents, lengths)
        _write_structure(block)
        written = [column for column in self.columns if column is not None and not column.loose]
        for slot, column in enumerate(written):
            column.write(*block.place(slot))
        return Batch.over(self._keep(block) if len(written) < len(self.columns) else block)

    def _fail_size(self, part: int, error: ValueError) -> NoReturn:
        """Say which field has too many cells."""
        path = next((p for p, k in self.kind.parts.items() if k == part), "")
        raise CollateError(f"field '{path}': {error}" if path else str(error)) from error

    def _lengths(self) -> tuple[NDArray[np.int64], list[int]]:
        """The cells of every sample in every partition, [P, B], and their sums."""
        sizes = [self.axes[key][0] for key in self.kind.axes]
        lengths = np.array(sizes, np.int64).reshape(len(sizes), len(self.samples))
        cells = list(map(sum, sizes))
        if not self.kind.grids:
            return lengths, cells
        products = [prod(lengths[axis] for axis in grid) for grid in self.kind.grids]
        return np.concatenate([lengths, products]), cells + [int(product.sum()) for product in products]

    def _keep(self, block: Block) -> Block:
        """Add what lies outside of the buffer: text, and fields on devices or with gradients."""
        loose = [column for column in self.columns if column is not None and column.loose]
        devices = {column.arrays[0].device for column in loose} - {torch.device("cpu")}
        if len(devices) > 1:
            raise CollateError(
                f"samples lie on several devices, {sorted(map(str, devices))}. Move them to one."
            )
        if devices:
            block = block.on(block.buffer.to(devices.pop()))
        for field, column, text in zip(self.kind.fields, self.columns, self.texts):
            if column is None:
                block.kept.append(text)
            elif column.loose:
                values = column.joined()
                if field.axes:
                    grid = block.grid(self.kind.parts[field.path])
                    block.kept.append(PackedTensor(values, grid, column.pattern.order))
                else:
                    block.kept.append(values)
        return block


def _write_structure(block: Block) -> None:
    """Numbers, lengths, offsets and maps, into the buffer."""
    spec, extents, lengths = block.spec, block.extents, block.lengths
    memory: NDArray[np.uint8] = block.host  # type: ignore[assignment]
    memory[: 8 * spec.count].view(np.int64)[:] = extents.numbers()
    start = extents.starts[0]
    memory[start : start + lengths.nbytes].view(np.int64)[:] = lengths.reshape(-1)
    start, stride = extents.starts[1], extents.offsets_stride
    offsets = memory[start : start + 4 * len(lengths) * stride].view(np.int32).reshape(len(lengths), stride)
    offsets[:, 0] = 0
    lengths.cumsum(1, np.int32, offsets[:, 1 : lengths.shape[1] + 1])
    for wanted, start, rows in zip(spec.maps, extents.starts[2:], extents.rows):
        axes = spec.axes_of(wanted.part)
        out = memory[start : start + 4 * rows].view(np.int32)
        starts = [offsets[k, : lengths.shape[1] + 1] for k in axes]
        coordinate_maps.write(wanted, out, [lengths[k] for k in axes], starts, lengths[wanted.part])

"""Collate: samples to a Batch.

The first sample's signature (containers, types and ranks of leaves) and the schema give a recipe, worked
out once and kept. By the recipe the samples are turned into columns, one list of B leaves a field, and
each column into a field:

    leaves -> arrays -> shapes: lengths of every ragged dim, agreement of all others -> one copy each

The copy is numpy's, or ``torch.cat`` for types that numpy lacks and for tensors that need a gradient. A
sample's ragged dims go to the front, as :class:`~ops.PackedTensor` stores them. What comes out never
shares memory with a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from math import prod
from operator import attrgetter, itemgetter
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ops import Axis, Grid, PackedTensor
from ops.pattern import Pattern, check_sample

from .batch import Batch
from .errors import CollateError, locate
from .schema import (
    AxisKey,
    Field,
    Group,
    Ragged,
    Recipe,
    Schema,
    axis_name,
    build,
    container,
    is_number,
    is_text,
    join,
    parse_schema,
    signature,
    suggest,
)

Array = NDArray[Any]
Shape = tuple[int, ...]
_PYTHON_DTYPES: dict[type, type[np.generic]] = {bool: np.bool_, int: np.int64, float: np.float32}
_RECIPES_KEPT = 256
_FEW_CHANNELS = 4


class Collate:
    """Turns a list of samples into a :class:`Batch`; the ``collate_fn`` of a ``DataLoader``.

    What becomes of a leaf depends on its type and rank, and on what is declared for it; see
    :mod:`packload.schema`. It can be pickled, so that workers may be started by any method.

    Args:
        schema: patterns by path, for example ``{"tokens": "n", "pair": "n n _", "box": "4"}``. Axes that
            are declared with one name are one :class:`~ops.Axis`. Fields it does not name follow the
            default rule. ``""`` or None declares a number.

    Raises:
        CollateError: a pattern cannot be read.
    """

    def __init__(self, schema: Schema | None = None) -> None:
        self.schema = dict(schema or {})
        self._patterns = parse_schema(schema)
        self._recipes: dict[Hashable, Recipe] = {}

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
        samples = samples if isinstance(samples, list) else list(samples)
        if not samples:
            raise CollateError("there are no samples to collate: their fields are unknown")
        return _Collation(samples).collect(self._recipe(samples), samples)

    def _recipe(self, samples: list[Any]) -> Recipe:
        sign = signature(samples[0])
        recipe = self._recipes.get(sign)
        if recipe is None:
            if len(self._recipes) >= _RECIPES_KEPT:
                self._recipes.clear()
            try:
                recipe = self._recipes[sign] = build(sign, self._patterns)
            except CollateError as error:
                raise CollateError(f"{locate(samples, 0, '')}: {error}") from None
        return recipe

    def __reduce__(self) -> tuple[type[Collate], tuple[dict[str, str | None]]]:
        return type(self), (self.schema,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.schema})"


_default = Collate()


def collate(samples: Sequence[Any]) -> Any:
    """Collate samples by the default rule and by marks: ``DataLoader(ds, collate_fn=packload.collate)``.

    See :class:`Collate`, which this is without a schema, for arguments, result and errors.
    """
    return _default(samples)


class _Collation:
    """One call: the samples, for errors, and the structure that their fields share."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples
        self.axes: dict[AxisKey, tuple[Axis, list[int], Field, list[Shape]]] = {}
        self.grids: dict[tuple[AxisKey, ...], Grid] = {}

    def collect(self, recipe: Recipe, column: list[Any]) -> Any:
        """The field, or Batch of fields, that a column of B values becomes."""
        if isinstance(recipe, Field):
            return self._field(recipe, column)
        columns = self._split(recipe, column)
        fields = [self.collect(child, values) for child, values in zip(recipe.parts, columns)]
        return Batch(dict(zip(recipe.names, fields)), recipe.structure in ("tuple", "named tuple"))

    def fail(self, index: int, path: str, text: str, cause: Exception | None = None) -> NoReturn:
        """Raise the error about one field of one sample."""
        raise CollateError(f"{locate(self.samples, index, path)}: {text}") from cause

    def _split(self, group: Group, column: list[Any]) -> list[list[Any]]:
        """Turn a column of containers into a column for each part."""
        named = group.structure in ("mapping", "tuple")
        getters: Iterable[Callable[[Any], Any]] = map(itemgetter if named else attrgetter, group.names)
        if len(set(map(type, column))) > 1 or (named and set(map(len, column)) != {len(group.names)}):
            self._check_containers(group, column)
        try:
            return [list(map(get, column)) for get in getters]
        except (KeyError, AttributeError):
            self._check_containers(group, column)
            raise

    def _check_containers(self, group: Group, column: list[Any]) -> None:
        for index, value in enumerate(column):
            structure, names = container(value) or (type(value).__name__, ())
            if structure != group.structure:
                self.fail(index, group.path, f"{structure} where sample 0 has a {group.structure}.")
            for name in (*group.names, *names):
                if name not in names or name not in group.names:
                    lacking = "is missing here" if name not in names else "is missing in sample 0"
                    self.fail(
                        index,
                        join(group.path, name),
                        f"{lacking}: the fields are {list(names)}, those of sample 0 {list(group.names)}. "
                        "Give every sample the same fields.",
                    )

    def _field(self, field: Field, column: list[Any]) -> Any:
        if field.marked:
            column = self._unmark(field, column)
        if field.pattern is None:
            return self._text(field, column)
        numbers = _plain_numbers(field, column)
        if numbers is not None:
            return numbers
        arrays = self._images(field, column) if field.kind == "image" else self._arrays(field, column)
        shapes = [array.shape for array in arrays]
        if len({array.dtype for array in arrays}) > 1:
            self._fail_dtype(field, arrays)
        self._check(field, field.pattern, shapes)
        if not field.axes:
            return self._stack(field, arrays)
        lengths = [[shape[d] for shape in shapes] for d in field.pattern.ragged]
        device = arrays[0].device if isinstance(arrays[0], Tensor) else None
        try:
            grid = self._grid(field, shapes, lengths, device)
            values = _pack(arrays, field.pattern, lengths)
        except CollateError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            self._fail_convert(field, arrays, error)
        return PackedTensor(values, grid, field.pattern.order)

    def _unmark(self, field: Field, column: list[Any]) -> list[Any]:
        for index, value in enumerate(column):
            if not isinstance(value, Ragged) or value.pattern != str(field.pattern):
                got = f"is marked '{value.pattern}'" if isinstance(value, Ragged) else "is not marked"
                self.fail(index, field.path, f"{got} where sample 0 is marked '{field.pattern}'.")
        return [value.value for value in column]

    def _text(self, field: Field, column: list[Any]) -> list[Any]:
        for index, value in enumerate(column):
            if not is_text(value) and not isinstance(value, list):
                self._fail_type(field, index, column)
        return list(column)

    def _images(self, field: Field, column: list[Any]) -> list[Array]:
        """Arrays [C, h, w] of PIL images, or [h, w] where that is declared."""
        arrays = []
        for index, image in enumerate(column):
            if not isinstance(image, Image.Image):
                self._fail_type(field, index, column)
            array = np.asarray(image)
            if array.ndim == 3:
                array = array.transpose(2, 0, 1)
            elif field.pattern is not None and field.pattern.rank == 3:
                array = array[None]
            arrays.append(array)
        return arrays

    def _arrays(self, field: Field, column: list[Any]) -> list[Tensor] | list[Array]:
        """The leaves as tensors, or all as arrays."""
        types = set(map(type, column))
        if any(all(issubclass(kind, base) for kind in types) for base in (Tensor, np.ndarray)):
            return column
        arrays = [self._array(field, index, column) for index in range(len(column))]
        empty = {i for i, v in enumerate(column) if isinstance(v, (list, tuple)) and not arrays[i].size}
        if len(empty) == len(column):
            self.fail(
                0,
                field.path,
                "an empty list, as in every sample of this batch, has no dtype. Give arrays or tensors, "
                "e.g. numpy.asarray(x, dtype=numpy.int64), wherever a list can be empty.",
            )
        tensor = next((value for value in column if isinstance(value, Tensor)), None)
        if tensor is None:
            dtype = next(array.dtype for i, array in enumerate(arrays) if i not in empty)
            return [array.astype(dtype) if i in empty else array for i, array in enumerate(arrays)]
        try:
            return [
                torch.empty(array.shape, dtype=tensor.dtype) if i in empty else _tensor(array)
                for i, array in enumerate(arrays)
            ]
        except (TypeError, ValueError) as error:
            self._fail_convert(field, arrays, error)

    def _array(self, field: Field, index: int, column: list[Any]) -> Any:
        value = column[index]
        if isinstance(value, (Tensor, np.ndarray)):
            return value
        if not isinstance(value, (list, tuple)) and not is_number(value):
            self._fail_type(field, index, column)
        try:
            array = np.array(value)
        except (TypeError, ValueError) as error:
            text = f"a list that is not one array: {error}. Make it rectangular."
            self.fail(index, field.path, text, error)
        if array.dtype.kind not in "biufc" or (array.dtype == np.uint64 and not isinstance(value, np.uint64)):
            self.fail(index, field.path, f"numbers that fit no dtype of torch, read as {array.dtype}.")
        if isinstance(value, np.generic):
            return array
        narrow = {"d": np.float32, "D": np.complex64}.get(array.dtype.char)
        return array if narrow is None else array.astype(narrow)

    def _check(self, field: Field, pattern: Pattern, shapes: list[Shape]) -> None:
        """Check ranks, static dims and repeated names; raise for the first sample that does not fit."""
        if set(map(len, shapes)) != {pattern.rank}:
            index = next(i for i, shape in enumerate(shapes) if len(shape) != pattern.rank)
            self._fail_rank(field, pattern, index, shapes)
        for d in pattern.static:
            sizes = {shape[d] for shape in shapes}
            if len(sizes) != 1 or pattern.tokens[d] not in (None, *sizes):
                self._fail_static(field, pattern, d, shapes)
        if len(set(pattern.names)) < len(pattern.names):
            for index, shape in enumerate(shapes):
                try:
                    check_sample(pattern, shape, locate(self.samples, index, field.path))
                except ValueError as error:
                    raise CollateError(str(error)) from error

    def _grid(
        self, field: Field, shapes: list[Shape], lengths: list[list[int]], device: torch.device | None
    ) -> Grid:
        """The grid of a field; fields over the same axes get the same one."""
        for key, sizes in zip(field.axes, lengths):
            known = self.axes.get(key)
            if known is None:
                self.axes[key] = (Axis(sizes, name=axis_name(key), device=device), sizes, field, shapes)
            elif known[1] != sizes:
                self._fail_axis(field, key, sizes, shapes)
        grid = self.grids.get(field.axes)
        if grid is None:
            grid = self.grids[field.axes] = Grid(tuple(self.axes[key][0] for key in field.axes))
        return grid

    def _stack(self, field: Field, arrays: list[Any]) -> Tensor:
        try:
            if isinstance(arrays[0], Tensor):
                return torch.stack(arrays).contiguous()
            out = np.empty((len(arrays), *arrays[0].shape), arrays[0].dtype)
            np.stack(arrays, out=out)
            return torch.from_numpy(out)
        except (TypeError, ValueError, RuntimeError) as error:
            self._fail_convert(field, arrays, error)

    def _fail_type(self, field: Field, index: int, column: list[Any]) -> NoReturn:
        kinds = [
            f"a leaf marked '{v.pattern}'" if isinstance(v, Ragged) else type(v).__name__
            for v in (column[index], column[0])
        ]
        what = {"data": "numbers", "image": "PIL images", "text": "text"}[field.kind]
        text = f"{kinds[0]} where sample 0 has {kinds[1]}. Give {what} in every sample."
        self.fail(index, field.path, text)

    def _fail_dtype(self, field: Field, arrays: list[Any]) -> NoReturn:
        index = next(i for i, array in enumerate(arrays) if array.dtype != arrays[0].dtype)
        got, first = (str(array.dtype).removeprefix("torch.") for array in (arrays[index], arrays[0]))
        self.fail(
            index,
            field.path,
            f"dtype {got} (shape {_shape(arrays[index])}) where sample 0 has {first} "
            f"(shape {_shape(arrays[0])}). Convert one to the other where the samples are made.",
        )

    def _fail_rank(self, field: Field, pattern: Pattern, index: int, shapes: list[Shape]) -> NoReturn:
        got = shapes[index]
        rule = "declared" if field.declared else "of sample 0's type and rank"
        self.fail(
            index,
            field.path,
            f"shape {tuple(got)} has {len(got)} dims, the pattern '{pattern}' {rule} has {pattern.rank} "
            f"(sample 0 has shape {tuple(shapes[0])}). Give every sample one rank, or declare the pattern.",
        )

    def _fail_static(self, field: Field, pattern: Pattern, d: int, shapes: list[Shape]) -> NoReturn:
        size = shapes[0][d] if pattern.tokens[d] is None else pattern.tokens[d]
        index = next(i for i, shape in enumerate(shapes) if shape[d] != size)
        if field.kind == "image":
            way = "Bring all images to one mode: image.convert('RGB')"
        else:
            schema = suggest(field.path, pattern, field.declared, shapes)
            way = f"Declare what fits, with a name for every dim that varies: packload.Collate({schema})"
        other = f", sample 0 has shape {tuple(shapes[0])}" if index else ""
        self.fail(
            index,
            field.path,
            f"shape {tuple(shapes[index])}{other}: dim {d} of the pattern '{pattern}' is static and must "
            f"be {size}. {way}.",
        )

    def _fail_axis(self, field: Field, key: AxisKey, sizes: list[int], shapes: list[Shape]) -> NoReturn:
        _, known, first, first_shapes = self.axes[key]
        index = next(i for i, (a, b) in enumerate(zip(known, sizes)) if a != b)
        self.fail(
            index,
            field.path,
            f"axis '{axis_name(key)}' has length {sizes[index]} (shape {tuple(shapes[index])}), but "
            f"field '{first.path}' gave it {known[index]} (shape {tuple(first_shapes[index])}). Make them "
            "agree, or declare two names.",
        )

    def _fail_convert(self, field: Field, arrays: list[Any], error: Exception) -> NoReturn:
        text = f"cannot pack {arrays[0].dtype} of shape {_shape(arrays[0])}: {error}"
        self.fail(0, field.path, text, error)


def _plain_numbers(field: Field, column: list[Any]) -> Tensor | None:
    """A tensor [B] of Python numbers of one type; None if the column is anything else."""
    dtype = _PYTHON_DTYPES.get(type(column[0]))
    if dtype is None or field.pattern is None or field.pattern.rank or len(set(map(type, column))) > 1:
        return None
    try:
        return torch.from_numpy(np.array(column, dtype))
    except OverflowError:
        return None


def _pack(arrays: list[Any], pattern: Pattern, lengths: list[list[int]]) -> Tensor:
    """Values [cells, *static] of samples that fit a pattern."""
    leading = pattern.ragged == (0,)
    if isinstance(arrays[0], Tensor):
        if leading:
            return torch.cat(arrays).contiguous()
        try:
            arrays = [tensor.numpy() for tensor in arrays]
        except (TypeError, RuntimeError):
            return _pack_tensors(arrays, pattern)
    cells = sum(map(prod, zip(*lengths)))
    values = np.empty((cells, *(arrays[0].shape[d] for d in pattern.static)), arrays[0].dtype)
    if leading:
        np.concatenate(arrays, out=values)
    else:
        _copy_blocks(values, arrays, pattern.ragged + pattern.static)
    return torch.from_numpy(values)


def _pack_tensors(tensors: list[Tensor], pattern: Pattern) -> Tensor:
    """As :func:`_pack`, in torch: for types that numpy lacks, other devices, and gradients."""
    static = [tensors[0].shape[d] for d in pattern.static]
    order = pattern.ragged + pattern.static
    cells = [prod(tensor.shape[d] for d in pattern.ragged) for tensor in tensors]
    return torch.cat([t.permute(order).reshape(n, *static) for t, n in zip(tensors, cells)]).contiguous()


def _copy_blocks(values: Array, arrays: list[Array], order: Shape) -> None:
    """Copy each array, its dims in ``order``, into its rows of ``values``."""
    begin = 0
    static = values.ndim - 1
    for array in arrays:
        block = array.transpose(order)
        end = begin + prod(block.shape[: block.ndim - static])
        target = values[begin:end].reshape(block.shape)
        if static == 1 and block.shape[-1] <= _FEW_CHANNELS and not block.flags.c_contiguous:
            for channel in range(block.shape[-1]):
                target[..., channel] = block[..., channel]
        else:
            target[...] = block
        begin = end


def _tensor(array: Any) -> Tensor:
    return array if isinstance(array, Tensor) else torch.from_numpy(array.copy())


def _shape(array: Any) -> Shape:
    return tuple(array.shape)

"""Columns: one field of all samples, measured before memory is taken and written once after.

A column's leaves become arrays or tensors of one dtype. Its lengths, dtype and static dims are worked out
from them without looking at more than is needed: whatever does not fit is noticed when it is written, by
numpy or torch, and explained by :class:`~packload.mistakes.Mistakes`.
"""

from __future__ import annotations

from math import prod
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ops.pattern import Pattern

from .block import NUMPY_DTYPES, Bytes
from .mistakes import Mistakes, Shape
from .schema import Field, Ragged, is_number, is_text

Array = NDArray[Any]
_PYTHON_DTYPES: dict[type, type[np.generic]] = {bool: np.bool_, int: np.int64, float: np.float32}
_TORCH_DTYPES = {dtype: kind for kind, dtype in NUMPY_DTYPES.items()}
#: numpy dtypes that stand for the bytes of types which numpy lacks, by size.
_BYTES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_FEW_CHANNELS = 4
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
_NEEDS_GRADIENT = attrgetter("requires_grad")
_ARRAYS, _TENSORS = {np.ndarray}, {Tensor}


class Column:
    """A field of all samples, ready to be written.

    Attributes:
        field: the recipe.
        arrays: one array or tensor a sample.
        lengths: of each ragged dim the length in every sample.
        dtype: what it is written as.
        static: the static dims.
        loose: it cannot lie in host memory: samples on a device, or with gradients.
    """

    def __init__(self, field: Field, arrays: Any, mistakes: Mistakes) -> None:
        self.field = field
        self.arrays = arrays
        self.loose = False
        self._mistakes = mistakes
        self.pattern: Pattern = field.pattern  # type: ignore[assignment]
        self.leading = self.pattern.ragged == (0,)
        try:
            self.lengths = self._measure()
            first = arrays[0]
            self.static: Shape = tuple(first.shape[d] for d in self.pattern.static)
            tensors = isinstance(first, Tensor)
            source = first.dtype if tensors else _TORCH_DTYPES[first.dtype]
            self.dtype: torch.dtype = source if field.cast is None else field.cast
        except KeyError:
            mistakes.check_arrays(field, arrays)
            native = arrays[0].dtype.newbyteorder("=")
            way = (
                f" in this byte order; convert it: array.astype('{native}')"
                if native in _TORCH_DTYPES
                else ""
            )
            mistakes.fail_convert(field, arrays, TypeError(f"PyTorch has no dtype for it{way}"))
        except (TypeError, IndexError):
            mistakes.check_arrays(field, arrays)
            raise
        self.tensors = tensors
        if tensors:
            self.loose = not first.is_cpu or any(map(_NEEDS_GRADIENT, arrays))
        if field.cast is not None:
            self._check_cast(source, field.cast)

    def _measure(self) -> list[list[int]]:
        arrays = self.arrays
        tokens, shape = self.pattern.tokens, arrays[0].shape
        fits = len(shape) == len(tokens)
        for d in self.pattern.static if fits else ():
            fits = fits and tokens[d] in (None, shape[d])
        if self.leading and fits:
            lengths = self._rows()
            if 0 not in lengths:  # torch.cat takes an empty tensor of one dim for one of any shape
                return [lengths]
        if not fits or self.pattern.ragged:
            self._mistakes.check_arrays(self.field, self.arrays)
        return [[array.shape[d] for array in arrays] for d in self.pattern.ragged]

    def _rows(self) -> list[int]:
        """Lengths along dim 0, right if all other dims are those of sample 0."""
        if not isinstance(self.arrays[0], Tensor) or not (width := prod(self.arrays[0].shape[1:])):
            return list(map(len, self.arrays))
        counts = list(map(Tensor.numel, self.arrays))  # four times as fast as asking for shapes
        return counts if width == 1 else [count // width for count in counts]

    def _check_cast(self, source: torch.dtype, cast: torch.dtype) -> None:
        """A cast keeps what a value says, but for the precision of floating-point numbers."""
        self._mistakes.check_arrays(self.field, self.arrays)
        if source == cast or (_rank(source) != 1 and _rank(source) <= _rank(cast)):
            return
        what = f"cannot be cast from {source} to {cast}"
        if _rank(source) > _rank(cast):
            lost = ("", "which number it is", "its fractions", "its imaginary part")[_rank(source)]
            text = f"{what}: that would lose {lost}. Convert it in the dataset."
            self._mistakes.fail(0, self.field.path, text)
        bounds, most = torch.finfo(cast) if _rank(cast) > 1 else torch.iinfo(cast), torch.iinfo(source)
        if bounds.min <= most.min and most.max <= bounds.max:
            return
        for index, array in enumerate(self.arrays):
            low, high = _bounds(array)
            if low < bounds.min or high > bounds.max:
                text = f"{what}: values from {low} to {high} do not fit. Cast to a wider type."
                self._mistakes.fail(index, self.field.path, text)

    def explain(self, error: Exception | None = None) -> None:
        """Raise what is wrong with this column, if anything is."""
        self._mistakes.check_arrays(self.field, self.arrays)
        if error is not None:
            self._mistakes.fail_convert(self.field, self.arrays, error)

    def write(self, memory: Bytes, shape: Shape) -> None:
        """Write all samples into ``memory``, the bytes of values [rows, *static] of :attr:`dtype`."""
        try:
            if self.tensors and self.leading and self.field.cast is None:
                self._cat(_as_tensor(memory, self.dtype, shape))
            elif not self.tensors and self.dtype not in NUMPY_DTYPES:
                self.arrays = [torch.from_numpy(np.array(array)) for array in self.arrays]
                _as_tensor(memory, self.dtype, shape).copy_(self._joined())
            elif self.tensors and not self._as_numpy():
                _as_tensor(memory, self.dtype, shape).copy_(self._joined())
            else:
                self._write_arrays(memory.view(_dtype_of(self.dtype)).reshape(shape))
        except (TypeError, ValueError, RuntimeError) as error:
            self.explain(error)

    def _write_arrays(self, out: Array) -> None:
        casting: Any = "no" if self.field.cast is None else "unsafe"
        if isinstance(self.arrays, np.ndarray):
            out[...] = self.arrays
        elif not self.pattern.ragged:
            np.stack(self.arrays, out=out, casting=casting)
        elif self.leading:
            np.concatenate(self.arrays, out=out, casting=casting)
        else:
            self._copy_blocks(out)

    def _cat(self, target: Tensor) -> None:
        if len({tensor.dtype for tensor in self.arrays}) > 1:
            raise TypeError("several dtypes")
        torch.cat(self.arrays, out=target)

    def _as_numpy(self) -> bool:
        """Turn tensors into arrays, or their bytes where numpy lacks the type; False if that cannot be."""
        kind = self.arrays[0].dtype
        same = len({tensor.dtype for tensor in self.arrays}) == 1
        if not same:
            raise TypeError("several dtypes")
        if kind in NUMPY_DTYPES and self.dtype in NUMPY_DTYPES:
            try:
                self.arrays = [tensor.numpy() for tensor in self.arrays]
            except (TypeError, RuntimeError):  # conjugated, sparse
                return False
            return True
        if self.field.cast is not None or kind.itemsize not in _BYTES:
            return False
        raw = getattr(torch, np.dtype(_BYTES[kind.itemsize]).name)
        self.arrays = [tensor.view(raw).numpy() for tensor in self.arrays]
        return True

    def _joined(self) -> Tensor:
        """Values [rows, *static] by torch: for types that numpy lacks, other devices, and gradients."""
        if not self.pattern.ragged:
            return torch.stack(list(self.arrays))
        order = self.pattern.ragged + self.pattern.static
        cells = [prod(sizes) for sizes in zip(*self.lengths)]
        rows = [t.permute(order).reshape(n, *self.static) for t, n in zip(self.arrays, cells)]
        return torch.cat(rows).contiguous()

    def joined(self) -> Tensor:
        """Values [rows, *static] in memory of their own, where the samples live."""
        try:
            if len({tensor.dtype for tensor in self.arrays}) > 1:
                raise TypeError("several dtypes")
            joined = self._joined()
            return joined if self.field.cast is None else joined.to(self.field.cast)
        except (TypeError, ValueError, RuntimeError) as error:
            self.explain(error)
            raise

    def _copy_blocks(self, values: Array) -> None:
        """Copy each array, its ragged dims first, into its rows of ``values``."""
        if len({array.dtype for array in self.arrays}) > 1:
            raise TypeError("several dtypes")
        order = self.pattern.ragged + self.pattern.static
        begin, static = 0, values.ndim - 1
        for array in self.arrays:
            block = array.transpose(order)
            end = begin + prod(block.shape[: block.ndim - static])
            rows = values[begin:end].reshape(block.shape)
            if static == 1 and block.shape[-1] <= _FEW_CHANNELS and not block.flags.c_contiguous:
                for channel in range(block.shape[-1]):
                    rows[..., channel] = block[..., channel]
            else:
                np.copyto(rows, block, casting="unsafe")
            begin = end


def _bounds(array: Any) -> tuple[int, int]:
    """The smallest and the largest of an array's integers; 0 where there are none."""
    if 0 in array.shape:
        return 0, 0
    if isinstance(array, Tensor) and array.dtype in _UNSIGNED:
        array = array.cpu().numpy()
    return int(array.min()), int(array.max())


def _rank(dtype: torch.dtype) -> int:
    """Booleans, integers, floating-point numbers, complex numbers."""
    return 0 if dtype == torch.bool else 3 if dtype.is_complex else 2 if dtype.is_floating_point else 1


def _dtype_of(dtype: torch.dtype) -> Any:
    """The numpy dtype, or integers of its size."""
    return NUMPY_DTYPES.get(dtype) or _BYTES[dtype.itemsize]


def _as_tensor(memory: Bytes, dtype: torch.dtype, shape: Shape) -> Tensor:
    return torch.from_numpy(memory).view(dtype).view(shape)


# ------------------------------------------------------------------ leaves


def arrays_of(field: Field, column: list[Any], mistakes: Mistakes) -> Any:
    """The leaves of a column as tensors, or all as arrays."""
    if field.kind == "image":
        return _images(field, column, mistakes)
    dtype = _PYTHON_DTYPES.get(type(column[0]))
    if dtype is not None and len(set(map(type, column))) == 1 and field.pattern and not field.pattern.rank:
        try:
            return np.array(column, dtype)
        except OverflowError:
            pass
    return _arrays(field, column, mistakes)


def unmark(field: Field, column: list[Any], mistakes: Mistakes) -> list[Any]:
    """The leaves that marks wrap."""
    for index, value in enumerate(column):
        if not isinstance(value, Ragged) or value.pattern != str(field.pattern):
            got = f"is marked '{value.pattern}'" if isinstance(value, Ragged) else "is not marked"
            mistakes.fail(index, field.path, f"{got} where sample 0 is marked '{field.pattern}'.")
    return [value.value for value in column]


def text_of(field: Field, column: list[Any], mistakes: Mistakes) -> list[Any]:
    """Leaves that are kept as they are."""
    for index, value in enumerate(column):
        if not is_text(value) and not isinstance(value, list):
            mistakes.fail_type(field, index, column)
    return list(column)


def _images(field: Field, column: list[Any], mistakes: Mistakes) -> list[Array]:
    """Arrays [C, h, w] of PIL images, or [h, w] where that is declared."""
    arrays = []
    for index, image in enumerate(column):
        if not isinstance(image, Image.Image):
            mistakes.fail_type(field, index, column)
        array = np.asarray(image)
        if array.ndim == 3:
            array = array.transpose(2, 0, 1)
        elif field.pattern is not None and field.pattern.rank == 3:
            array = array[None]
        arrays.append(array)
    return arrays


def _arrays(field: Field, column: list[Any], mistakes: Mistakes) -> list[Any]:
    types = set(map(type, column))
    if types == _ARRAYS or types == _TENSORS:
        return column
    for index, value in enumerate(column):
        if isinstance(value, np.ma.MaskedArray):
            text = "a masked array, whose mask would be lost. Give its mask as a field of its own."
            mistakes.fail(index, field.path, text)
    if any(all(issubclass(kind, base) for kind in types) for base in (Tensor, np.ndarray)):
        return column
    arrays = [_array(field, index, column, mistakes) for index in range(len(column))]
    empty = {i for i, v in enumerate(column) if isinstance(v, (list, tuple)) and not arrays[i].size}
    if len(empty) == len(column):
        mistakes.fail(
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
        mistakes.fail_convert(field, arrays, error)


def _array(field: Field, index: int, column: list[Any], mistakes: Mistakes) -> Any:
    value = column[index]
    if isinstance(value, (Tensor, np.ndarray)):
        return value
    if not isinstance(value, (list, tuple)) and not is_number(value):
        mistakes.fail_type(field, index, column)
    try:
        array = np.array(value)
    except (TypeError, ValueError) as error:
        text = f"a list that is not one array: {error}. Make it rectangular."
        mistakes.fail(index, field.path, text, error)
    if array.dtype.kind not in "biufc" or (array.dtype == np.uint64 and not isinstance(value, np.uint64)):
        mistakes.fail(index, field.path, f"numbers that fit no dtype of torch, read as {array.dtype}.")
    if isinstance(value, np.generic):
        return array
    narrow = {"d": np.float32, "D": np.complex64}.get(array.dtype.char)
    return array if narrow is None else array.astype(narrow)


def _tensor(array: Any) -> Tensor:
    return array if isinstance(array, Tensor) else torch.from_numpy(array.copy())

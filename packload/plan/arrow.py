"""Lengths of list columns in Arrow memory: differences of offsets, nothing is decoded or copied.

Tables of ``pyarrow`` and data sets of Hugging Face ``datasets`` are known by their modules, which whoever
holds such an object has imported; neither is needed otherwise.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import ExifTags, Image

from ops.pattern import Pattern
from packload.errors import CollateError
from packload.plan.leaves import Leaf, Reading, reading

_ROWS = 10_000
_FEW = 20
"""A view of fewer than one in so many rows is read row by row, not by all rows that are stored."""
_TURNED = (5, 6, 7, 8)
"""EXIF orientations that exchange height and width."""


def arrow_lengths(
    dataset: Any, wanted: Sequence[str] | None, patterns: Mapping[str, Pattern]
) -> list[np.ndarray] | None:
    """Lengths of a table's list columns, [N] or [N, k] for each that is wanted; None if it is no table.

    A Hugging Face data set whose samples a transform makes on the fly is no table in this sense: its
    columns need not be what a sample holds.

    Raises:
        CollateError: a column is not there, has null entries, or does not fit its pattern.
    """
    pyarrow, datasets = sys.modules.get("pyarrow"), sys.modules.get("datasets")
    if pyarrow is not None and isinstance(dataset, pyarrow.Table):
        return _checked(*_tables_lengths([dataset], wanted, patterns))
    if datasets is not None and isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom":
        return _hugging_face(dataset, wanted, patterns)
    return None


def _hugging_face(
    dataset: Any, wanted: Sequence[str] | None, patterns: Mapping[str, Pattern]
) -> list[np.ndarray]:
    """Lengths of the columns that samples have, in the order of the view."""
    roots = _roots(wanted)
    names = [n for n in dataset.format["columns"] or dataset.column_names if roots is None or n in roots]
    indices = getattr(dataset, "_indices", None)
    if indices is None or len(dataset) * _FEW < dataset.data.num_rows:
        tables = dataset.select_columns(names).with_format("arrow").iter(batch_size=_ROWS)
        return _checked(*_tables_lengths(tables, wanted, patterns))
    stored, read = _tables_lengths([dataset.data.table.select(names)], wanted, patterns)
    return _checked(stored[indices.column(0).to_numpy()], read)


def _tables_lengths(
    tables: Iterable[Any], wanted: Sequence[str] | None, patterns: Mapping[str, Pattern]
) -> tuple[np.ndarray, Reading | None]:
    """Lengths [N, k] of tables that follow one another, -1 where an entry is null; and what was read."""
    read: Reading | None = None
    parts: list[np.ndarray] = []
    start = 0
    for table in tables:
        read = read or reading(_signature(table.schema, _roots(wanted)), wanted, patterns)
        for batch in table.to_batches():
            parts.append(_batch_lengths(batch, read, start))
            start += batch.num_rows
    return np.concatenate(parts) if parts else np.empty((0, 1), np.int64), read


def _checked(rows: np.ndarray, read: Reading | None) -> list[np.ndarray]:
    null = (rows < 0).any(1)
    if null.any():
        raise CollateError(
            f"sample {int(null.argmax())}: its entry is null and has no length, as in {int(null.sum())} of "
            f"{len(rows)} samples. Store an empty list, or filter such samples out."
        )
    return [rows[:, 0]] if read is None else read.split(rows)


def _roots(wanted: Sequence[str] | None) -> set[str] | None:
    return None if wanted is None else {path.partition(".")[0] for path in wanted}


def _signature(fields: Any, only: set[str] | None = None) -> Hashable:
    """The signature of samples of a struct of these fields; what cannot vary counts as text."""
    chosen = [field for field in fields if only is None or field.name in only]
    return "mapping", tuple(field.name for field in chosen), tuple(_type_signature(f.type) for f in chosen)


def _type_signature(kind: Any) -> Hashable:
    types = sys.modules["pyarrow"].types
    kind = getattr(kind, "storage_type", kind)
    rank = 0
    while _is_list(kind):
        rank, kind = rank + 1, kind.value_type
    if types.is_struct(kind) and not rank:
        return ("image", 3) if _is_image(kind) else _signature(kind)
    numbers = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    numbers = numbers or (rank > 0 and types.is_null(kind))  # lists that are all empty
    return ("data", rank) if numbers else ("text", 0)


def _is_list(kind: Any) -> bool:
    types = sys.modules["pyarrow"].types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _is_image(kind: Any) -> bool:
    """Whether a struct is how ``datasets`` stores an encoded image."""
    return {field.name for field in kind} == {"bytes", "path"}


def _batch_lengths(batch: Any, read: Reading, start: int) -> np.ndarray:
    """Lengths [rows, k] of a record batch that begins at sample ``start``."""
    rows = np.full((batch.num_rows, len(read.names)), -1, np.int64)
    null = np.zeros(batch.num_rows, bool)
    for leaf in read.leaves:
        array = _column(batch, leaf, null)
        is_image = sys.modules["pyarrow"].types.is_struct(array.type)
        dims = (_image_dims if is_image else _dims)(array, leaf, start)
        for column, dim in zip(leaf.columns, leaf.pattern.ragged):
            sizes = dims[dim]
            wrong = (rows[:, column] >= 0) & (rows[:, column] != sizes) & ~null
            if wrong.any():
                i = int(wrong.argmax())
                raise CollateError(
                    f"sample {start + i}, field '{leaf.path}': axis '{read.names[column]}' has the length "
                    f"{sizes[i]}, which is {rows[i, column]} elsewhere. Declare two names."
                )
            rows[:, column] = sizes
    rows[null] = -1
    return rows


def _column(batch: Any, leaf: Leaf, null: np.ndarray) -> Any:
    """A leaf's column; ``null`` is set for samples that have none."""
    array = batch
    for _, name in leaf.steps:
        array = array.column(name) if array is batch else array.field(name)
        if array.null_count:
            null |= array.is_null().to_numpy(zero_copy_only=False)
    return getattr(array, "storage", array)


def _dims(array: Any, leaf: Leaf, start: int) -> list[np.ndarray]:
    """The sizes of every dim of a column of nested lists, an array [N] each; 0 for null."""
    dims: list[np.ndarray] = []
    count = np.ones(len(array), np.int64)
    for depth in range(leaf.pattern.rank):
        if depth and array.null_count:
            row = int(array.is_null().to_numpy(zero_copy_only=False).argmax())
            index = start + int(np.searchsorted(np.cumsum(count), row, side="right"))
            raise CollateError(f"sample {index}, field '{leaf.path}': a null inside. Store an empty list.")
        inner = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        sizes = _one_size(inner, count, leaf, start, depth)
        dims.append(sizes)
        count = count * sizes
        array = array.flatten()
    return dims


def _one_size(inner: np.ndarray, count: np.ndarray, leaf: Leaf, start: int, depth: int) -> np.ndarray:
    """The one size that a sample's lists of a depth have: [N] of inner lengths, ``count`` a sample."""
    sizes = np.zeros(len(count), np.int64)
    some = np.flatnonzero(count)
    if len(some):
        begins = np.cumsum(count)[some] - count[some]
        least, most = np.minimum.reduceat(inner, begins), np.maximum.reduceat(inner, begins)
        if (least != most).any():
            i = int((least != most).argmax())
            raise CollateError(
                f"sample {start + some[i]}, field '{leaf.path}': lists of {least[i]} and of {most[i]} "
                f"entries side by side at depth {depth}. Make it rectangular."
            )
        sizes[some] = most
    return sizes


def _image_dims(array: Any, leaf: Leaf, start: int) -> list[np.ndarray]:
    """Channels, heights and widths of encoded images, from their headers."""
    sizes = np.empty((3, len(array)), np.int64)
    for index, entry in enumerate(array):
        stored = entry.as_py()
        try:
            sizes[:, index] = 0 if stored is None else _image_size(stored)
        except (OSError, ValueError, TypeError) as error:
            raise CollateError(f"sample {start + index}, field '{leaf.path}': {error}") from error
    return list(sizes)[-leaf.pattern.rank :]


def _image_size(stored: Mapping[str, Any]) -> tuple[int, int, int]:
    source = stored["path"] if stored["bytes"] is None else io.BytesIO(stored["bytes"])
    with Image.open(source) as image:
        turned = image.getexif().get(ExifTags.Base.Orientation) in _TURNED
        height, width = (image.width, image.height) if turned else (image.height, image.width)
        return len(image.getbands()), height, width

"""Which dims of which leaves give a data set's lengths, and how to read them off a sample.

The words are those of :mod:`packload.schema`: a leaf has a path and a pattern, and axes that are declared
with one name are one axis, whose length is read once and must agree wherever it returns.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from ops.pattern import Pattern, check_sample
from packload.errors import CollateError
from packload.schema import AxisKey, Field, Group, Ragged, Recipe, Structure, axis_name, build, leaves, part

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Leaf:
    """One leaf to look at.

    Attributes:
        path: the way to it, joined by dots.
        steps: the same way as (kind of container, name), from the sample inwards.
        pattern: the shape of a sample's leaf.
        columns: for each ragged dim, in order, the column of lengths that it gives.
    """

    path: str
    steps: tuple[tuple[Structure, Any], ...]
    pattern: Pattern
    columns: tuple[int, ...]


@dataclass(frozen=True)
class Reading:
    """The leaves to look at, and the names of the columns that they give."""

    leaves: tuple[Leaf, ...]
    names: tuple[str, ...]

    def row(self, sample: Any, where: str) -> list[int]:
        """The lengths of one sample, one entry a column.

        Args:
            where: what to call the sample in an error, e.g. ``"sample 3"``.

        Raises:
            CollateError: a leaf is missing or does not fit its pattern; an axis has two lengths.
        """
        row = [-1] * len(self.names)
        for leaf in self.leaves:
            shape = _shape(_reach(sample, leaf, where), leaf, where)
            for column, dim in zip(leaf.columns, leaf.pattern.ragged):
                if row[column] < 0:
                    row[column] = shape[dim]
                elif row[column] != shape[dim]:
                    raise CollateError(
                        f"{where}, field '{leaf.path}': shape {shape} gives axis '{self.names[column]}' the "
                        f"length {shape[dim]}, which is {row[column]} elsewhere. Declare two names."
                    )
        return row

    def split(self, rows: np.ndarray) -> list[np.ndarray]:
        """The columns of rows [N, k] that belong to each leaf: [N], or [N, j] for j axes of a leaf."""
        parts = [rows[:, list(dict.fromkeys(leaf.columns))] for leaf in self.leaves]
        return [part[:, 0] if part.shape[1] == 1 else part for part in parts]

    def contents(self, sample: Any, where: str) -> Iterator[bytes]:
        """What tells the leaves of one sample from those of another, for a digest.

        Raises:
            CollateError: a leaf is missing.
        """
        for leaf in self.leaves:
            value = _reach(sample, leaf, where)
            if isinstance(value, torch.Tensor):
                value = value.detach().cpu()
            if isinstance(value, Image.Image):
                value = (value.mode, value.size)
            yield repr(shape_of(value)).encode()
            yield repr(value).encode() if isinstance(value, (list, tuple)) else np.asarray(value).tobytes()


def reading(sign: Hashable, wanted: Sequence[str] | None, patterns: Mapping[str, Pattern]) -> Reading:
    """What to read of samples with a signature (see :func:`packload.schema.signature`).

    Args:
        wanted: paths of leaves; None for the one leaf that varies.
        patterns: the schema.

    Raises:
        CollateError: a path is no leaf or has no ragged dim; or none is given and it is not plain which.
    """
    recipe = build(sign, patterns)
    ragged = {leaf.path: leaf for leaf in leaves(recipe) if leaf.axes}
    chosen = _choose(recipe, ragged, wanted)
    columns: dict[AxisKey, int] = {}
    found = []
    for leaf in chosen:
        assert leaf.pattern is not None
        places = tuple(columns.setdefault(key, len(columns)) for key in leaf.axes)
        found.append(Leaf(leaf.path, _steps(recipe, leaf), leaf.pattern, places))
    return Reading(tuple(found), tuple(map(axis_name, columns)))


def _choose(recipe: Recipe, ragged: Mapping[str, Field], wanted: Sequence[str] | None) -> list[Field]:
    if wanted is not None:
        everything = [leaf.path for leaf in leaves(recipe)]
        for path in wanted:
            if path not in ragged:
                why = "has no dim that varies" if path in everything else "is not a field of the samples"
                raise CollateError(
                    f"lengths of field '{path}': it {why}; those that vary are {list(ragged)}. "
                    "Name one of them, or declare the pattern: schema={'path': 'n _'}."
                )
        return [ragged[path] for path in wanted]
    if len({frozenset(leaf.axes) for leaf in ragged.values()}) == 1:
        return [next(iter(ragged.values()))]
    if not ragged:
        raise CollateError(
            "the samples have no field with a dim that varies: their lengths are unknown. Declare one, e.g. "
            "packload.lengths(dataset, schema={'tokens': 'n'}), or give the data set a method lengths(field)."
        )
    raise CollateError(
        f"which lengths? These fields vary on their own: {list(ragged)}. Name one, "
        f"packload.lengths(dataset, field={next(iter(ragged))!r}), or several in a list for one column each."
    )


def _steps(recipe: Recipe, leaf: Field) -> tuple[tuple[Structure, Any], ...]:
    """The containers on the way from the sample to a leaf."""
    steps: list[tuple[Structure, Any]] = []
    while isinstance(recipe, Group):
        for name, child in zip(recipe.names, recipe.parts):
            if child is leaf or (isinstance(child, Group) and leaf in list(leaves(child))):
                steps.append((recipe.structure, name))
                recipe = child
                break
    return tuple(steps)


def _reach(sample: Any, leaf: Leaf, where: str) -> Any:
    value = sample
    try:
        for structure, name in leaf.steps:
            value = part(value, structure, name)
    except (KeyError, AttributeError, IndexError, TypeError):
        raise CollateError(f"{where}: has no field '{leaf.path}', as sample 0 does.") from None
    return value.value if isinstance(value, Ragged) else value


def _shape(value: Any, leaf: Leaf, where: str) -> Shape:
    shape = shape_of(value)
    pattern = leaf.pattern
    if shape is None:
        raise CollateError(f"{where}, field '{leaf.path}': {type(value).__name__} has no shape.")
    if isinstance(value, Image.Image) and pattern.rank == 2 and shape[0] == 1:
        shape = shape[1:]  # one channel, declared as "h w"
    if isinstance(value, list) and shape[-1] == 0:
        shape += (0,) * (pattern.rank - len(shape))  # what an empty list would hold is empty too
    if len(shape) != pattern.rank or len(set(pattern.names)) < len(pattern.names):
        try:
            check_sample(pattern, shape, f"{where}, field '{leaf.path}'")
        except ValueError as error:
            raise CollateError(str(error)) from None
    return shape


def shape_of(value: Any) -> Shape | None:
    """The shape of a tensor or array, of nested lists by their first entries, [C, h, w] of an image.

    Nothing is converted, and an image that was opened but not read is not decoded. None if there is none.
    """
    if isinstance(value, (list, tuple)):
        sizes: list[int] = []
        while isinstance(value, (list, tuple)):
            sizes.append(len(value))
            value = value[0] if value else None
        return tuple(sizes)
    if isinstance(value, Image.Image):
        return len(value.getbands()), value.height, value.width
    shape = getattr(value, "shape", None)
    return None if shape is None else tuple(int(size) for size in shape)


def as_lengths(rows: Any, where: str) -> np.ndarray:
    """Lengths as int64 [N], or [N, k] for k columns; one column alone is [N].

    Raises:
        ValueError: they are not whole numbers, have another rank, or one is negative.
    """
    array = np.asarray(rows)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.size == 0 and array.ndim == 1:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise ValueError(
            f"{where}: lengths are {array.dtype} of shape {array.shape}; give integers of shape [N], or "
            "[N, k] for samples of k sizes."
        )
    if array.size and array.min() < 0:
        index = int(np.argwhere(array < 0)[0][0])
        raise ValueError(f"{where}: sample {index} has the length {array[index]}, which is negative.")
    return np.ascontiguousarray(array, dtype=np.int64)

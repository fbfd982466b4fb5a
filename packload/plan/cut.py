"""A data set that serves pieces of samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ops.pattern import Pattern

from ..errors import CollateError
from ..schema import Ragged, Schema, parse_schema
from .units import Item, Piece


class CutDataset(Dataset[Any]):
    """Serves samples of a data set, whole or cut to a :class:`Piece`.

    What of a sample is cut follows from the schema: every dim of a field that has the axis's name. A pair
    field ``"n n _"`` is cut in both.

    Args:
        dataset: any map-style data set.
        schema: the patterns of fields by path, as for :class:`packload.Collate`; fields without the axis, and
            those that the schema does not name, are left as they are. The path of a sample that is one leaf
            is ``""``.
        axis: the name of the axis that samples are cut along.
    """

    def __init__(self, dataset: Any, schema: Schema, axis: str = "n") -> None:
        self.dataset = dataset
        patterns = parse_schema(schema)
        self._patterns = {path: p for path, p in patterns.items() if axis in p.names}
        self._axis = axis
        if not self._patterns:
            raise ValueError(
                f"no field has the axis {axis!r} in the schema {dict(schema)}: nothing would be cut. Name "
                f"the fields that have it, e.g. {{'tokens': {axis!r}}}."
            )

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, item: Item) -> Any:
        """A sample, or a piece of one.

        Raises:
            CollateError: a field is missing, cannot be cut, or ends before the piece does.
        """
        if not isinstance(item, Piece):
            return self.dataset[item]
        return self._cut(self.dataset[item.index], item)

    def __getitems__(self, items: list[Item]) -> list[Any]:
        """The samples and pieces of a batch; whole batches are asked of a data set that can be."""
        fetch = getattr(self.dataset, "__getitems__", None)
        if fetch is None:
            return [self[item] for item in items]
        samples = fetch([item.index if isinstance(item, Piece) else item for item in items])
        return [self._cut(s, i) if isinstance(i, Piece) else s for s, i in zip(samples, items)]

    def _cut(self, sample: Any, piece: Piece) -> Any:
        for path, pattern in self._patterns.items():
            try:
                sample = _edit(sample, path.split(".") if path else [], pattern, self._axis, piece)
            except (LookupError, AttributeError, TypeError, ValueError) as error:
                raise CollateError(
                    f"sample {piece.index}, field '{path}', cut to {piece}: {error}"
                ) from error
        return sample


def _edit(value: Any, path: list[str], pattern: Pattern, axis: str, piece: Piece) -> Any:
    """A copy of a container in which the leaf at a path is cut."""
    if not path:
        return _slice(value, pattern, axis, piece)
    name, rest = path[0], path[1:]
    if isinstance(value, Mapping):
        key = name if name in value else next((k for k in value if str(k) == name), name)
        return {**value, key: _edit(value[key], rest, pattern, axis, piece)}
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        at = int(name)
        return (*value[:at], _edit(value[at], rest, pattern, axis, piece), *value[at + 1 :])
    part = _edit(getattr(value, name), rest, pattern, axis, piece)
    if isinstance(value, tuple):
        return value._replace(**{name: part})  # type: ignore[attr-defined]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{name: part})
    raise TypeError(f"{type(value).__name__} is no container that can be copied with another part")


def _slice(leaf: Any, pattern: Pattern, axis: str, piece: Piece) -> Any:
    """A leaf, cut in every dim that has the axis's name."""
    if isinstance(leaf, Ragged):
        return Ragged(_slice(leaf.value, pattern, axis, piece), leaf.pattern)
    array = leaf if isinstance(leaf, (torch.Tensor, np.ndarray)) else np.asarray(leaf)
    if array.ndim != pattern.rank:
        raise ValueError(f"it has the shape {list(array.shape)}, which '{pattern}' does not fit")
    for d, token in enumerate(pattern.tokens):
        if token == axis and array.shape[d] < piece.stop:
            raise ValueError(
                f"it has {array.shape[d]} positions; the length that the plan was made from is larger"
            )
    where = tuple(slice(piece.start, piece.stop) if t == axis else slice(None) for t in pattern.tokens)
    cut = array[where]
    return cut.tolist() if isinstance(leaf, list) else cut

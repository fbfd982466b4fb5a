"""Which columns of an index to plan by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.pattern import Pattern

from ..schema import Schema, parse_schema
from .kinds import ARRAY, IMAGE, kind
from .read import ShardDataset

Array = NDArray[Any]
Charge = tuple[Any, Any]
"""Lengths and their cost, as batch samplers take them."""


def choose_lengths(dataset: ShardDataset, schema: Schema | None, lengths: Any, cost: Any) -> Charge:
    """Lengths of all samples, and what they are charged.

    Args:
        dataset: the shards.
        schema: patterns by path.
        lengths: a column, several, a mapping of these, an array; None for those of the one ragged field.
        cost: as given; None for the cells: n, h * w, n * m.

    Returns:
        lengths, [N], [N, D] or by name, and the cost.

    Raises:
        KeyError: there is no such column.
        ValueError: it is not clear which are meant, or an array has another number of samples.
    """
    if lengths is None:
        names, default = _find(dataset, schema)
        values = _read(dataset, names)
        return values, default if cost is None else cost
    values = _read(dataset, lengths)
    for part in values.values() if isinstance(values, Mapping) else [values]:
        if len(part) != len(dataset):
            raise ValueError(f"lengths of {len(part)} samples were given, and the shards have {len(dataset)}")
    if cost is None and not isinstance(values, Mapping) and values.ndim == 2:
        cost = "area" if values.shape[1] == 2 else None
    return values, cost


def _read(dataset: ShardDataset, lengths: Any) -> Any:
    if isinstance(lengths, str):
        return dataset.lengths(lengths)
    if isinstance(lengths, Mapping):
        return {name: _read(dataset, part) for name, part in lengths.items()}
    if isinstance(lengths, Sequence) and lengths and all(isinstance(name, str) for name in lengths):
        return np.stack([dataset.lengths(name) for name in lengths], axis=1)
    return np.asarray(lengths)


def _find(dataset: ShardDataset, schema: Schema | None) -> tuple[str | tuple[str, ...], str]:
    """The columns of the one ragged field, and its cost."""
    patterns: dict[str, Pattern | None] = {**parse_schema(schema)}
    for field in dataset.fields or dict.fromkeys(f for index in dataset.indexes for f in index.fields):
        patterns.setdefault(field, None)
    found: dict[tuple[str, ...], str] = {}
    lost = []
    for path, pattern in patterns.items():
        columns = _columns_of(path, pattern, dataset.columns)
        if columns:
            found[columns] = _cost_of(columns, pattern)
        elif pattern is not None and pattern.ragged:
            lost.append(path)
    if len(found) == 1 and not lost:
        ((columns, cost),) = found.items()
        return (columns if len(columns) > 1 else columns[0]), cost
    if lost:
        why = f"the index has no lengths of {lost}"
    elif found:
        why = f"several fields are ragged: {[list(columns) for columns in found]}"
    else:
        why = "no ragged field has lengths in the index"
    sizes = dict.fromkeys(f"{field}.bytes" for index in dataset.indexes for field in index.fields)
    raise ValueError(
        f"which lengths to plan by is not clear: {why}. Say it, lengths=... with one or more of "
        f"{[*dataset.columns, *sizes]}; or index the shards with lengths of your own: packload index "
        "--measure."
    )


def _columns_of(path: str, pattern: Pattern | None, columns: Sequence[str]) -> tuple[str, ...]:
    """The columns that hold the ragged sizes of a field; none if the index has not got them."""
    end = kind(path)
    if end in IMAGE and (pattern is None or pattern.ragged):
        names: tuple[str, ...] = (f"{path}.h", f"{path}.w")
    elif end in ARRAY:
        rank = sum(f"{path}.{d}" in columns for d in range(8))
        ragged = pattern.ragged if pattern is not None else {1: (0,), 2: (0,), 3: (1, 2)}.get(rank, ())
        words = pattern.names if pattern is not None else tuple(map(str, ragged))
        once = {word: d for word, d in reversed(list(zip(words, ragged)))}
        names = tuple(f"{path}.{d}" for d in sorted(once.values()))
    elif pattern is not None and pattern.ragged:
        names = next(((name,) for name in (path, f"{path}.length") if name in columns), ())
    else:
        return ()
    return names if all(name in columns for name in names) else ()


def _cost_of(columns: tuple[str, ...], pattern: Pattern | None) -> str:
    if len(columns) == 2:
        return "area"
    names = () if pattern is None else pattern.names
    return "pair_cells" if len(names) == 2 and len(set(names)) == 1 else "tokens"

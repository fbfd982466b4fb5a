"""Lengths by name: a CSV or NumPy file, or a data set that a module holds."""

from __future__ import annotations

import csv
import gzip
import importlib
import inspect
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from packload.errors import CollateError
from packload.plan.leaves import as_lengths
from packload.plan.lengths import lengths

_ENCODING = "utf-8-sig"
"""UTF-8, of whose mark in front of a file's first row nothing is kept."""


class SourceError(ValueError):
    """Lengths cannot be read from what was named; the message says what to name instead."""


def read_lengths(source: str | Path, columns: Sequence[str] = ()) -> tuple[np.ndarray, tuple[str, ...]]:
    """Read lengths from a file or a data set.

    Args:
        source: a ``.csv``, ``.tsv`` (either also ``.gz``) or ``.npy`` file, or ``module:attribute``: a data
            set, or what returns one when called without arguments.
        columns: the columns of a file, by their header, or by position (from 0) where there is none; or the
            fields of a data set. By default the one that holds whole numbers, or the one that varies.

    Returns:
        int64 [N] or [N, k], as :func:`packload.lengths` has it, and the names of the columns.

    Raises:
        SourceError: there is no such file, data set or column, or it is not plain which column is meant.
    """
    path = Path(source)
    kind = [suffix.lower() for suffix in path.suffixes if suffix.lower() != ".gz"][-1:]
    if path.exists() or kind in ([".csv"], [".tsv"], [".npy"]):
        if not path.is_file():
            raise SourceError(f"{source}: there is no such file.")
        if kind == [".npy"]:
            return _from_array(path, columns)
        return _from_table(path, columns, "\t" if kind == [".tsv"] else ",")
    return _from_module(str(source), columns)


def _from_table(path: Path, columns: Sequence[str], delimiter: str) -> tuple[np.ndarray, tuple[str, ...]]:
    opened: Any = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        with opened(path, "rt", newline="", encoding=_ENCODING) as file:
            lines = csv.reader(file, delimiter=delimiter)
            rows = filter(None, lines)
            first, above = next(rows, []), lines.line_num
            second = next(rows, [])
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise SourceError(f"{path}: cannot be read as a table of text: {error}") from error
    headed = _is_header(path, first)
    names = [cell.strip() for cell in first] if headed else [str(i) for i in range(len(first))]
    if not names or (headed and not second):
        raise SourceError(f"{path}: the table has no rows.")
    whole = [name for name, cell in zip(names, second if headed else first) if _is_whole(cell)]
    chosen = _choose(path, columns, names, whole)
    try:
        table = np.loadtxt(
            path,
            dtype=np.int64,
            delimiter=delimiter,
            skiprows=above if headed else 0,
            usecols=[names.index(name) for name in chosen],
            quotechar='"',
            comments=None,
            encoding=_ENCODING,
            ndmin=2,
        )
        return as_lengths(table, str(path)), chosen
    except (OSError, EOFError, zlib.error) as error:
        raise SourceError(f"{path}: cannot be read to its end: {error}") from error
    except ValueError as error:
        raise SourceError(f"{path}: columns {list(chosen)} must hold whole numbers: {error}") from error


def _is_header(path: Path, first: list[str]) -> bool:
    """Whether a table's first row names its columns: no cell of it is a whole number, else all are."""
    whole = [_is_whole(cell) for cell in first]
    if any(whole) and not all(whole):
        raise SourceError(
            f"{path}: the first row, {first}, has numbers and other text, so that it may name the columns or "
            "be the first sample. Put a row of names above it that are no numbers."
        )
    return not any(whole)


def _is_whole(cell: str) -> bool:
    return cell.strip().lstrip("+-").isdigit()


def _choose(path: Path, columns: Sequence[str], names: list[str], whole: list[str]) -> tuple[str, ...]:
    missing = [name for name in columns if name not in names]
    if missing:
        raise SourceError(f"{path} has no column {missing[0]!r}; it has {names}.")
    if columns:
        return tuple(columns)
    if len(whole) != 1:
        found = "no column of whole numbers" if not whole else f"the columns of whole numbers {whole}"
        raise SourceError(
            f"{path} has {found} (of {names}): choose with --column NAME, or several for samples of several "
            "sizes: --column height --column width."
        )
    return (whole[0],)


def _from_array(path: Path, columns: Sequence[str]) -> tuple[np.ndarray, tuple[str, ...]]:
    try:
        array = as_lengths(np.load(path, allow_pickle=False), str(path))
    except (OSError, ValueError, EOFError) as error:
        raise SourceError(f"{path}: {error}") from error
    if array.ndim == 1:
        array = array[:, None]
    names = [str(i) for i in range(array.shape[1])]
    chosen = _choose(path, columns, names, names)
    return as_lengths(array[:, [names.index(name) for name in chosen]], str(path)), chosen


def _from_module(source: str, columns: Sequence[str]) -> tuple[np.ndarray, tuple[str, ...]]:
    module, colon, attribute = source.partition(":")
    if not colon or not attribute or not module or module.startswith("."):
        raise SourceError(
            f"{source!r} is neither a file nor module:attribute. Give a .csv or .npy file of lengths, or "
            "where a data set is found, e.g. mypackage.data:train."
        )
    try:
        found: Any = importlib.import_module(module)
        for name in attribute.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise SourceError(f"{source}: {error}") from error
    dataset = found if hasattr(found, "__getitem__") and not isinstance(found, type) else _made(found, source)
    try:
        if not columns:
            return as_lengths(lengths(dataset), source), ("length",)
        parts = lengths(dataset, list(columns))
    except (CollateError, ValueError, TypeError) as error:
        raise SourceError(f"{source}: {error}") from error
    return as_lengths(np.column_stack(list(parts.values())), source), tuple(columns)


def _made(found: Any, source: str) -> Any:
    """What a function or a class without arguments makes; its own errors are left as they are."""
    if not callable(found):
        raise SourceError(
            f"{source} is a {type(found).__name__}: neither a data set nor a function that makes one."
        )
    needed = _needed(found)
    if needed:
        raise SourceError(
            f"{source} needs {needed}: name a function without arguments that returns the data set."
        )
    return found()


def _needed(function: Any) -> list[str]:
    """The arguments that a call must give."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # built in, so it does not say
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]

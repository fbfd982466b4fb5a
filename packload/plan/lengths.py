"""The lengths of a data set's samples, which every plan is made from.

They are looked for where they cost least:

1. the data set's own ``lengths``: an array, a mapping from field to array, or a method ``lengths(field)``
   (a shard index has one);
2. Arrow memory: the offsets of list columns, the headers of encoded images;
3. a view of such a data set (``Subset``, ``ConcatDataset``), or tensors of one shape (``TensorDataset``);
4. one pass over the samples, kept on disk.

A pass that took a second or more is kept, in ``$PACKLOAD_CACHE/lengths`` (by default
``~/.cache/packload/lengths``, or below ``$XDG_CACHE_HOME``), under a digest of: the data set's class and
length, what was read, and the data set's own ``fingerprint`` or else the contents of some of its samples.
Data that change elsewhere are not noticed; ``cache=False`` reads them again.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from ops.pattern import Pattern
from packload.plan.arrow import arrow_lengths
from packload.plan.leaves import Reading, as_lengths, reading
from packload.schema import Schema, parse_schema, signature

Lengths = NDArray[np.int64]

_CHUNK = 256
_PROBES = 16
_WORTH_KEEPING = 1.0
"""Seconds that a pass must have taken to be kept on disk."""


@overload
def lengths(
    dataset: Any,
    field: str | None = None,
    *,
    schema: Schema | None = None,
    workers: int = 0,
    progress: bool = True,
    cache: bool | str | os.PathLike[str] = True,
) -> Lengths: ...


@overload
def lengths(
    dataset: Any,
    field: Sequence[str],
    *,
    schema: Schema | None = None,
    workers: int = 0,
    progress: bool = True,
    cache: bool | str | os.PathLike[str] = True,
) -> dict[str, Lengths]: ...


def lengths(
    dataset: Any,
    field: str | Sequence[str] | None = None,
    *,
    schema: Schema | None = None,
    workers: int = 0,
    progress: bool = True,
    cache: bool | str | os.PathLike[str] = True,
) -> Lengths | dict[str, Lengths]:
    """The lengths of all samples of a data set, read as cheaply as it allows (see the module).

    Args:
        dataset: anything with a length whose samples ``packload.collate`` takes: a PyTorch data set, a
            list, a ``pyarrow.Table``, a Hugging Face data set, a shard index.
        field: the path of the leaf whose lengths are wanted (``"tokens"``, ``"meta.mask"``, ``"0"``), or
            several in a list. By default the one that varies.
        schema: patterns by path, as for :class:`~packload.Collate`; without one a list of numbers is
            ``"n"``, a matrix ``"n _"``, an image ``"_ h w"``.
        workers: processes that share a pass over the samples.
        progress: whether a pass shows a bar on the error stream.
        cache: whether a long pass is kept on disk; or the folder to keep it in.

    Returns:
        int64 [N] where one dim varies: ``"n"``, ``"n _"``, ``"n n _"``. Otherwise [N, k], a column for
        every axis in the order of the pattern: height and width of ``"_ h w"``, n and m of ``"n m"``. For a
        list of fields a dict of these, by field. These are the lengths that samplers and costs take.

    Raises:
        CollateError: there is no such field, it does not vary, several do and none was chosen, or a sample
            does not fit, also where fields share an axis. The sample and the field are named.
        TypeError: the data set is a stream.
        ValueError: the data set's own lengths are not whole numbers, or not one for every sample.
    """
    stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__")
    if stream and not hasattr(dataset, "lengths"):
        raise TypeError(
            f"{type(dataset).__name__} is a stream or no data set: it has no length to plan with. "
            "Give one with __len__ and __getitem__, or with a method lengths(field)."
        )
    wanted = [field] if isinstance(field, str) else None if field is None else list(field)
    patterns = parse_schema(schema)
    found = _cheap(dataset, wanted, patterns)
    if found is None:
        found = _pass(dataset, wanted, patterns, workers, progress, cache)
    found = [as_lengths(part, type(dataset).__name__) for part in found]
    return found[0] if wanted is None or isinstance(field, str) else dict(zip(wanted, found))


def _cheap(
    dataset: Any, wanted: list[str] | None, patterns: Mapping[str, Pattern]
) -> list[np.ndarray] | None:
    """Lengths of each wanted field that need no pass over samples; None if there is no such way."""
    own = getattr(dataset, "lengths", None)
    if own is not None:
        return _own(dataset, own, wanted)
    if type(dataset) is Subset:
        inner = _cheap(dataset.dataset, wanted, patterns)
        return inner and [part[np.asarray(dataset.indices, dtype=np.int64)] for part in inner]
    if type(dataset) is ConcatDataset:
        parts = [_cheap(part, wanted, patterns) for part in dataset.datasets]
        known = [part for part in parts if part is not None]
        return [np.concatenate(one) for one in zip(*known)] if len(known) == len(parts) else None
    if type(dataset) is TensorDataset and len(dataset):
        read = reading(signature(dataset[0]), wanted, patterns)
        return read.split(np.tile(np.array(read.row(dataset[0], "sample 0")), (len(dataset), 1)))
    return arrow_lengths(dataset, wanted, patterns)


def _own(dataset: Any, own: Any, wanted: list[str] | None) -> list[np.ndarray]:
    """The lengths that a data set has itself, checked."""
    name = f"{type(dataset).__name__}.lengths"
    found = [_own_field(own, name, path) for path in (wanted or (None,))]
    for part in found:
        if hasattr(dataset, "__len__") and len(part) != len(dataset):
            raise ValueError(
                f"{name} has {len(part)} entries, the data set {len(dataset)} samples. Give one for every "
                "sample, in their order, or call what is no list of lengths by another name."
            )
    return found


def _own_field(own: Any, name: str, path: str | None) -> np.ndarray:
    if callable(own):
        own = own(path) if path is not None and _takes_a_field(own) else own()
    if isinstance(own, Mapping):
        if path is None and len(own) == 1:
            path = next(iter(own))
        if path not in own:
            raise ValueError(f"{name} has no lengths of field {path!r}; name one of {list(own)}.")
        own = own[path]
    return as_lengths(own, name)


def _takes_a_field(method: Any) -> bool:
    try:
        return bool(inspect.signature(method).parameters)
    except ValueError:  # built in, so it does not say
        return True


class _Measured(Dataset[np.ndarray]):
    """A data set whose item for a range of indices is their lengths [len(range), k]."""

    def __init__(self, dataset: Any, read: Reading) -> None:
        self.dataset, self.read = dataset, read

    def __getitem__(self, chunk: range) -> np.ndarray:
        rows = [self.read.row(self.dataset[i], f"sample {i}") for i in chunk]
        return np.array(rows, np.int64).reshape(len(chunk), len(self.read.names))


def _pass(
    dataset: Any,
    wanted: list[str] | None,
    patterns: Mapping[str, Pattern],
    workers: int,
    progress: bool,
    cache: bool | str | os.PathLike[str],
) -> list[np.ndarray]:
    """Lengths of each wanted field from the samples themselves, or from an earlier pass over them."""
    if not len(dataset):
        return [np.empty(0, np.int64) for _ in (wanted or (None,))]
    read = reading(signature(dataset[0]), wanted, patterns)
    path = None if cache is False else _place(dataset, read, cache)
    known = None if path is None else _load(path, (len(dataset), len(read.names)))
    if known is not None:
        return read.split(known)
    began = time.monotonic()
    rows = np.concatenate(list(_chunks(_Measured(dataset, read), len(dataset), workers, progress)))
    if path is not None and time.monotonic() - began >= _WORTH_KEEPING:
        _save(path, rows)
    return read.split(rows)


def _chunks(measured: _Measured, count: int, workers: int, progress: bool) -> Iterator[np.ndarray]:
    ranges = [range(i, min(i + _CHUNK, count)) for i in range(0, count, _CHUNK)]
    loader = DataLoader(
        measured,
        batch_size=None,
        sampler=ranges,
        num_workers=workers,
        collate_fn=_same,
        generator=torch.Generator(),  # the pass leaves the caller's random state alone
    )
    bar = Progress(
        TextColumn("reading lengths"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not progress,
    )
    with bar:
        task = bar.add_task("", total=count)
        for rows in loader:
            bar.advance(task, len(rows))
            yield rows


def _same(rows: Any) -> Any:
    return rows


def _place(dataset: Any, read: Reading, cache: bool | str | os.PathLike[str]) -> Path:
    """The file that a pass over this data set is kept in."""
    digest = hashlib.blake2b(digest_size=16)
    kind = type(dataset)
    for text in (kind.__module__, kind.__qualname__, str(len(dataset)), repr(read)):
        digest.update(text.encode() + b"\0")
    own = getattr(dataset, "fingerprint", None) or getattr(dataset, "_fingerprint", None)
    if isinstance(own, (str, bytes)):
        digest.update(own if isinstance(own, bytes) else own.encode())
    else:
        for index in np.unique(np.linspace(0, len(dataset) - 1, _PROBES).astype(np.int64)).tolist():
            for content in read.contents(dataset[index], f"sample {index}"):
                digest.update(content)
    folder = cache_folder() / "lengths" if isinstance(cache, bool) else Path(cache)
    return folder / f"{digest.hexdigest()}.npy"


def cache_folder() -> Path:
    """Where packload keeps what it can work out again: ``$PACKLOAD_CACHE``, or the user's cache folder."""
    chosen = os.environ.get("PACKLOAD_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "packload"


def _load(path: Path, shape: tuple[int, int]) -> np.ndarray | None:
    """Lengths kept before; None if there are none, or the file is not what was written."""
    try:
        rows = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return rows if rows.shape == shape and rows.dtype == np.int64 else None


def _save(path: Path, rows: np.ndarray) -> None:
    """Write a file that is either whole or not there; a folder that cannot be written is a warning."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
            try:
                np.save(file, rows)
                file.close()
                os.replace(file.name, path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        warnings.warn(f"lengths could not be kept in {path.parent}: {error}", stacklevel=2)

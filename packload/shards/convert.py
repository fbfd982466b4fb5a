"""Files, lines and archives to shards: what stands behind ``packload shard``.

The samples of a source are listed first, with their sizes, and dealt to shards in order. Each shard is then
written on its own, by any process: a run that was stopped goes on with the shards that are missing.

=====================  ===============================================================================
source                 samples
=====================  ===============================================================================
a folder               files with one key (see :mod:`packload.shards.kinds`) are one, in order of names
a ``.jsonl`` file      every line is one, in the field ``json``
``.tar`` archives      theirs, divided anew
=====================  ===============================================================================
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import numpy as np

from .errors import ShardError
from .index import ShardIndex, build_index
from .jobs import Progress, run_jobs
from .kinds import split_name
from .safety import DEFAULT, Safety
from .store import Store, expand
from .tar import END, room
from .write import PATTERN, OneShard, parse_size, read_whole, remove_parts

Part = tuple[str, str, int, int]
"""A field, and the file, first byte and number of bytes that it is read from."""

_MOST_FIELDS = 64
_LABEL_BYTES = 20


@dataclass(frozen=True)
class Listed:
    """A sample of a source: its key, the files its fields are in, and its class if it has one."""

    key: str
    parts: tuple[Part, ...]
    label: int | None = None

    def tar_bytes(self) -> int:
        """At most so many bytes in an archive."""
        label = 0 if self.label is None else room(f"{self.key}.cls", _LABEL_BYTES)
        return label + sum(room(f"{self.key}.{field}", size) for field, _, _, size in self.parts)


@dataclass
class Listing:
    """The samples of a source, and what of it is in none: reason -> number of files."""

    samples: list[Listed]
    skipped: dict[str, int] = field(default_factory=dict)


def list_source(
    source: str | os.PathLike[str], *, classes: bool = False, safety: Safety = DEFAULT
) -> Listing:
    """List the samples of a folder, a ``.jsonl`` file, or archives.

    Args:
        source: see the module.
        classes: give each sample of a folder the field ``cls``: the number of its first folder among their
            sorted names.
        safety: what is allowed in archives.

    Raises:
        FileNotFoundError: it is not there.
        ShardError: there is no sample in it, or it is nothing of these.
    """
    name = os.fspath(source)
    if os.path.isdir(name):
        listing = _list_folder(Path(name), classes)
    elif name.endswith(".jsonl"):
        listing = Listing(list(_list_lines(name)))
    elif name.endswith(".tar"):
        listing = Listing(_list_archives(expand(name, safety), safety))
    elif os.path.exists(name):
        raise ShardError(f"{name!r} is not a folder, a .jsonl file or .tar archives.")
    else:
        raise FileNotFoundError(f"{name!r} is not there")
    if not listing.samples:
        raise ShardError(f"{name!r} has no samples (passed over: {listing.skipped}).")
    return listing


def _list_folder(folder: Path, classes: bool) -> Listing:
    skipped: dict[str, int] = {}
    found: list[tuple[str, str, str, int]] = []
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for file in files:
            path = os.path.join(here, file)
            parts = split_name(os.path.relpath(path, folder).replace(os.sep, "/"))
            if file.startswith(".") or parts is None:
                reason = "hidden" if file.startswith(".") else "no ending"
                skipped[reason] = skipped.get(reason, 0) + 1
            else:
                found.append((*parts, path, os.path.getsize(path)))
    found.sort()
    fields = {member for _, member, _, _ in found}
    if len(fields) > _MOST_FIELDS:
        raise ShardError(
            f"{str(folder)!r} has {len(fields)} different endings, {sorted(fields)[:4]} among them: what "
            "follows the first dot of a file's name is its field. Rename files that have dots in their key."
        )
    samples = [
        Listed(key, tuple((member, path, 0, size) for _, member, path, size in group))
        for key, group in groupby(found, lambda entry: entry[0])
    ]
    return Listing(_label(samples) if classes else samples, skipped)


def _label(samples: list[Listed]) -> list[Listed]:
    for sample in samples:
        if "/" not in sample.key:
            raise ShardError(f"{sample.key!r} lies in no folder that could be its class.")
        if any(part[0] == "cls" for part in sample.parts):
            raise ShardError(f"{sample.key!r} has a field 'cls' already.")
    names = sorted({sample.key.partition("/")[0] for sample in samples})
    numbers = {name: number for number, name in enumerate(names)}
    return [Listed(s.key, s.parts, numbers[s.key.partition("/")[0]]) for s in samples]


def _list_lines(name: str) -> Iterator[Listed]:
    at = 0
    with open(name, "rb") as file:
        for number, line in enumerate(file):
            size = len(line.rstrip(b"\r\n"))
            if line.strip():
                yield Listed(f"{number:09d}", (("json", name, at, size),))
            at += len(line)


def _list_archives(urls: Sequence[str], safety: Safety) -> list[Listed]:
    store = Store(safety=safety)
    samples: list[Listed] = []
    for url in urls:
        with store.open(url) as stream:
            index = build_index(stream, url.rpartition("/")[2], store.size(url), safety=safety)
        splits = index.splits.tolist()
        parts = list(
            zip(
                [index.fields[k] for k in index.field.tolist()],
                [url] * len(index.field),
                index.start.tolist(),
                index.size.tolist(),
            )
        )
        samples += [Listed(index.key(i), tuple(parts[splits[i] : splits[i + 1]])) for i in range(len(index))]
    if len({sample.key for sample in samples}) == len(samples):
        return samples
    stems = {url: url.rpartition("/")[2].removesuffix(".tar") for url in urls}
    return [Listed(f"{stems[s.parts[0][1]]}/{s.key}", s.parts) for s in samples]


@dataclass(frozen=True)
class _Job:
    path: Path
    samples: list[Listed]
    safety: Safety

    def source(self) -> str:
        """What identifies the files that the shard is written from, as they are now."""
        hashed = hashlib.sha256()
        times: dict[str, int] = {}
        for sample in self.samples:
            for _, path, _, _ in sample.parts:
                if path not in times:
                    times[path] = os.stat(path).st_mtime_ns if os.path.exists(path) else 0
            hashed.update(
                repr((sample, [times[part[1]] for part in sample.parts])).encode("utf-8", "replace")
            )
        return hashed.hexdigest()


def shard(
    source: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    size: int | str = "256MB",
    pattern: str = PATTERN,
    classes: bool = False,
    shuffle: int | None = None,
    workers: int = 0,
    safety: Safety = DEFAULT,
    progress: Progress | None = None,
) -> list[ShardIndex]:
    """Write a folder, a ``.jsonl`` file or archives as shards with indexes.

    Shards that are there whole, from the same files, are kept: what was stopped can be called again.

    Args:
        source: see the module.
        dest: the folder to write to; made if missing.
        size: most bytes of a shard; a larger sample gets a shard of its own.
        pattern: the names of shards, with a place for their number.
        classes: see :func:`list_source`.
        shuffle: the seed to mix the samples with before they are dealt to shards; by default they stay in
            order. Classes that lie in folders of their own should be mixed.
        workers: processes. With two or more, a script needs ``if __name__ == "__main__"``.
        safety: what is allowed in archives, and limits.
        progress: called after each shard with the number done and the number of all.

    Returns:
        The indexes, in order.

    Raises:
        FileExistsError: ``dest`` has shards that were written from something else.
        ShardError: a sample cannot be written.
    """
    listing = list_source(source, classes=classes, safety=safety)
    if listing.skipped:
        warnings.warn(f"{os.fspath(source)!r}: files in no sample: {listing.skipped}", stacklevel=2)
    samples = listing.samples
    if shuffle is not None:
        samples = [samples[i] for i in np.random.default_rng(shuffle).permutation(len(samples)).tolist()]
    folder = Path(dest)
    folder.mkdir(parents=True, exist_ok=True)
    remove_parts(folder)
    groups = _deal(samples, parse_size(size))
    jobs = [_Job(folder / pattern.format(i), group, safety) for i, group in enumerate(groups)]
    _check_rest(folder / pattern.format(len(jobs)))
    return run_jobs(_write_one, jobs, workers, progress)


def _deal(samples: Iterable[Listed], most: int) -> list[list[Listed]]:
    groups: list[list[Listed]] = []
    room = 0
    for sample in samples:
        needed = sample.tar_bytes()
        if not groups or needed > room:
            groups.append([])
            room = most - len(END)
        groups[-1].append(sample)
        room -= needed
    return groups


def _check_rest(path: Path) -> None:
    if path.exists():
        raise FileExistsError(
            f"{str(path)!r} is there, and what is written now has fewer shards: it was written from "
            "something else. Give another folder, or remove what is there."
        )


def _write_one(job: _Job) -> ShardIndex:
    source = job.source()
    known = read_whole(job.path)
    if known is not None:
        if known.source != source:
            raise FileExistsError(
                f"{str(job.path)!r} is there and was written from something else. Give another folder, or "
                "remove what is there."
            )
        return known
    made = OneShard(job.path, safety=job.safety, source=source)
    read = _reader()
    try:
        for sample in job.samples:
            members = {part[0]: read(part) for part in sample.parts}
            if sample.label is not None:
                members["cls"] = str(sample.label).encode()
            made.write(sample.key, members)
        return made.close()
    except BaseException:
        made.discard()
        raise


def _reader() -> Callable[[Part], bytes]:
    store = Store()

    def read(part: Part) -> bytes:
        _, path, start, size = part
        return store.read(path, [start], [size], start + size)[0]

    return read

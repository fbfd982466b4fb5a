"""Samples to shards.

A shard gets its final name when it is whole: the archive is written under another name, its index is put in
place, then the archive is renamed. A run that is killed at any point therefore leaves whole shards with their
indexes, and perhaps files whose names end in ``.part``, which the next run removes, or one index without a
shard, which it replaces.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from .encode import encode_sample
from .errors import ShardError
from .index import IndexBuilder, ShardIndex, index_name
from .kinds import Measure
from .safety import DEFAULT, Safety, is_file
from .tar import END, Member, header, padding, room

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
}
PATTERN = "shard-{:06d}.tar"


def parse_size(size: int | str) -> int:
    """Bytes of a size: ``256_000_000``, ``"256MB"``, ``"1 GiB"``.

    Raises:
        ValueError: it cannot be read, or is not positive.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(size))
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise ValueError(f"size {size!r}: give bytes, or a number with kB, MB, GB, KiB, MiB or GiB: '256MB'")
    return int(float(match[1]) * unit)


class OneShard:
    """One shard in the making; it appears under its name when it is closed.

    Args:
        path: the archive to write.
        safety: limits for what is measured.
        measures: see :class:`~packload.shards.index.IndexBuilder`.
        source: what it is written from.
    """

    def __init__(
        self,
        path: Path,
        *,
        safety: Safety = DEFAULT,
        measures: Mapping[str, Measure] | None = None,
        source: str = "",
    ) -> None:
        self.path = path
        self.source = source
        self.size = 0
        self._builder = IndexBuilder(path.name, safety, measures)
        self._part = path.with_name(f"{path.name}.{os.getpid()}.part")
        self._file = open(self._part, "wb")

    def __len__(self) -> int:
        return len(self._builder)

    def write(self, key: str, members: Mapping[str, bytes], lengths: Mapping[str, int] | None = None) -> None:
        """Add a sample.

        A sample that cannot be added leaves the shard as it was.

        Raises:
            ShardError: its key was there before, or a member is not what its name says.
        """
        if key == self._builder.last_key:
            raise ShardError(f"sample {key!r}: the sample before it has the same key.")
        before = len(self._builder)
        parts: list[bytes] = []
        at = self.size
        try:
            for field, content in members.items():
                name = f"{key}.{field}"
                head = header(name, len(content))
                is_file(Member(name, "file", 0, 0), self.path.name, self._builder.safety)
                self._builder.add(name, at + len(head), content)
                parts += (head, content, padding(len(content)))
                at += sum(map(len, parts[-3:]))
            if len(self._builder) != before + 1:
                raise ShardError(f"sample {key!r}: its key is another one in the archive.")
            self._builder.add_lengths(lengths or {})
        except BaseException:
            if len(self._builder) > before:
                self._builder.drop_last()
            raise
        self._file.writelines(parts)
        self.size = at

    def close(self) -> ShardIndex:
        """Finish the archive, put its index in place, then the archive."""
        self._file.write(END)
        self.size += len(END)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        index = self._builder.build(self.size, source=self.source)
        replace(Path(index_name(str(self.path))), index.to_bytes())
        os.replace(self._part, self.path)
        return index

    def discard(self) -> None:
        """Give it up: nothing is left of it."""
        try:
            self._file.close()
        except OSError:
            pass  # what could not be written before cannot be now
        finally:
            self._part.unlink(missing_ok=True)


def remove_parts(folder: Path) -> None:
    """Remove what runs that were killed left unfinished: files ``*.PID.part`` of no living process."""
    for path in folder.glob("*.part"):
        number = path.name.split(".")[-2]
        if number.isdigit() and not _is_alive(int(number)):
            path.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def replace(path: Path, content: bytes) -> None:
    """Write a file so that it is there with all of its content or not at all."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def read_whole(path: Path) -> ShardIndex | None:
    """The index of a shard that is there whole; None if it is not."""
    index_path = Path(index_name(str(path)))
    if not path.is_file() or not index_path.is_file():
        return None
    index = ShardIndex.from_bytes(index_path.read_bytes(), str(index_path))
    return index if index.whole and index.tar_bytes == path.stat().st_size else None


class ShardWriter:
    """Writes samples to shards, in WebDataset's format, each with its index.

        with packload.ShardWriter("out", size="256MB") as writer:
            for text, label in reviews:
                writer.write({"txt": text, "cls": label})

    A sample is a mapping from fields to values, see :func:`~packload.shards.encode.encode`; ``__key__`` is
    its key, by default its number. A shard is closed when the next sample would take it over ``size`` or
    ``count``. Leaving the block by an error keeps the shards that are whole and drops the one begun.

    Args:
        dest: the folder to write to; made if missing.
        size: most bytes of a shard (``"256MB"``); a larger sample gets a shard of its own.
        count: most samples of a shard; by default no limit.
        pattern: the names of shards, with a place for their number.
        resume: keep the whole shards that are in ``dest``. The first samples that are written must then be
            theirs; they are compared by key and not written again. Without it a folder that has such shards
            is refused.
        workers: threads that encode samples, for images; 0 encodes where ``write`` is called.
        measures: own lengths for the index: see :class:`~packload.shards.index.IndexBuilder`.
        safety: limits for what is measured.

    Raises:
        FileExistsError: there are shards in ``dest``, and ``resume`` is not set.
        ValueError: a size or pattern cannot be read.
    """

    def __init__(
        self,
        dest: str | os.PathLike[str],
        *,
        size: int | str = "256MB",
        count: int | None = None,
        pattern: str = PATTERN,
        resume: bool = False,
        workers: int = 0,
        measures: Mapping[str, Measure] | None = None,
        safety: Safety = DEFAULT,
    ) -> None:
        self.dest = Path(dest)
        self.size = parse_size(size)
        if count is not None and count < 1:
            raise ValueError(f"count {count}: a shard holds at least one sample")
        self.count = count
        self.pattern = pattern
        if pattern.format(0) == pattern.format(1) or not pattern.endswith(".tar"):
            raise ValueError(f"pattern {pattern!r}: give a place for the number and end in .tar: {PATTERN!r}")
        self.measures = measures
        self.safety = safety
        self.dest.mkdir(parents=True, exist_ok=True)
        self.indexes: list[ShardIndex] = []
        self._find(resume)
        self._kept = len(self.indexes)
        self._at = (0, 0)
        self._number = 0
        self._open: OneShard | None = None
        self._closed = False
        self._pool = ThreadPoolExecutor(workers, "packload-encode") if workers else None
        self._waiting: deque[tuple[str, Future[dict[str, bytes]], Mapping[str, int] | None]] = deque()
        self._most = 4 * workers

    @property
    def written(self) -> int:
        """The number of samples in whole shards."""
        return sum(map(len, self.indexes))

    def write(self, sample: Mapping[str, Any], lengths: Mapping[str, int] | None = None) -> None:
        """Add a sample.

        Args:
            sample: field -> value; ``__key__``: its key.
            lengths: own lengths for the index, name of the column -> length.

        Raises:
            ShardError: the sample cannot be written, or is not the one that a whole shard has in its place.
        """
        if self._closed:
            raise ValueError(f"{self.dest}: the writer is closed. Make another one: resume=True.")
        key = str(sample.get("__key__", f"{self._number:09d}"))
        self._number += 1
        if self._is_kept(key):
            return
        if self._pool is None:
            self._put(key, encode_sample(sample, key), lengths)
            return
        self._waiting.append((key, self._pool.submit(encode_sample, dict(sample), key), lengths))
        if len(self._waiting) > self._most:
            self._drain(self._most // 2)

    def close(self) -> list[ShardIndex]:
        """Finish the last shard; the indexes of all."""
        if self._closed:
            return self.indexes
        try:
            self._drain(0)
            if self._at[0] < self._kept:
                raise ShardError(
                    f"{self.dest}: it has {self.written} samples, and only {self._number} were given. Give "
                    "all samples again, or remove the shards that are not wanted."
                )
            self._finish()
        except BaseException:
            self.abort()
            raise
        self._stop()
        return self.indexes

    def abort(self) -> None:
        """Drop the shard begun; whole shards stay."""
        self._stop()
        if self._open is not None:
            self._open.discard()
            self._open = None

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _stop(self) -> None:
        self._closed = True
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._waiting.clear()

    def _path(self, number: int) -> Path:
        return self.dest / self.pattern.format(number)

    def _find(self, resume: bool) -> None:
        """Take over the whole shards that are there; what was begun by a run that ended is removed."""
        remove_parts(self.dest)
        while (index := read_whole(self._path(len(self.indexes)))) is not None:
            self.indexes.append(index)
        begin, _, end = self.pattern.partition("{")
        names = sorted(self.dest.glob(f"{begin}*{end.partition('}')[2]}"))
        extra = [path.name for path in names[len(self.indexes) :]]
        if self.indexes and not resume:
            raise FileExistsError(
                f"{self.dest} has {len(self.indexes)} shards already. Go on behind them: resume=True; or "
                "give another folder."
            )
        if extra:
            raise FileExistsError(
                f"{self.dest}: {extra[0]!r} is there, but not as a whole shard that follows the "
                f"{len(self.indexes)} before it. Remove it, or index it: packload index."
            )

    def _is_kept(self, key: str) -> bool:
        """Whether a sample is in a whole shard already."""
        shard, place = self._at
        if shard >= self._kept:
            return False
        index = self.indexes[shard]
        if index.key(place) != key:
            raise ShardError(
                f"sample {self._number - 1} has the key {key!r}, and {index.tar!r} has {index.key(place)!r} "
                "in its place: resuming needs the same samples in the same order."
            )
        self._at = (shard, place + 1) if place + 1 < len(index) else (shard + 1, 0)
        return True

    def _drain(self, most: int) -> None:
        while len(self._waiting) > most:
            key, future, lengths = self._waiting.popleft()
            self._put(key, future.result(), lengths)

    def _put(self, key: str, members: Mapping[str, bytes], lengths: Mapping[str, int] | None) -> None:
        if self._open is not None:
            more = sum(room(f"{key}.{field}", len(content)) for field, content in members.items())
            full = self.count is not None and len(self._open) >= self.count
            if full or self._open.size + more + len(END) > self.size:
                self._finish()
        if self._open is None:
            path = self._path(len(self.indexes))
            self._open = OneShard(path, safety=self.safety, measures=self.measures)
        self._open.write(key, members, lengths)

    def _finish(self) -> None:
        if self._open is not None:
            self.indexes.append(self._open.close())
            self._open = None

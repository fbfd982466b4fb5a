"""Shards as a data set: any sample by its number, many at a time.

    urls -> indexes -> [shard, sample] numbers -> ranges by shard -> bytes -> checksums -> values

The samples of all shards are numbered in order. Which are read and when is the business of a sampler; see
:mod:`packload.shards.stream`.
"""

from __future__ import annotations

import os
import threading
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .decode import Decode, Decoder
from .errors import DamagedShardError, Place, ShardError, UnsafeShardError
from .index import NONE, ShardIndex, index_name, total_digest
from .safety import DEFAULT, Safety
from .store import Store, expand

Array = NDArray[np.int64]
Urls = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
_OPENED_AT_ONCE = 16


@dataclass(frozen=True)
class Damage:
    """A shard that is not whole: ``read`` of its ``of`` samples can be read (None: nobody knows)."""

    shard: str
    read: int
    of: int | None
    why: str

    def __str__(self) -> str:
        of = "an unknown number of" if self.of is None else str(self.of)
        return f"{Place(self.shard)}: {self.read} of {of} samples can be read: {self.why}"


class ShardDataset:
    """Samples of shards by number: a map-style data set.

    A sample is a dict: ``__key__`` and one entry a field, decoded as :mod:`packload.shards.decode` says.
    ``ds[i]`` reads one, ``ds.__getitems__([...])``, which loaders call, many at once. It can be used from
    several threads, pickled, and forked.

    Args:
        urls: the shards: paths, addresses, patterns with braces or stars, or a list of these.
        fields: read only these fields; by default all. Members that are left out are not read.
        decode: functions of a member's bytes, by field or by the end of its name; None: leave the bytes.
        map: a function of the sample, called last.
        index: the folder of the indexes, if they do not lie beside the shards.
        on_error: ``"raise"``, or ``"skip"``: go on without what cannot be read. Shards that are cut off are
            then listed in ``damages`` (with a warning), samples found unreadable later are counted by shard
            in ``skips``. What is unsafe is never skipped.
        cache, cache_bytes: a folder for blocks of remote shards, and the most bytes in it.
        safety: what is allowed beyond plain data.
        verify: compare every member with its checksum.
        options: what `fsspec` needs to reach the files.

    Raises:
        FileNotFoundError: a shard or its index is missing.
        DamagedShardError: a shard is not whole, or not the one that was indexed.
        ShardError: an index cannot be read.
    """

    def __init__(
        self,
        urls: Urls,
        *,
        fields: Sequence[str] | None = None,
        decode: Mapping[str, Decoder | None] | None = None,
        map: Callable[[dict[str, Any]], Any] | None = None,
        index: str | os.PathLike[str] | None = None,
        on_error: str = "raise",
        cache: str | os.PathLike[str] | None = None,
        cache_bytes: int = 10 * 10**9,
        safety: Safety = DEFAULT,
        verify: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error={on_error!r}: give 'raise' or 'skip'")
        self.urls = expand(urls, safety)
        self.fields = None if fields is None else tuple(fields)
        self.map = map
        self.on_error = on_error
        self.verify = verify
        self.store = Store(cache, cache_bytes, options=options, safety=safety)
        self.skips: Counter[str] = Counter()
        self._decode = Decode(decode, safety)
        self._lock = threading.Lock()
        with ThreadPoolExecutor(min(_OPENED_AT_ONCE, len(self.urls))) as pool:
            opened = list(pool.map(lambda url: self._open(url, index), self.urls))
        self.indexes = [found for found, _, _ in opened]
        self.damages = [damage for _, _, damage in opened if damage is not None]
        counts = [count for _, count, _ in opened]
        self.bases: Array = np.cumsum([0, *counts], dtype=np.int64)
        self._check_fields()
        self._chosen = [
            [self.fields is None or field in self.fields for field in found.fields] for found in self.indexes
        ]
        for damage in self.damages:
            warnings.warn(f"going on without what is damaged: {damage}", stacklevel=2)

    def __len__(self) -> int:
        return int(self.bases[-1])

    def __getitem__(self, i: int) -> Any:
        if not -len(self) <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        return self.__getitems__([i % len(self)])[0]

    def __getitems__(self, indices: Sequence[int] | Array) -> list[Any]:
        """Samples by number, in the order given; reads are grouped by shard, and near ones joined.

        Raises:
            IndexError: a number is out of range.
            DamagedShardError: bytes are missing or are not those that were indexed.
            ShardError: a member cannot be decoded.
        """
        wanted = np.asarray(indices, np.int64)
        if len(wanted) and not (0 <= wanted.min() and wanted.max() < len(self)):
            raise IndexError(f"samples {wanted.min()} to {wanted.max()} of {len(self)}")
        shards = self.shard_of(wanted)
        places: dict[int, list[int]] = {}
        for place, shard in enumerate(shards.tolist()):
            places.setdefault(shard, []).append(place)
        local = (wanted - self.bases[shards]).tolist()
        groups = []
        for shard, owners in places.items():
            members = self._members(shard, [local[place] for place in owners])
            self.store.warm(self.urls[shard], members.start, members.size, self.indexes[shard].tar_bytes)
            groups.append((shard, owners, members))
        samples: list[Any] = [None] * len(wanted)
        failed: list[int] = []
        for shard, owners, members in groups:
            self._read(shard, owners, members, samples, failed)
        if failed:
            if len(failed) == len(wanted):
                raise DamagedShardError(
                    f"none of the {len(wanted)} samples of a batch can be read; skipped so far: "
                    f"{dict(self.skips)}."
                )
            gone = set(failed)
            samples = [sample for i, sample in enumerate(samples) if i not in gone]
        return samples if self.map is None else [self.map(sample) for sample in samples]

    def key(self, i: int) -> str:
        """The key of a sample."""
        shard = int(self.shard_of(np.array(i)))
        return self.indexes[shard].key(i - int(self.bases[shard]))

    @property
    def columns(self) -> tuple[str, ...]:
        """The names that :meth:`lengths` takes, beside ``FIELD.bytes``."""
        return tuple(dict.fromkeys(name for index in self.indexes for name in index.columns))

    def lengths(self, column: str) -> Array:
        """int64 [N]: the lengths of all samples, from the indexes.

        Args:
            column: its name, for example ``"txt.words"``, ``"jpg.h"``, ``"tokens.npy.0"``, ``"txt.bytes"``;
                see :func:`packload.shards.kinds.measure`.

        Raises:
            KeyError: a shard has no such column.
            ValueError: a sample has no such length.
        """
        parts = []
        for shard, index in enumerate(self.indexes):
            count = int(self.bases[shard + 1] - self.bases[shard])
            if not count:
                continue
            try:
                part = index.column(column)[:count]
            except KeyError:
                names = [*index.columns, *(f"{field}.bytes" for field in index.fields)]
                raise KeyError(f"{Place(index.tar)} has no lengths {column!r}; it has {names}") from None
            if (part == NONE).any():
                i = int(np.flatnonzero(part == NONE)[0])
                raise ValueError(f"{Place(index.tar)}: sample {index.key(i)!r} has no length {column!r}.")
            parts.append(part)
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    @property
    def skipped(self) -> int:
        """Samples that were left out because they could not be read, in this process."""
        return sum(self.skips.values())

    def sizes(self) -> Array:
        """int64 [N]: the bytes of all members of each sample."""
        parts = [np.zeros(0, np.int64)]
        for index, count in zip(self.indexes, np.diff(self.bases).tolist()):
            total = np.append(0, np.cumsum(index.size.astype(np.int64)))
            parts.append(np.diff(total[index.splits.astype(np.int64)])[:count])
        return np.concatenate(parts)

    def shard_of(self, samples: NDArray[Any]) -> Array:
        """The shard of each sample, by number."""
        found: Array = np.searchsorted(self.bases, samples, "right") - 1
        return found

    @property
    def fingerprint(self) -> str:
        """What identifies the samples, for the state of a loader and for what is kept of them."""
        counts = " ".join(map(str, np.diff(self.bases).tolist()))
        return f"{total_digest(self.indexes)}:{zlib.crc32(counts.encode()):08x}"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} samples in {len(self.urls)} shards, {self.columns})"

    def _open(self, url: str, folder: str | os.PathLike[str] | None) -> tuple[ShardIndex, int, Damage | None]:
        """The index of a shard, how many of its samples can be read, and what is wrong with it."""
        name = index_name(url)
        if folder is not None:
            name = os.path.join(os.fspath(folder), name.rpartition("/")[2])
        try:
            index = ShardIndex.from_bytes(self.store.whole(name), name)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{Place(url)} has no index ({name}). Write it: packload index {url}, "
                f"or packload.index_shards({url!r})."
            ) from None
        try:
            size = self.store.size(url)
        except FileNotFoundError:
            size = 0
            if self.on_error == "raise":
                raise FileNotFoundError(f"{Place(url)} is not there, but its index is.") from None
        return index, *self._judge(url, index, size)

    def _judge(self, url: str, index: ShardIndex, size: int | None) -> tuple[int, Damage | None]:
        count = len(index)
        if size is not None and size < index.tar_bytes:
            count = int((index.ends() <= size).sum())
            why = f"it has {size} bytes and had {index.tar_bytes} when it was indexed: it was cut off."
            damage = Damage(url, count, len(index) if index.whole else None, why)
        elif size is not None and size > index.tar_bytes:
            raise DamagedShardError(
                f"{Place(url)}: it has {size} bytes and had {index.tar_bytes} when it was indexed. Index it "
                "anew: packload index --again."
            )
        elif not index.whole:
            damage = Damage(url, count, None, "it was cut off already when it was indexed.")
        else:
            return count, None
        if self.on_error == "raise":
            raise DamagedShardError(f"{damage} Copy it again, or go on without the rest: on_error='skip'.")
        return count, damage

    def _check_fields(self) -> None:
        known = {field for index in self.indexes for field in index.fields}
        for field in self.fields or ():
            if field not in known:
                raise ShardError(f"no shard has a field {field!r}; they have {sorted(known)}.")

    def _members(self, shard: int, samples: list[int]) -> _Members:
        index = self.indexes[shard]
        splits, fields = index.splits.item, index.field.item
        start, size, crc = index.start.item, index.size.item, index.crc.item
        chosen = self._chosen[shard]
        found = _Members(samples, [], [], [], [], [])
        for owner, sample in enumerate(samples):
            for member in range(splits(sample), splits(sample + 1)):
                field = fields(member)
                if chosen[field]:
                    found.owner.append(owner)
                    found.field.append(field)
                    found.start.append(start(member))
                    found.size.append(size(member))
                    found.crc.append(crc(member))
        return found

    def _read(
        self, shard: int, places: list[int], members: _Members, samples: list[Any], failed: list[int]
    ) -> None:
        """Read the members of some samples of a shard, and put the samples in their places."""
        index, url = self.indexes[shard], self.urls[shard]
        contents = self._contents(url, members, index.tar_bytes)
        wrong: dict[int, ShardError] = {}
        made: list[dict[str, Any]] = [{"__key__": index.key(i)} for i in members.samples]
        for owner, number, content in zip(members.owner, members.field, contents):
            field, sample = index.fields[number], made[owner]
            where = Place(url, f"{sample['__key__']}.{field}")
            try:
                if content is None:
                    raise _changed(where)
                sample[field] = self._decode(field, content, where)
            except UnsafeShardError:
                raise
            except ShardError as error:
                if self.on_error == "raise":
                    raise
                wrong[owner] = error
        for owner, place in enumerate(places):
            if owner in wrong:
                self._skip(url, wrong[owner])
                failed.append(place)
            else:
                samples[place] = made[owner]

    def _contents(self, url: str, members: _Members, total: int) -> list[bytes | None]:
        """The members' bytes; None for those that cannot be read or have another checksum.

        Where there is a cache, what seems wrong is read once more past it.
        """
        tries = (False, True) if self.store.is_cached(url) else (False,)
        contents: list[bytes | None] = []
        for fresh in tries:
            try:
                contents = [*self.store.read(url, members.start, members.size, total, fresh=fresh)]
            except DamagedShardError:
                if self.on_error == "raise":
                    raise
                return [None] * len(members.start)
            if not self.verify:
                return contents
            contents = [c if zlib.crc32(c or b"") == crc else None for c, crc in zip(contents, members.crc)]
            if None not in contents:
                break
        return contents

    def _skip(self, url: str, error: ShardError) -> None:
        with self._lock:
            self.skips[url] += 1
        warnings.warn(f"sample skipped: {error}", stacklevel=2)


class _Members(NamedTuple):
    """Members of samples of one shard: the samples' numbers there [S], and for each of M members ..."""

    samples: list[int]
    owner: list[int]
    field: list[int]
    start: list[int]
    size: list[int]
    crc: list[int]


def _changed(where: Place) -> DamagedShardError:
    return DamagedShardError(
        f"{where}: its bytes are not those that were indexed. The shard was replaced or damaged; copy it "
        "again, or index it: packload index --again."
    )

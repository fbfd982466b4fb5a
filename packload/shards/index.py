"""The index of a shard: where every sample's members lie, how long they are, and their checksums.

It lies beside the shard, ``train-000001.tar`` and ``train-000001.index.npz``, and is an ordinary ``.npz``
file of N samples and M members:

=============  ==========================================================================================
``header``     JSON: format, version, the archive's name and size, the names of fields and columns, what was
               passed over, whether the archive is whole
``splits``     [N + 1]: sample i has the members ``splits[i]`` to ``splits[i + 1]``
``field``      [M]: a number into the header's fields
``start``      [M]: the first byte of the member's content in the archive
``size``       [M]: its bytes
``crc``        [M]: its CRC-32
``keys``       the keys of all samples, one after the other, UTF-8
``key_splits`` [N + 1]: sample i's key is ``keys[key_splits[i]:key_splits[i + 1]]``
``lengths``    [columns, N]: see :func:`packload.shards.kinds.measure`; -1 where a sample has none
=============  ==========================================================================================

A shard of another size than its index says is found when it is opened; one with other bytes in the same
places when a sample is read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import DamagedShardError, Place, ShardError, UnsafeShardError
from .kinds import Measure, measure, split_name
from .safety import DEFAULT, Safety, is_file, load_arrays
from .tar import Readable, read_members

Array = NDArray[Any]
VERSION = 1
_FORMAT = "packload shard index"
_ARRAYS = ("splits", "field", "start", "size", "crc", "keys", "key_splits", "lengths")
_MOST_COLUMNS = 256
_LIMITS = Safety(max_unpacked_bytes=1 << 30)
_MOST_LENGTH = 2**53
NONE = -1
"""The length of what a sample does not have."""


def index_name(url: str) -> str:
    """The address of a shard's index."""
    return f"{url.removesuffix('.tar')}.index.npz"


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """The index of one shard; see the module for its arrays.

    Attributes:
        tar: the archive's file name.
        tar_bytes: its size.
        fields: the names of fields that ``field`` refers to.
        columns: the names of the rows of ``lengths``.
        whole: whether the archive had its end.
        skipped: what of the archive is in no sample: reason -> number of members.
        source: what the shard was written from, for those who write it again.
    """

    tar: str
    tar_bytes: int
    fields: tuple[str, ...]
    columns: tuple[str, ...]
    splits: Array
    field: Array
    start: Array
    size: Array
    crc: Array
    keys: Array
    key_splits: Array
    lengths: Array
    whole: bool = True
    skipped: Mapping[str, int] = dataclasses.field(default_factory=dict)
    source: str = ""

    def __len__(self) -> int:
        return len(self.splits) - 1

    def key(self, i: int) -> str:
        """The key of sample i."""
        begin, end = int(self.key_splits[i]), int(self.key_splits[i + 1])
        return self.keys[begin:end].tobytes().decode("utf-8", "surrogateescape")

    def column(self, name: str) -> Array:
        """int64 [N]: the lengths of a column; ``FIELD.bytes`` is the size of a member.

        Raises:
            KeyError: there is no such column.
        """
        if name in self.columns:
            return self.lengths[self.columns.index(name)].astype(np.int64)
        member = name.removesuffix(".bytes")
        if member != name and member in self.fields:
            sizes = np.full(len(self), NONE, np.int64)
            chosen = np.flatnonzero(self.field == self.fields.index(member))
            sizes[np.searchsorted(self.splits, chosen, "right") - 1] = self.size[chosen]
            return sizes
        raise KeyError(name)

    def ends(self) -> Array:
        """int64 [N]: for each sample the first byte after its last member."""
        if not len(self):
            return np.zeros(0, np.int64)
        ends = self.start.astype(np.int64) + self.size.astype(np.int64)
        return np.maximum.reduceat(ends, self.splits[:-1].astype(np.int64))

    def digest(self) -> str:
        """What identifies the samples: a hash of their keys, fields, sizes and checksums."""
        hashed = hashlib.sha256(json.dumps([self.fields]).encode())
        for array in (self.splits, self.field, self.size, self.crc, self.keys, self.key_splits):
            hashed.update(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).astype("<u8").tobytes())
        return hashed.hexdigest()[:32]

    def to_bytes(self) -> bytes:
        """The index as the content of its file; equal indexes give equal bytes."""
        header = {
            "format": _FORMAT,
            "version": VERSION,
            "tar": self.tar,
            "tar_bytes": self.tar_bytes,
            "samples": len(self),
            "fields": list(self.fields),
            "columns": list(self.columns),
            "whole": self.whole,
            "skipped": dict(self.skipped),
            "source": self.source,
        }
        arrays = {name: _compact(getattr(self, name)) for name in _ARRAYS}
        arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
        file = io.BytesIO()
        np.savez_compressed(file, allow_pickle=False, **arrays)
        return file.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> ShardIndex:
        """Read an index.

        Args:
            content: the content of its file.
            where: its address, for errors.

        Raises:
            ShardError: it is no index, is damaged, or is of a later version.
        """
        try:
            arrays = load_arrays(content, Place(where), _LIMITS)
        except ShardError as error:
            raise _unreadable(where, error) from error
        try:
            header = _read_header(arrays["header"], where)
            index = cls(
                tar=str(header["tar"]),
                tar_bytes=int(header["tar_bytes"]),
                fields=tuple(header["fields"]),
                columns=tuple(header["columns"]),
                whole=bool(header["whole"]),
                skipped=dict(header["skipped"]),
                source=str(header["source"]),
                **{name: arrays[name] for name in _ARRAYS},
            )
        except ShardError:
            raise
        except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
            raise _unreadable(where, error) from error
        _check(index, where)
        return index


def _read_header(array: Array, where: str) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(array.tobytes())
    if header["format"] != _FORMAT:
        raise ShardError(f"index {where!r}: it is {header['format']!r}, not {_FORMAT!r}.")
    if header["version"] > VERSION:
        raise ShardError(
            f"index {where!r}: version {header['version']}; this packload reads up to {VERSION}. Update "
            "packload, or write the index anew: packload index --again."
        )
    return header


def _unreadable(where: str, error: Exception) -> DamagedShardError:
    return DamagedShardError(
        f"index {where!r} cannot be read ({type(error).__name__}: {error}). Write it anew: packload index "
        "--again."
    )


def _check(index: ShardIndex, where: str) -> None:
    """Refuse an index whose numbers do not fit together: it came from elsewhere, as the shard did."""
    sound = _are_shapes_sound(index) and _are_names_sound(index) and _are_places_sound(index)
    if not sound:
        raise DamagedShardError(
            f"index {where!r}: its numbers do not fit together. Write it anew: packload index --again."
        )


def _are_shapes_sound(index: ShardIndex) -> bool:
    arrays = [getattr(index, name) for name in _ARRAYS]
    members, samples = index.start.size, index.splits.size - 1
    return (
        all(array.dtype.kind in "iu" and array.ndim == 1 for array in arrays[:-1])
        and samples >= 0
        and len(index.field) == len(index.size) == len(index.crc) == members
        and len(index.key_splits) == samples + 1
        and index.keys.dtype == np.uint8
        and index.lengths.dtype.kind in "iu"
        and index.lengths.shape == (len(index.columns), samples)
    )


def _are_names_sound(index: ShardIndex) -> bool:
    return all(
        all(isinstance(name, str) for name in names) and len(set(names)) == len(names)
        for names in (index.fields, index.columns)
    ) and not any(field.startswith("__") for field in index.fields)


def _are_places_sound(index: ShardIndex) -> bool:
    """Whether samples follow each other in the members, members in the archive, and lengths are lengths."""
    splits, keys = index.splits.astype(np.int64), index.key_splits.astype(np.int64)
    start, size = index.start.astype(np.float64), index.size.astype(np.float64)
    ends = start + size
    return bool(
        splits[0] == keys[0] == 0
        and splits[-1] == len(start)
        and keys[-1] == len(index.keys)
        and (np.diff(splits) > 0).all()
        and (np.diff(keys) >= 0).all()
        and (start[1:] >= ends[:-1]).all()
        and (not len(start) or (start[0] >= 0 and size.min() >= 0 and ends[-1] <= index.tar_bytes))
        and ((index.field >= 0) & (index.field < len(index.fields))).all()
        and ((index.lengths >= NONE) & (index.lengths <= _MOST_LENGTH)).all()
    )


def _compact(array: Array) -> Array:
    """The same numbers in the smallest type that holds them, little-endian."""
    low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
    types = ("<i1", "<i2", "<i4", "<i8") if low < 0 else ("<u1", "<u2", "<u4", "<u8")
    return array.astype(next(t for t in types if np.iinfo(t).min <= low and high <= np.iinfo(t).max))


class IndexBuilder:
    """Collects the index of a shard, member by member.

    Args:
        tar: the shard's name, for the index and for errors.
        safety: what is allowed.
        measures: a function for a field, of its bytes: its length (column ``FIELD.length``) or lengths by
            name (``FIELD.NAME``), beside those of :func:`~packload.shards.kinds.measure`.
        tolerant: count members that cannot be measured instead of raising.
    """

    def __init__(
        self,
        tar: str,
        safety: Safety = DEFAULT,
        measures: Mapping[str, Measure] | None = None,
        tolerant: bool = False,
    ) -> None:
        self.tar = tar
        self.safety = safety
        self.tolerant = tolerant
        self.measures = dict(measures or {})
        self.skipped: Counter[str] = Counter()
        self._fields: dict[str, int] = {}
        self._columns: dict[str, dict[int, int]] = {}
        self._members: list[tuple[int, int, int, int]] = []
        self._splits: list[int] = []
        self._keys: list[str] = []
        self._known: set[str] = set()
        self._present: set[int] = set()
        self._fields_before = 0

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def last_key(self) -> str | None:
        """The key of the sample that was added last."""
        return self._keys[-1] if self._keys else None

    def add(self, name: str, start: int, content: bytes) -> None:
        """Add the next member.

        Raises:
            ShardError: its field is there twice, its key returns later, or it cannot be measured.
        """
        parts = split_name(name)
        if parts is None:
            self.skipped["about the archive" if name.startswith("__") else "no field in the name"] += 1
            return
        key, member = parts
        where = Place(self.tar, name)
        if member.startswith("__"):
            raise ShardError(f"{where}: fields do not begin with two underscores. Rename it.")
        if not self._keys or key != self._keys[-1]:
            self._begin(key, where)
        number = self._fields.setdefault(member, len(self._fields))
        if number in self._present:
            raise ShardError(
                f"{where}: field {member!r} of sample {key!r} is there twice. Rename one of them."
            )
        self._present.add(number)
        self._members.append((number, start, len(content), zlib.crc32(content)))
        self._measure(member, content, where)

    def _measure(self, member: str, content: bytes, where: Place) -> None:
        try:
            self.add_lengths(measure(member, content, where, self.safety))
        except UnsafeShardError:
            raise
        except ShardError:
            if not self.tolerant:
                raise
            self.skipped["cannot be measured"] += 1
        own = self.measures.get(member)
        if own is not None:
            try:
                sizes = own(content)
            except Exception as error:
                name = getattr(own, "__name__", repr(own))
                raise ShardError(f"{where}: {name} raised {type(error).__name__}: {error}") from error
            named = sizes if isinstance(sizes, Mapping) else {"length": sizes}
            self.add_lengths({f"{member}.{part}": size for part, size in named.items()})

    def add_lengths(self, lengths: Mapping[str, int]) -> None:
        """Add columns of the sample whose member was added last.

        Raises:
            ShardError: one is no length: not an integer from 0 to 2**53.
        """
        for name, size in lengths.items():
            if not 0 <= size <= _MOST_LENGTH or size != int(size):
                raise ShardError(
                    f"{Place(self.tar)}, sample {self._keys[-1]!r}: {size!r} is no length ({name})."
                )
            column = self._columns.get(name)
            if column is None:
                if len(self._columns) >= _MOST_COLUMNS:
                    self.skipped[f"lengths beyond {_MOST_COLUMNS} columns"] += 1
                    continue
                column = self._columns[name] = {}
            column[len(self._keys) - 1] = int(size)

    def end_early(self) -> None:
        """Take back the last sample unless it has the fields of the one before: members may be missing."""
        if not self._keys:
            return
        before = self._members[self._splits[-2] : self._splits[-1]] if len(self._splits) > 1 else []
        if {member[0] for member in before} != self._present:
            self.drop_last()

    def drop_last(self) -> None:
        """Take back the last sample, and the fields and columns that only it has."""
        del self._members[self._splits.pop() :]
        self._known.discard(self._keys.pop())
        self._fields = {
            field: number for field, number in self._fields.items() if number < self._fields_before
        }
        for column in self._columns.values():
            column.pop(len(self._keys), None)
        self._columns = {name: column for name, column in self._columns.items() if column}

    def build(self, tar_bytes: int, whole: bool = True, source: str = "") -> ShardIndex:
        """The index of what was added.

        Args:
            tar_bytes: the size of the archive.
            whole: whether it has its end.
            source: what it was written from.
        """
        members = np.array(self._members, np.uint64).reshape(-1, 4)
        keys = [key.encode("utf-8", "surrogateescape") for key in self._keys]
        lengths = np.full((len(self._columns), len(keys)), NONE, np.int64)
        for row, column in zip(lengths, self._columns.values()):
            row[list(column)] = list(column.values())
        return ShardIndex(
            tar=self.tar,
            tar_bytes=tar_bytes,
            fields=tuple(self._fields),
            columns=tuple(self._columns),
            splits=np.array([*self._splits, len(members)], np.uint64),
            field=members[:, 0],
            start=members[:, 1],
            size=members[:, 2],
            crc=members[:, 3],
            keys=np.frombuffer(b"".join(keys), np.uint8),
            key_splits=np.cumsum([0, *map(len, keys)], dtype=np.uint64),
            lengths=lengths,
            whole=whole,
            skipped=dict(self.skipped),
            source=source,
        )

    def _begin(self, key: str, where: Place) -> None:
        if key in self._known and not self.safety.allow_duplicate_keys:
            raise UnsafeShardError(
                f"{where}: the key {key!r} was there before, with other samples between. Rename one, "
                "or put the members of a sample side by side; or take them as two samples: "
                "Safety(allow_duplicate_keys=True)."
            )
        self._known.add(key)
        self._keys.append(key)
        self._splits.append(len(self._members))
        self._present = set()
        self._fields_before = len(self._fields)


def build_index(
    stream: Readable,
    tar: str,
    size: int | None = None,
    *,
    safety: Safety = DEFAULT,
    measures: Mapping[str, Measure] | None = None,
    tolerant: bool = False,
) -> ShardIndex:
    """Index an archive in one pass over its bytes.

    Args:
        stream: the archive from its first byte.
        tar: its name.
        size: its length in bytes, if known.
        safety: what is allowed.
        measures: see :class:`IndexBuilder`.
        tolerant: index the samples of a damaged archive that lie whole before the damage; its index says
            that it is not whole. Members that cannot be measured are counted in ``skipped``.

    Raises:
        DamagedShardError: the archive is cut off.
        UnsafeShardError: it asks for what is refused.
        ShardError: it cannot be read.
    """
    builder = IndexBuilder(tar, safety, measures, tolerant)
    reader = _Counted(stream)
    whole = True
    try:
        for member, content in read_members(reader, tar, size):
            if is_file(member, tar, safety):
                builder.add(member.name, member.start, content)
            elif member.kind != "directory":
                builder.skipped[member.kind] += 1
    except DamagedShardError:
        if not tolerant:
            raise
        whole = False
        builder.end_early()
    return builder.build(reader.count if size is None else size, whole)


class _Counted:
    """A stream that counts what was read."""

    def __init__(self, stream: Readable) -> None:
        self._read = stream.read
        self.count = 0

    def read(self, size: int, /) -> bytes:
        content = self._read(size)
        self.count += len(content)
        return content


def total_digest(indexes: Iterable[ShardIndex]) -> str:
    """What identifies the samples of several shards, in order."""
    return hashlib.sha256(" ".join(index.digest() for index in indexes).encode()).hexdigest()[:32]

"""Tar archives as a stream of headers and contents, and the headers to write.

An archive is a run of 512-byte blocks: a header, the content filled up to whole blocks, the next header, and
two blocks of zeros at the end. Read are the formats in use: ustar (a name in two parts), pax (records before
a member that replace its name and size) and GNU (long names, sizes in base 256). Nothing is extracted and no
name is used as a path.

Source of the layout: POSIX.1-2001, ``pax`` interchange format, and the GNU tar manual, "Basic Tar Format".
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from .errors import DamagedShardError, Place, ShardError

BLOCK = 512
_PIECE = 1 << 20
_MOST_METADATA = 1 << 20
_MOST_DIGITS = 40
_EMPTY = bytes(BLOCK)
_KINDS = {
    b"0": "file",
    b"\0": "file",
    b"7": "file",
    b"1": "hard link",
    b"2": "symbolic link",
    b"3": "character device",
    b"4": "block device",
    b"5": "directory",
    b"6": "named pipe",
    b"S": "sparse file",
    b"M": "part of a file",
    b"V": "volume label",
}
_RECORDS = frozenset({b"path", b"linkpath", b"size"})
_SPARSE = "GNU.sparse"
_WITHOUT_CONTENT = {
    "hard link",
    "symbolic link",
    "character device",
    "block device",
    "directory",
    "named pipe",
}


class Readable(Protocol):
    """What is read: an open binary file, or anything with its ``read``."""

    def read(self, size: int, /) -> bytes:
        """Up to ``size`` bytes; none at the end."""


@dataclass(frozen=True, slots=True)
class Member:
    """One entry of an archive.

    Attributes:
        name: its name, as written.
        kind: ``"file"``, ``"directory"``, ``"symbolic link"``, ...
        start: where its content begins in the archive, in bytes.
        size: the length of its content in bytes.
        target: where a link points to; else empty.
    """

    name: str
    kind: str
    start: int
    size: int
    target: str = ""


def read_members(stream: Readable, shard: str, size: int | None = None) -> Iterator[tuple[Member, bytes]]:
    """The members of an archive and their contents, one after the other; one is in memory at a time.

    Args:
        stream: the archive from its first byte.
        shard: what errors call it.
        size: its length in bytes, if known; then a member that claims more than is there is found at once.

    Raises:
        DamagedShardError: the archive ends inside a member, or before the mark of its end.
        ShardError: a header cannot be read, or more follows after the end.
    """
    return _Reader(stream, shard, size).members()


class _Reader:
    def __init__(self, stream: Readable, shard: str, size: int | None) -> None:
        self.stream = stream
        self.shard = shard
        self.size = size
        self.at = 0

    def members(self) -> Iterator[tuple[Member, bytes]]:
        shared: dict[str, str] = {}
        own: dict[str, str] = {}
        while True:
            header = self._block()
            if header == _EMPTY:
                self._check_end()
                return
            flag, member = self._header(header)
            if flag in (b"x", b"g"):
                records = _records(self._metadata(member), Place(self.shard, member.name))
                (shared if flag == b"g" else own).update(records)
            elif flag in (b"L", b"K"):
                text = self._metadata(member).rstrip(b"\0").decode("utf-8", "surrogateescape")
                own["path" if flag == b"L" else "linkpath"] = text
            else:
                member = self._apply(member, {**shared, **own})
                own = {}
                content = self._content(member)
                yield member, content

    def _block(self) -> bytes:
        block = self._read(BLOCK)
        if not block:
            raise DamagedShardError(
                f"{Place(self.shard)}: it ends at byte {self.at} without the mark of its end (two blocks of "
                "zeros), so samples may be missing. Copy it again from where it came."
            )
        if len(block) < BLOCK:
            raise DamagedShardError(f"{Place(self.shard)}: it ends at byte {self.at}, inside of a header.")
        return block

    def _header(self, block: bytes) -> tuple[bytes, Member]:
        where = f"{Place(self.shard)}: the header at byte {self.at - BLOCK}"
        total = sum(block) - sum(block[148:156]) + 8 * 32
        if block[:2] == b"\x1f\x8b" or block[:4] == b"\x28\xb5\x2f\xfd":
            raise ShardError(
                f"{Place(self.shard)}: it is compressed, so that no place can be read. Unpack it."
            )
        if _number(block[148:156], where) not in (total, total - 256 * sum(byte > 127 for byte in block)):
            raise DamagedShardError(f"{where} has a wrong checksum: this is no tar archive, or is damaged.")
        name, target = _text(block[:100]), _text(block[157:257])
        if block[257:263] == b"ustar\0" and block[345]:
            name = f"{_text(block[345:500])}/{name}"
        flag = block[156:157]
        kind = _KINDS.get(flag, f"entry of unknown type {flag!r}")
        if flag == b"\0" and name.endswith("/"):
            kind = "directory"
        size = 0 if kind in _WITHOUT_CONTENT else _number(block[124:136], where)
        return flag, Member(name, kind, self.at, size, target)

    def _apply(self, member: Member, records: dict[str, str]) -> Member:
        if not records:
            return member
        kind = "sparse file" if _SPARSE in records else member.kind
        size, digits = member.size, records.get("size")
        if digits is not None and kind not in _WITHOUT_CONTENT:
            if not (digits.isascii() and digits.isdigit() and len(digits) < _MOST_DIGITS):
                raise ShardError(f"{Place(self.shard, member.name)}: a size of {digits[:_MOST_DIGITS]!r}.")
            size = int(digits)
        name = records.get("path", member.name)
        return Member(name, kind, self.at, size, records.get("linkpath", member.target))

    def _content(self, member: Member) -> bytes:
        padded = -(-member.size // BLOCK) * BLOCK
        where = Place(self.shard, member.name)
        if self.size is not None and self.at + member.size > self.size:
            raise DamagedShardError(
                f"{where}: it claims {member.size} bytes from byte {self.at} on, and the archive ends at "
                f"byte {self.size}."
            )
        content = self._read(padded)
        if len(content) < member.size:
            raise DamagedShardError(
                f"{where}: it claims {member.size} bytes, and the archive ends after {len(content)} of them."
            )
        return content[: member.size] if padded != member.size else content

    def _metadata(self, member: Member) -> bytes:
        if member.size > _MOST_METADATA:
            raise ShardError(
                f"{Place(self.shard, member.name)}: {member.size} bytes about the next member, more than "
                f"{_MOST_METADATA}."
            )
        return self._content(member)

    def _check_end(self) -> None:
        while piece := self._read(_PIECE):
            if piece.count(0) != len(piece):
                raise ShardError(
                    f"{Place(self.shard)}: more follows after its end, before byte {self.at}. Archives that "
                    "were joined must be written anew as one: packload shard."
                )

    def _read(self, size: int) -> bytes:
        """Up to ``size`` bytes, in pieces: a claim alone takes no memory."""
        piece = self.stream.read(min(size, _PIECE))
        self.at += len(piece)
        if len(piece) == size or not piece:
            return piece
        pieces, got = [piece], len(piece)
        while got < size:
            piece = self.stream.read(min(size - got, _PIECE))
            if not piece:
                break
            pieces.append(piece)
            got += len(piece)
            self.at += len(piece)
        return b"".join(pieces)


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _number(field: bytes, where: str) -> int:
    """An octal number, or one in base 256 whose first bit is set."""
    if field[0] & 0x80:
        value = int.from_bytes(field[1:], "big") + ((field[0] & 0x3F) << 8 * (len(field) - 1))
        if field[0] & 0x40:
            raise ShardError(f"{where} has a negative size.")
        return value
    digits = field.replace(b"\0", b" ").strip()
    if digits.strip(b"01234567"):
        raise DamagedShardError(f"{where} cannot be read: this is no tar archive, or is damaged.")
    return int(digits, 8) if digits else 0


def _records(block: bytes, where: Place) -> dict[str, str]:
    """Those records of a pax header that matter here: path, linkpath, size, and any of a sparse file.

    Each is ``length key=value newline``, the length that of the whole record.
    """
    records = {}
    at = 0
    while at < len(block):
        head, _, _ = block[at : at + 10].partition(b" ")
        length = int(head) if head.isdigit() and len(head) < 10 else 0
        key, equals, value = block[at + len(head) + 1 : at + length].partition(b"=")
        if not equals or not value.endswith(b"\n") or at + length > len(block):
            raise ShardError(f"{where}: its pax records cannot be read.")
        if key in _RECORDS:
            records[key.decode()] = value[:-1].decode("utf-8", "surrogateescape")
        elif key.startswith(b"GNU.sparse."):
            records[_SPARSE] = ""
        at += length
    return records


def header(name: str, size: int) -> bytes:
    """The header of a file: ustar where the name fits, else with pax records before it.

    It has no date and no owner, so that equal samples give equal archives.

    Raises:
        ShardError: no archive can hold the name.
    """
    if "\0" in name:
        raise ShardError(
            f"member {name!r}: a name ends where it has a NUL. Leave that out of keys and fields."
        )
    info = tarfile.TarInfo(name)
    info.size = size
    try:
        return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ShardError(f"member {name!r}: its name is not Unicode: {error}") from error


def padding(size: int) -> bytes:
    """What follows a content of ``size`` bytes, up to a whole block."""
    return bytes(-size % BLOCK)


def room(name: str, size: int) -> int:
    """The bytes that a file takes in an archive: its header, its content and what fills it up."""
    return len(header(name, size)) + size + -size % BLOCK


END = bytes(2 * BLOCK)
"""The mark of the end."""

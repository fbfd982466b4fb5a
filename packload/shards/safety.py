"""What a shard may ask for.

A shard comes from somewhere else. By default nothing in it is run, no name in it is used as a path, and
nothing is unpacked beyond a limit. What someone needs all the same is opened one by one, by an argument that
says what it allows.
"""

from __future__ import annotations

import gzip
import io
import re
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .errors import DamagedShardError, Place, ShardError, UnsafeShardError
from .tar import Member

PICKLES = frozenset({"pkl", "pickle", "pyd", "pth", "pt", "joblib", "dill"})
_COMMANDS = re.compile(r"^\s*pipe:", re.IGNORECASE)
_OUTSIDE = re.compile(r"^([/\\]|[A-Za-z]:)|(^|[/\\])\.\.([/\\]|$)")
_PIECE = 1 << 20
_HEADERS_KEPT = 4096
_MOST_ITEMS = 2**63 - 1


@dataclass(frozen=True)
class Safety:
    """What is allowed beyond plain data, and limits.

    Args:
        allow_pickle: decode ``.pkl``, ``.pickle``, ``.pyd``, ``.pth``, ``.pt``. Whoever wrote the shard
            can then run any code on this machine.
        allow_object_arrays: decode ``.npy`` and ``.npz`` with Python objects, which are pickles too.
        allow_pipe: take ``pipe:`` addresses: a shell runs the command, and its output, which is kept in
            memory, is the shard.
        allow_links: pass over symbolic links, hard links, devices and named pipes instead of refusing the
            shard. They are never followed.
        allow_outside_names: take names with ``..`` or from the root as keys. They are never used as paths.
        allow_duplicate_keys: take a key that returns later in a shard as one more sample.
        max_pixels: most pixels (height times width) of an image. Pillow has a limit of its own,
            ``PIL.Image.MAX_IMAGE_PIXELS``, which then has to be raised as well.
        max_unpacked_bytes: most bytes of what a compressed member (``.gz``, ``.npz``) holds.
        image_formats: the formats of Pillow that are tried. Some others call programs.
    """

    allow_pickle: bool = False
    allow_object_arrays: bool = False
    allow_pipe: bool = False
    allow_links: bool = False
    allow_outside_names: bool = False
    allow_duplicate_keys: bool = False
    max_pixels: int = 100_000_000
    max_unpacked_bytes: int = 1 << 30
    image_formats: tuple[str, ...] = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")


DEFAULT = Safety()


def is_command(url: str) -> bool:
    """Whether an address is a command, ``pipe:...``."""
    return _COMMANDS.match(url) is not None


def check_address(url: str, safety: Safety) -> None:
    """Refuse an address that is a command.

    Raises:
        UnsafeShardError: it begins with ``pipe:``.
    """
    if is_command(url) and not safety.allow_pipe:
        raise UnsafeShardError(
            f"{url!r} is a command for a shell, not a place. Give the place itself, or allow any such "
            "command to be run: Safety(allow_pipe=True)."
        )


def is_file(member: Member, shard: str, safety: Safety) -> bool:
    """Whether a member is a file; directories are not, and are harmless.

    Raises:
        UnsafeShardError: it is a link or a device, or its name leads outside.
    """
    where = Place(shard, member.name)
    if member.kind == "directory":
        return False
    if member.kind != "file":
        if safety.allow_links:
            return False
        to = f" to {member.target!r}" if member.target else ""
        raise UnsafeShardError(
            f"{where}: a {member.kind}{to}. Shards hold plain files: write it anew with the file itself, or "
            "pass over all such members: Safety(allow_links=True)."
        )
    if _OUTSIDE.search(member.name) and not safety.allow_outside_names:
        raise UnsafeShardError(
            f"{where}: its name leads outside of the archive. Rename it, or allow such names as keys (they "
            "are never used as paths): Safety(allow_outside_names=True)."
        )
    return True


def refuse_pickle(where: Place) -> UnsafeShardError:
    """The error about a member that is a pickle."""
    return UnsafeShardError(
        f"{where}: a pickle, and loading it can run any code its writer chose. Write the data as .npy, .json "
        "or .txt, leave the field out (fields=...), or allow it: Safety(allow_pickle=True)."
    )


def open_image(content: bytes, where: Place, safety: Safety) -> Image.Image:
    """An image of which only the header was read.

    Raises:
        UnsafeShardError: it has more pixels than allowed.
        ShardError: it is not an image of an allowed format.
    """
    try:
        image = Image.open(io.BytesIO(content), formats=safety.image_formats)
    except Image.DecompressionBombError as error:
        raise UnsafeShardError(
            f"{where}: {error} This limit is Pillow's own. To allow the image raise both: "
            "Safety(max_pixels=...) and PIL.Image.MAX_IMAGE_PIXELS."
        ) from None
    except Exception as error:  # damaged headers make Pillow raise nearly anything
        raise ShardError(
            f"{where}: not an image of an allowed format ({', '.join(safety.image_formats)}): {error}"
        ) from error
    width, height = image.size
    if width * height > safety.max_pixels:
        raise UnsafeShardError(
            f"{where}: an image of {width} x {height} = {width * height} pixels, more than "
            f"{safety.max_pixels}. Allow more: Safety(max_pixels={width * height})."
        )
    return image


def unzip(content: bytes, where: Place, safety: Safety) -> bytes:
    """What a ``.gz`` member holds.

    Raises:
        UnsafeShardError: it unpacks to more than allowed; no more than that is unpacked.
        DamagedShardError: it cannot be unpacked, or is cut off.
    """
    parts, total = [], 0
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            while piece := file.read(min(_PIECE, safety.max_unpacked_bytes + 1 - total)):
                parts.append(piece)
                total += len(piece)
                if total > safety.max_unpacked_bytes:
                    raise _bomb(where, safety)
    except EOFError:
        raise DamagedShardError(f"{where}: it is cut off: the end of the gzip stream is missing.") from None
    except (OSError, zlib.error) as error:
        raise DamagedShardError(f"{where}: cannot be unpacked: {error}") from error
    return b"".join(parts)


def _bomb(where: Place, safety: Safety) -> UnsafeShardError:
    return UnsafeShardError(
        f"{where}: it unpacks to more than {safety.max_unpacked_bytes} bytes. Allow more: "
        "Safety(max_unpacked_bytes=...)."
    )


@dataclass(frozen=True)
class ArrayHeader:
    """What the header of an ``.npy`` file says: type, shape, order of storage, and where the data begin."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    start: int


_headers: dict[bytes, ArrayHeader] = {}


def array_header(content: bytes, where: Place, safety: Safety) -> ArrayHeader:
    """Read the header of an ``.npy`` file; equal headers are read once.

    Raises:
        UnsafeShardError: it holds Python objects.
        DamagedShardError: there are fewer bytes than its shape says.
        ShardError: it is no such file.
    """
    begin = 10 if content[6:7] == b"\x01" else 12
    length = int.from_bytes(content[8:begin], "little")
    head = bytes(content[: begin + length])
    found = _headers.get(head)
    if found is None:
        found = _read_array_header(head, where)
        if len(_headers) >= _HEADERS_KEPT:
            _headers.clear()
        _headers[head] = found
    if found.dtype.hasobject:
        if not safety.allow_object_arrays:
            raise UnsafeShardError(
                f"{where}: an array of Python objects, which is a pickle: loading it can run any code. Write "
                "numbers, or allow it: Safety(allow_object_arrays=True)."
            )
        return found
    expected = found.start + prod(found.shape) * found.dtype.itemsize
    if len(content) < expected:
        raise DamagedShardError(
            f"{where}: an array of shape {found.shape} and type {found.dtype} takes {expected} bytes, and "
            f"{len(content)} are there."
        )
    return found


def _read_array_header(head: bytes, where: Place) -> ArrayHeader:
    stream = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(stream)
        read = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, fortran, dtype = read(stream)
    except Exception as error:  # it is a Python literal: besides ValueError, what parsing one can raise
        raise ShardError(f"{where}: not an .npy file: {error}") from error
    if not all(0 <= size <= _MOST_ITEMS for size in shape) or not (dtype.itemsize or dtype.hasobject):
        raise ShardError(f"{where}: not an .npy file: shape {shape}, items of {dtype.itemsize} bytes")
    return ArrayHeader(dtype, tuple(map(int, shape)), bool(fortran), stream.tell())


def load_array(content: bytes, where: Place, safety: Safety) -> NDArray[Any]:
    """The array of an ``.npy`` file, its own copy.

    Raises:
        ShardError: as :func:`array_header`.
    """
    info = array_header(content, where, safety)
    if info.dtype.hasobject:
        loaded: NDArray[Any] = np.load(io.BytesIO(content), allow_pickle=True)
        return loaded
    count = prod(info.shape)
    flat = np.frombuffer(content, info.dtype, count, info.start).copy()
    try:
        return flat.reshape(info.shape[::-1]).T if info.fortran else flat.reshape(info.shape)
    except ValueError as error:
        raise ShardError(f"{where}: an array of shape {info.shape}: {error}") from error


def load_arrays(content: bytes, where: Place, safety: Safety) -> dict[str, NDArray[Any]]:
    """The arrays of an ``.npz`` file by name.

    Raises:
        UnsafeShardError: it unpacks to more than allowed, or holds Python objects.
        ShardError: it is no such file, or damaged.
    """
    arrays = {}
    for name, part in _zipped(content, where, safety):
        inside = name if where.member is None else f"{where.member}, {name}"
        arrays[name.removesuffix(".npy")] = load_array(part, Place(where.shard, inside), safety)
    return arrays


def _zipped(content: bytes, where: Place, safety: Safety) -> Iterator[tuple[str, bytes]]:
    """The files of a zip archive. No more is unpacked than it says; methods that cannot stop are refused."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as file:
            if sum(info.file_size for info in file.infolist()) > safety.max_unpacked_bytes:
                raise _bomb(where, safety)
            for info in file.infolist():
                if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise UnsafeShardError(
                        f"{where}: {info.filename!r} is compressed by method {info.compress_type}; numpy "
                        "writes stored and deflated arrays only. Write it anew with numpy.savez_compressed."
                    )
                with file.open(info) as part:
                    yield info.filename, part.read(info.file_size)
    except ShardError:
        raise
    except Exception as error:  # damaged directories make zipfile raise nearly anything
        raise DamagedShardError(f"{where}: not a whole .npz file: {error}") from error

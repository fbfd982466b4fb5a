"""What a member is, by the end of its name; and how its sizes are known without decoding it.

A member's name is its sample's key up to the first dot of the last part of the path, and its *field* after
it, in lower case: ``train/0017.seg.png`` is field ``seg.png`` of sample ``train/0017``. The last part of the
field says what it is. This is WebDataset's rule.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from .errors import Place, ShardError
from .safety import PICKLES, Safety, array_header, open_image, unzip

TEXT = frozenset({"txt", "text", "transcript", "md", "html"})
NUMBER = frozenset({"cls", "cls2", "index", "inx", "id", "count"})
JSON = frozenset({"json", "jsn"})
IMAGE = frozenset({"jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm", "pbm", "pnm"})
ARRAY = frozenset({"npy"})
ARRAYS = frozenset({"npz"})
PICKLE = PICKLES

Measure = Callable[[bytes], "int | Mapping[str, int]"]
"""A function of a member's bytes: its length, or lengths by name."""

_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$", re.DOTALL)


def split_name(name: str) -> tuple[str, str] | None:
    """The key and the field of a member's name; None if it has none, or is about the archive (``__x__``)."""
    if name.startswith("__") and re.match(r"__[^/]*__($|/)", name):
        return None
    match = _NAME.match(name)
    return (match[1], match[2].lower()) if match and match[2] else None


def kind(field: str) -> str:
    """The last part of a field's name, without ``.gz``: what says how it is decoded."""
    return field.removesuffix(".gz").rpartition(".")[2]


def measure(field: str, content: bytes, where: Place, safety: Safety) -> dict[str, int]:
    """The sizes of a member by the names of their columns.

    ============  =========================================================================
    text          ``txt.chars``, ``txt.words`` (divided by white space)
    image         ``jpg.h``, ``jpg.w``, from the header
    array         ``npy.0``, ``npy.1``, ...: its shape, from the header
    JSON          ``json.length`` of a list or a string; of a dict ``json.NAME``, for every
                  list (its entries) and string (its characters) in it, but for the name
                  ``bytes``: ``json.bytes`` is the size of the member
    anything else none
    ============  =========================================================================

    Args:
        field: the member's field.
        content: its bytes.
        where: shard and member, for errors.
        safety: limits.

    Raises:
        ShardError: it is not what its name says, or asks for what is refused.
    """
    read = _READ.get(kind(field))
    if read is None:
        return {}
    if field.endswith(".gz"):
        content = unzip(content, where, safety)
    sizes = read(content, where, safety)
    return {f"{field}.{name}": size for name, size in sizes.items() if name != "bytes"}


def read_text(content: bytes, where: Place) -> str:
    """UTF-8 text.

    Raises:
        ShardError: it is not UTF-8.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ShardError(
            f"{where}: not UTF-8 text: {error}. Give a function for it: decode={{...}}."
        ) from None


def read_json(content: bytes, where: Place) -> Any:
    """What JSON text says.

    Raises:
        ShardError: it is not JSON.
    """
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ShardError(f"{where}: not JSON: {error}") from None


def _text(content: bytes, where: Place, safety: Safety) -> dict[str, int]:
    text = read_text(content, where)
    return {"chars": len(text), "words": len(text.split())}


def _json(content: bytes, where: Place, safety: Safety) -> dict[str, int]:
    value = read_json(content, where)
    if isinstance(value, dict):
        return {name: len(part) for name, part in value.items() if isinstance(part, (list, str))}
    return {"length": len(value)} if isinstance(value, (list, str)) else {}


def _image(content: bytes, where: Place, safety: Safety) -> dict[str, int]:
    width, height = open_image(content, where, safety).size
    return {"h": height, "w": width}


def _array(content: bytes, where: Place, safety: Safety) -> dict[str, int]:
    return {str(d): size for d, size in enumerate(array_header(content, where, safety).shape)}


_READ: dict[str, Callable[[bytes, Place, Safety], dict[str, int]]] = {
    **dict.fromkeys(TEXT, _text),
    **dict.fromkeys(JSON, _json),
    **dict.fromkeys(IMAGE, _image),
    **dict.fromkeys(ARRAY, _array),
}

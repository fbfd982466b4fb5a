"""The bytes of members to values, by the end of the field's name.

==============================  =====================================================================
``txt``, ``text``, ...          str
``cls``, ``id``, ``index``      int
``json``                        what JSON says: dicts, lists, numbers, strings
``npy``; ``npz``                array; dict of arrays
``jpg``, ``png``, ``webp``, ... uint8 array [3, h, w], stored channels last as it is packed
``pkl``, ``pyd``, ``pth``, ...  refused, unless :class:`~packload.shards.safety.Safety` allows it
anything else                   bytes
==============================  =====================================================================

``.gz`` behind any of these is unpacked first.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .errors import Place, ShardError
from .kinds import ARRAY, ARRAYS, IMAGE, JSON, NUMBER, PICKLE, TEXT, kind, read_json, read_text
from .safety import Safety, load_array, load_arrays, open_image, refuse_pickle, unzip

Decoder = Callable[[bytes], Any]
_TORCH = frozenset({"pth", "pt"})


class Decode:
    """Decodes members.

    Args:
        own: functions of a member's bytes, by field (``seg.png``) or by the end of it (``png``); None leaves
            the bytes as they are. By the end they are given what ``.gz`` holds.
        safety: what is allowed.
    """

    def __init__(self, own: Mapping[str, Decoder | None] | None, safety: Safety) -> None:
        self.own = dict(own or {})
        self.safety = safety
        self._known: dict[str, Callable[[bytes, Place], Any]] = {}
        self._rules: tuple[tuple[Collection[str], Callable[[bytes, Place], Any]], ...] = (
            (TEXT, read_text),
            (NUMBER, _number),
            (JSON, read_json),
            (IMAGE, lambda content, where: read_image(content, where, safety)),
            (ARRAY, lambda content, where: load_array(content, where, safety)),
            (ARRAYS, lambda content, where: load_arrays(content, where, safety)),
            (_TORCH, self._load_torch),
            (PICKLE, self._unpickle),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.own, self.safety)

    def __call__(self, field: str, content: bytes, where: Place) -> Any:
        """The value of a member.

        Args:
            field: the name of its field.
            content: its bytes.
            where: shard and member, for errors.

        Raises:
            UnsafeShardError: it is what is refused.
            ShardError: it cannot be decoded.
        """
        decode = self._known.get(field)
        if decode is None:
            decode = self._known[field] = self._choose(field)
        return decode(content, where)

    def _choose(self, field: str) -> Callable[[bytes, Place], Any]:
        if field in self.own:
            return partial(self._by_own, self.own[field])
        end = kind(field)
        if end in self.own:
            decode: Callable[[bytes, Place], Any] = partial(self._by_own, self.own[end])
        else:
            decode = next((made for ends, made in self._rules if end in ends), _as_it_is)
        if not field.endswith(".gz"):
            return decode
        return lambda content, where: decode(unzip(content, where, self.safety), where)

    def _by_own(self, decoder: Decoder | None, content: bytes, where: Place) -> Any:
        if decoder is None:
            return content
        try:
            return decoder(content)
        except ShardError:
            raise
        except Exception as error:
            name = getattr(decoder, "__name__", repr(decoder))
            raise ShardError(f"{where}: {name} raised {type(error).__name__}: {error}") from error

    def _unpickle(self, content: bytes, where: Place) -> Any:
        if not self.safety.allow_pickle:
            raise refuse_pickle(where)
        return self._by_own(pickle.loads, content, where)

    def _load_torch(self, content: bytes, where: Place) -> Any:
        if not self.safety.allow_pickle:
            raise refuse_pickle(where)
        return self._by_own(_load_torch, content, where)


def _load_torch(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)


def _as_it_is(content: bytes, where: Place) -> bytes:
    return content


def _number(content: bytes, where: Place) -> int:
    try:
        return int(content)
    except ValueError:
        raise ShardError(f"{where}: {content[:40]!r} is not an integer") from None


def read_image(content: bytes, where: Place, safety: Safety) -> NDArray[np.uint8]:
    """An image as uint8 [3, h, w], red, green and blue; stored channels last.

    Raises:
        UnsafeShardError: it has more pixels than allowed.
        ShardError: it cannot be decoded, or is cut off.
    """
    image = open_image(content, where, safety)
    if image.mode.startswith(("I", "F")):
        raise ShardError(
            f"{where}: an image of mode {image.mode!r}, whose values 8 bits cannot hold. Give a function of "
            "its bytes: decode={...}."
        )
    try:
        pixels = np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
    except Exception as error:  # damaged contents make Pillow raise nearly anything
        raise ShardError(f"{where}: the image cannot be decoded: {error}") from error
    return pixels.transpose(2, 0, 1)

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
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .errors import Place, ShardError, UnsafeShardError
from .kinds import IMAGE, JSON, NUMBER, PICKLE, TEXT, kind, read_json, read_text
from .safety import Safety, load_array, load_arrays, open_image, refuse_pickle, unzip

Decoder = Callable[[bytes], Any]
_TORCH = frozenset({"pth", "pt"})


class Decode:
    """Decodes members.

    Args:
        own: functions of a member's bytes, by field (``seg.png``) or by the end of it (``png``); None leaves
            the bytes as they are.
        safety: what is allowed.
    """

    def __init__(self, own: Mapping[str, Decoder | None] | None, safety: Safety) -> None:
        self.own = dict(own or {})
        self.safety = safety

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
        end = kind(field)
        if self.own:
            for name in (field, end):
                if name in self.own:
                    return self._by_own(self.own[name], content, where)
        if field.endswith(".gz"):
            content = unzip(content, where, self.safety)
        if end in TEXT:
            return read_text(content, where)
        if end in NUMBER:
            try:
                return int(content)
            except ValueError:
                raise ShardError(f"{where}: {content[:40]!r} is not an integer") from None
        if end in JSON:
            return read_json(content, where)
        if end in IMAGE:
            return read_image(content, where, self.safety)
        if end == "npy":
            return load_array(content, where, self.safety)
        if end == "npz":
            return load_arrays(content, where, self.safety)
        return self._unpickle(end, content, where) if end in PICKLE else content

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

    def _unpickle(self, end: str, content: bytes, where: Place) -> Any:
        if not self.safety.allow_pickle:
            raise refuse_pickle(where)
        if end in _TORCH:
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)
        return pickle.loads(content)


def read_image(content: bytes, where: Place, safety: Safety) -> NDArray[np.uint8]:
    """An image as uint8 [3, h, w], red, green and blue; stored channels last.

    Raises:
        UnsafeShardError: it has more pixels than allowed.
        ShardError: it cannot be decoded, or is cut off.
    """
    image = open_image(content, where, safety)
    try:
        pixels = np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
    except UnsafeShardError:
        raise
    except (OSError, SyntaxError, ValueError, MemoryError) as error:
        raise ShardError(f"{where}: the image cannot be decoded: {error}") from error
    return pixels.transpose(2, 0, 1)

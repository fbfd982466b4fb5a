"""Values to the bytes of a member, by the end of the field's name."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from .errors import ShardError
from .kinds import ARRAY, IMAGE, JSON, NUMBER, TEXT, kind

_FORMATS = {"jpg": "JPEG", "tif": "TIFF", "pgm": "PPM", "pbm": "PPM", "pnm": "PPM"}
_QUALITY: dict[str, dict[str, Any]] = {
    "JPEG": {"quality": 95, "subsampling": 0},
    "WEBP": {"lossless": True},
}


def encode(field: str, value: Any, key: str) -> bytes:
    """The bytes of one member.

    Bytes are written as they are, whatever the field. Else text takes strings, ``cls`` and the like integers,
    ``json`` what JSON can say, ``npy`` arrays, tensors and lists of numbers, ``npz`` a dict of these, and
    the fields of images a PIL image or a uint8 array or tensor [h, w], [C, h, w]. JPEG is written with
    quality 95 and full colour; for other settings give bytes.

    Raises:
        ShardError: the field does not take such a value; sample and field are named.
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    try:
        return _encode(kind(field), value)
    except (TypeError, ValueError, OSError, KeyError) as error:
        raise ShardError(
            f"sample {key!r}, field {field!r}: {type(value).__name__} cannot be written so: {error}. Give "
            "its bytes, or name the field after what it holds (.txt, .cls, .json, .npy, .npz, .jpg, .png)."
        ) from error


def _encode(end: str, value: Any) -> bytes:
    if end in TEXT and isinstance(value, str):
        return value.encode()
    if end in NUMBER:
        number = int(value)
        if not isinstance(value, str) and number != value:
            raise ValueError(f"{value!r} is not an integer")
        return str(number).encode()
    if end in JSON:
        return json.dumps(value, ensure_ascii=False).encode()
    if end in ARRAY or end == "npz":
        file = io.BytesIO()
        if end == "npz":
            np.savez(file, allow_pickle=False, **{name: _array(part) for name, part in value.items()})
        else:
            np.save(file, _array(value), allow_pickle=False)
        return file.getvalue()
    if end in IMAGE:
        return _image(end, value)
    raise TypeError("no rule for this field and type")


def _array(value: Any) -> np.ndarray[Any, Any]:
    array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    if array.dtype.hasobject:
        raise TypeError("an array of Python objects would be a pickle")
    return array


def _image(end: str, value: Any) -> bytes:
    if not isinstance(value, Image.Image):
        array = _array(value)
        if array.dtype != np.uint8 or array.ndim not in (2, 3):
            raise TypeError(
                f"{array.dtype} of {array.ndim} dims is not an image; uint8 [C, h, w] or [h, w] is"
            )
        if array.ndim == 3:
            array = array[0] if array.shape[0] == 1 else array.transpose(1, 2, 0)
        value = Image.fromarray(np.ascontiguousarray(array))
    file = io.BytesIO()
    name = _FORMATS.get(end, end.upper())
    value.save(file, name, **_QUALITY.get(name, {}))
    return file.getvalue()


def encode_sample(sample: Mapping[str, Any], key: str) -> dict[str, bytes]:
    """The members of a sample by field; names that begin with ``__`` are about the sample and left out.

    Raises:
        ShardError: the sample has no field, a field's name cannot be one, or does not take its value.
    """
    if not key or "." in key.rpartition("/")[2] or key.startswith("__"):
        raise ShardError(
            f"sample key {key!r}: the last part of a key is not empty, has no dot (what follows is the "
            "field) and a key does not begin with two underscores."
        )
    members = {}
    for name, value in sample.items():
        if not isinstance(name, str) or not name or "/" in name or name != name.lower() or name[0] == ".":
            raise ShardError(
                f"sample {key!r}, field {name!r}: a field is a lower-case ending of a file name, as 'jpg' or "
                "'seg.png'."
            )
        if not name.startswith("__"):
            members[name] = encode(name, value, key)
    if not members:
        raise ShardError(f"sample {key!r} has no field to write: {list(sample)}.")
    return members

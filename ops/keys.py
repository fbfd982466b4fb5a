"""Keys of indexing in one form: no Ellipsis, and Python's integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

ALL = slice(None)


def expand_ellipsis(keys: tuple[Any, ...], ndim: int) -> list[Any]:
    """Keys for each of ``ndim`` dims; raises IndexError where there are more."""
    used = sum(1 for k in keys if k is not None and k is not Ellipsis)
    if used > ndim:
        raise IndexError(f"too many indices: {used} for a packed tensor of {ndim} dims")
    place = [i for i, k in enumerate(keys) if k is Ellipsis]
    if not place:
        return list(keys)
    return [*keys[: place[0]], *[slice(None)] * (ndim - used), *keys[place[0] + 1 :]]


def plain(key: Any) -> Any:
    """Integers of numpy and of tensors as Python's."""
    if isinstance(key, slice):
        bounds = (key.start, key.stop, key.step)
        return slice(*[int(b) if isinstance(b, np.integer) else b for b in bounds])
    if isinstance(key, (bool, np.bool_)) or (
        isinstance(key, Tensor) and key.dim() == 0 and key.dtype == torch.bool
    ):
        raise NotImplementedError("a packed tensor is not indexed by one truth value")
    if is_list(key) and _depth(key) > 1:
        raise NotImplementedError("a packed tensor is indexed by lists and tensors of one dim")
    scalar = isinstance(key, Tensor) and key.dim() == 0
    return int(key) if scalar or isinstance(key, np.integer) else key


def is_all(key: Any) -> bool:
    """Whether a key is ``:``."""
    return isinstance(key, slice) and key == ALL


def is_list(key: Any) -> bool:
    """Whether a key names several positions."""
    return isinstance(key, (list, tuple, range, np.ndarray)) or (isinstance(key, Tensor) and key.dim() > 0)


def _depth(key: Any) -> int:
    if isinstance(key, (Tensor, np.ndarray)):
        return key.ndim
    return 2 if any(is_list(k) for k in key) else 1

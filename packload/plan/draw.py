"""Counter-based randomness: what is drawn depends on its key alone, never on what was drawn before.

Raw bits of Philox, whose stream numpy keeps from version to version (it does not for ``shuffle`` and its
like), keyed by (seed, epoch) and counted from (purpose, cursor). A permutation is the order of such bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

EPOCH, STEPS, RANKS, LAST = range(4)
"""Purposes: the epoch's order, the order of a window's steps, of the ranks in a step, of what is dropped."""

_MASK = 2**64 - 1


def bits(count: int, seed: int, epoch: int, purpose: int, cursor: int = 0) -> NDArray[np.uint64]:
    """``count`` random 64-bit numbers."""
    key = np.array([seed & _MASK, epoch & _MASK], dtype=np.uint64)
    counter = np.array([0, 0, cursor, purpose], dtype=np.uint64)
    return np.random.Philox(counter=counter, key=key).random_raw(count)


def permutation(count: int, seed: int, epoch: int, purpose: int, cursor: int = 0) -> NDArray[Any]:
    """A random permutation of ``range(count)``: int32 if that holds it, else int64."""
    order = np.argsort(bits(count, seed, epoch, purpose, cursor), kind="stable")
    return order.astype(np.int32) if count < 2**31 else order

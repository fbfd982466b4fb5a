"""The order of an epoch: shards at random, and samples at random among those of a few shards.

A plan takes the samples of an epoch from the front of its order. If the order were any permutation, every
batch would touch all shards, which remote shards and a bounded cache cannot serve. Here the shards of an
epoch are put in random order and divided into windows of a few; within a window all samples are mixed. With
as many shards in a window as there are, it is an ordinary permutation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..plan import draw

Array = NDArray[Any]
SHARDS = 101
"""The purpose that shards are drawn for; see :mod:`packload.plan.draw`."""


def windowed_order(shard_of: Array, window: int, seed: int, epoch: int) -> Array:
    """A permutation of units that mixes the units of ``window`` shards at a time.

    It is keyed by its arguments alone.

    Args:
        shard_of: [U] the shard of each unit.
        window: shards that are mixed.
        seed, epoch: what the randomness is keyed by.

    Returns:
        [U] the units in order: int32 if that holds them, else int64.
    """
    count = len(shard_of)
    shards = int(shard_of.max()) + 1 if count else 0
    place = np.empty(shards, np.int64)
    place[draw.permutation(shards, seed, epoch, SHARDS)] = np.arange(shards)
    group = (place // window)[shard_of]
    order = np.lexsort((draw.bits(count, seed, epoch, draw.EPOCH), group))
    return order.astype(np.int32) if count < 2**31 else order

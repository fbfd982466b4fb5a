"""Batches of samples of about one length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .policy import Array, Policy, batches, consecutive
from .units import Units
from .window import Bins


@dataclass(frozen=True)
class Bucket(Policy):
    """Buckets of length, shuffled inside and across.

    The units of a window are put in the order of their buckets, random inside each, and cut to batches. A
    batch is of one bucket, or of two where their border is in it.

    Attributes:
        batch_size: units of a batch.
        borders: the largest cost in each bucket but the last.
    """

    batch_size: int
    borders: tuple[float, ...]
    padded: bool = False
    name = "bucket"

    def cut(self, units: Units, rest: Array, ranks: int, drop_last: bool) -> Bins:
        """See :class:`Policy`."""
        window, taken = batches(rest, self.batch_size, ranks, drop_last)
        bucket = np.searchsorted(np.array(self.borders), units.loads[window], side="left")
        window = window[np.argsort(bucket, kind="stable")]
        return Bins(window, consecutive(len(window), self.batch_size, ranks), taken)

    def identity(self) -> dict[str, Any]:
        """See :class:`Policy`."""
        borders = list(self.borders)
        return {"name": self.name, "batch_size": self.batch_size, "borders": borders, "padded": self.padded}


def make_borders(loads: Array, buckets: int | Sequence[float]) -> tuple[float, ...]:
    """The largest cost in each bucket but the last.

    Args:
        loads: the costs of all units.
        buckets: a number of buckets, alike in size; or the borders themselves.

    Raises:
        ValueError: no bucket, or borders that do not grow.
    """
    if isinstance(buckets, (int, np.integer)) and not isinstance(buckets, bool):
        if buckets < 1:
            raise ValueError(f"buckets must be a number above 0, or their borders; got {buckets}.")
        if not len(loads):
            return ()
        ordered = np.sort(loads)
        at = np.arange(1, int(buckets)) * len(ordered) // int(buckets)
        return tuple(np.unique(ordered[at]).tolist())
    borders = np.asarray(buckets)
    if borders.ndim != 1 or borders.dtype.kind not in "iuf" or not (np.diff(borders) > 0).all():
        raise ValueError(f"borders of buckets must be numbers that grow; got {buckets!r}.")
    return tuple(borders.tolist())

"""Batches of samples of about one length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .policy import Array, Policy, batches, consecutive
from .units import Units
from .window import Bins


@dataclass(frozen=True)
class Bucket(Policy):
    """Buckets of length, shuffled inside and across.

    A window's units are put in order of their bucket, random inside it, and cut to batches: a batch is of one
    bucket, but for those on a border.
    """

    batch_size: int
    borders: tuple[float, ...]
    padded: bool = False
    name = "bucket"

    def cut(self, units: Units, rest: Array, ranks: int, drop_last: bool) -> Bins:
        window, taken = batches(rest, self.batch_size, ranks, drop_last)
        bucket = np.searchsorted(np.array(self.borders), units.loads[window], side="left")
        window = window[np.argsort(bucket, kind="stable")]
        return Bins(window, consecutive(len(window), self.batch_size), taken)

    def identity(self) -> dict[str, Any]:
        borders = list(self.borders)
        return {"name": self.name, "batch_size": self.batch_size, "borders": borders, "padded": self.padded}


def borders_of(loads: Array, buckets: int | Any) -> tuple[float, ...]:
    """The upper borders of all buckets but the last: as given, or quantiles, so that buckets are alike in size.

    Raises:
        ValueError: no bucket, or borders that do not grow.
    """
    if isinstance(buckets, (int, np.integer)) and not isinstance(buckets, bool):
        if buckets < 1:
            raise ValueError(f"buckets must be a number above 0 or their upper borders; got {buckets}.")
        if not len(loads):
            return ()
        ordered = np.sort(loads)
        at = np.arange(1, int(buckets)) * len(ordered) // int(buckets)
        return tuple(np.unique(ordered[at]).tolist())
    borders = np.asarray(buckets)
    if borders.ndim != 1 or borders.dtype.kind not in "iuf" or (np.diff(borders) <= 0).any():
        raise ValueError(f"borders of buckets must be numbers that grow; got {buckets!r}.")
    return tuple(borders.tolist())

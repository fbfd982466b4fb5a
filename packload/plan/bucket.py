"""Batches of samples of about one length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .policy import Array, Policy, batches, consecutive
from .units import Units
from .window import Bins

_GRID = 1024
"""Quantiles from which the density of costs is estimated."""


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
        buckets: a number of buckets, to be laid where they leave least to pad; or the borders themselves.

    Raises:
        ValueError: no bucket, or borders that do not grow.
    """
    if isinstance(buckets, (int, np.integer)) and not isinstance(buckets, bool):
        if buckets < 1:
            raise ValueError(f"buckets must be a number above 0, or their borders; got {buckets}.")
        return _lay(loads, int(buckets))
    borders = np.asarray(buckets)
    numbers = borders.ndim == 1 and borders.dtype.kind in "iuf" and not np.isnan(borders).any()
    if not numbers or not (np.diff(borders) > 0).all():
        raise ValueError(f"borders of buckets must be numbers that grow; got {buckets!r}.")
    return tuple(borders.tolist())


def _lay(loads: Array, buckets: int) -> tuple[float, ...]:
    """Borders as dense as the square root of the density of costs.

    A bucket of width w in which costs have density f is padded by f * w * w / 2. Of all widths that make one
    number of buckets, the sum of that is least where w is in proportion to 1 / sqrt(f).
    """
    if not len(loads):
        return ()
    at = np.arange(_GRID + 1) * (len(loads) - 1) // _GRID
    quantiles = np.sort(loads)[at]
    dense = np.append(0.0, np.cumsum(np.sqrt(np.diff(quantiles).astype(np.float64))))
    borders = np.searchsorted(dense, np.arange(1, buckets) * (dense[-1] / buckets))
    return tuple(np.unique(quantiles[borders]).tolist())

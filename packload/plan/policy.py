"""What a policy is: the algorithm that makes bins, apart from the planner that drives it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .units import Units
from .window import Bins

Array = NDArray[Any]

STEPS = 256
"""Bins a rank that a window is measured off for. An epoch's last window has up to twice as many, or few."""


class Policy(ABC):
    """Makes bins of the front of an epoch's order.

    Attributes:
        name: what the policy is called in states and reports.
        shuffles: whether the epoch's order is random, else it is that of the data set.
        deals: whether bins are dealt to ranks by cost, else they stay in order.
        padded: whether a bin costs what its padded batch costs.
    """

    name: ClassVar[str]
    shuffles: ClassVar[bool] = True
    deals: ClassVar[bool] = True
    padded: bool

    @abstractmethod
    def cut(self, units: Units, rest: Array, ranks: int, drop_last: bool) -> Bins:
        """Take a window's worth of units from the front of ``rest`` and put them into bins.

        A pure function. It takes all that is left if that is less than two windows, so that an epoch's last
        window is no stump. Else it makes a multiple of ``ranks`` bins, or takes such a number of units, so
        that bins can be halved to one.

        Args:
            units: all units.
            rest: the units that are left in the epoch, in its order; at least one.
            ranks: world size.
            drop_last: whether to leave out what makes no whole batch.
        """

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What of the policy decides its plans: a small JSON-able dict, part of every state."""


def batches(rest: Array, size: int, ranks: int, drop_last: bool) -> tuple[Array, int]:
    """What a policy of equal batches takes: the units that it puts into bins, and how many it uses up."""
    window = STEPS * size * ranks
    if len(rest) >= 2 * window:
        return rest[:window], window
    kept = len(rest) // (size * ranks) * size * ranks if drop_last else len(rest)
    return rest[:kept], len(rest)


def consecutive(count: int, size: int, ranks: int) -> Array:
    """Splits [bins + 1] of units, ``size`` to a bin; those of the last step share what is left."""
    step = size * ranks
    whole = max(count - 1, 0) // step * step
    left = count - whole
    if 0 < left < ranks:
        return np.append(np.arange(0, count, size, dtype=np.int64), np.int64(count))
    last = whole + left * np.arange(1, ranks + 1, dtype=np.int64) // ranks
    return np.concatenate([np.arange(0, whole + 1, size, dtype=np.int64), last[: ranks * (left > 0)]])


def check_batch_size(batch_size: Any) -> int:
    """A batch size as an int.

    Raises:
        ValueError: it is no integer above 0.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, (int, np.integer)) or batch_size < 1:
        raise ValueError(f"batch_size must be an integer above 0; got {batch_size!r}.")
    return int(batch_size)

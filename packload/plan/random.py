"""Random batches of one size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .policy import Array, Policy, batches, consecutive
from .units import Units
from .window import Bins


@dataclass(frozen=True)
class Random(Policy):
    """Every ``batch_size`` neighbours of the epoch's random order are a batch."""

    batch_size: int
    padded: bool = False
    name = "random"

    def cut(self, units: Units, rest: Array, ranks: int, drop_last: bool) -> Bins:
        """See :class:`Policy`."""
        window, taken = batches(rest, self.batch_size, ranks, drop_last)
        return Bins(window, consecutive(len(window), self.batch_size, ranks), taken)

    def identity(self) -> dict[str, Any]:
        """See :class:`Policy`."""
        return {"name": self.name, "batch_size": self.batch_size, "padded": self.padded}

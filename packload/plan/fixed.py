"""Batches in the data set's order, the same in every epoch: for evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .policy import Array, Policy, batches, consecutive
from .units import Units
from .window import Bins


@dataclass(frozen=True)
class Fixed(Policy):
    """Every ``batch_size`` neighbours are a batch, batch ``step * ranks + rank`` of them all."""

    batch_size: int
    padded: bool = False
    name = "fixed"
    shuffles = False
    deals = False

    def cut(self, units: Units, rest: Array, ranks: int, drop_last: bool) -> Bins:
        """See :class:`Policy`."""
        window, taken = batches(rest, self.batch_size, ranks, drop_last)
        return Bins(window, consecutive(len(window), self.batch_size, ranks), taken)

    def identity(self) -> dict[str, Any]:
        """See :class:`Policy`."""
        return {"name": self.name, "batch_size": self.batch_size, "padded": self.padded}

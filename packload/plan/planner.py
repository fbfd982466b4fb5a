"""The planner: windows of an epoch, each a pure function of where it begins."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import draw
from .policy import Policy
from .units import Units
from .window import Window, deal, even

Array = NDArray[Any]

KEEP = 2**24
"""Units of windows that are kept, so that what was planned to count steps need not be planned again."""


@dataclass(eq=False)
class Planner:
    """Windows of plans.

    A window depends on the units, the policy, the seed, the epoch, where it begins in the epoch's order, and
    the world size; on nothing that was planned before.

    Attributes:
        units: what is dealt out.
        policy: how.
        seed: any integer.
        drop_last: whether an epoch's end that makes no whole step is dropped.
    """

    units: Units
    policy: Policy
    seed: int = 0
    drop_last: bool = False
    _orders: dict[int, Array] = field(default_factory=dict, repr=False)
    _windows: OrderedDict[tuple[int, int, int], Window] = field(default_factory=OrderedDict, repr=False)

    def order(self, epoch: int) -> Array:
        """[count]: the order of all units in an epoch."""
        if epoch not in self._orders:
            count = self.units.count
            dtype = np.int32 if count < 2**31 else np.int64
            shuffles = self.policy.shuffles
            order = (
                draw.permutation(count, self.seed, epoch, draw.EPOCH)
                if shuffles
                else np.arange(count, dtype=dtype)
            )
            self._orders = {epoch: order}
        return self._orders[epoch]

    def window(self, epoch: int, cursor: int, ranks: int) -> Window:
        """The window that begins at a cursor of an epoch's order.

        Args:
            epoch: the epoch.
            cursor: units that came before, in [0, count).
            ranks: world size.
        """
        key = (epoch, cursor, ranks)
        if key in self._windows:
            self._windows.move_to_end(key)
            return self._windows[key]
        window = self._plan(epoch, cursor, ranks)
        self._windows[key] = window
        while len(self._windows) > 1 and sum(len(w.units) for w in self._windows.values()) > KEEP:
            self._windows.popitem(last=False)
        return window

    def _plan(self, epoch: int, cursor: int, ranks: int) -> Window:
        policy, table = self.policy, self.units
        rest = self.order(epoch)[cursor:]
        bins = policy.cut(table, rest, ranks, self.drop_last)
        bins = even(bins, ranks, self.drop_last, table, policy.padded)
        weights = table.weigh(bins.units, bins.splits, policy.padded)
        bins, costs = deal(bins, weights, ranks, (self.seed, epoch, cursor), policy.levels)
        return Window(
            epoch=epoch,
            cursor=cursor,
            end=cursor + bins.taken,
            steps=len(bins) // ranks,
            ranks=ranks,
            units=bins.units,
            splits=bins.splits,
            costs=costs,
            dropped=bins.taken + bins.repeated - len(bins.units),
            repeated=bins.repeated,
            table=table,
        )

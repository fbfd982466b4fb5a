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
from .window import Span, Window, deal, even, select

Array = NDArray[Any]

KEEP = 2**24
"""Units whose windows are kept: what was planned to count steps need not be planned again."""

KEEP_SPANS = 2**16
"""Windows whose numbers are kept."""


@dataclass(eq=False)
class Planner:
    """Windows of plans.

    A window depends on the units, the policy, the seed, the epoch, its beginning in the epoch's order, and
    the world size. It depends on nothing that was planned before.

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
    _spans: dict[tuple[int, int, int], Span] = field(default_factory=dict, repr=False)

    def order(self, epoch: int) -> Array:
        """[count]: the order of all units in an epoch."""
        if epoch not in self._orders:
            count = self.units.count
            if self.policy.shuffles:
                order = draw.permutation(count, self.seed, epoch, draw.EPOCH)
            else:
                order = np.arange(count)
            self._orders = {epoch: order}
        return self._orders[epoch]

    def window(self, epoch: int, cursor: int, ranks: int) -> Window:
        """The window that begins at a cursor of an epoch's order.

        Args:
            epoch: the epoch.
            cursor: units that come before, from 0 to count - 1.
            ranks: world size.
        """
        key = (epoch, cursor, ranks)
        if key not in self._windows:
            self._windows[key] = self._plan(epoch, cursor, ranks)
            while len(self._windows) > 1 and sum(len(w.units) for w in self._windows.values()) > KEEP:
                self._windows.popitem(last=False)
        self._windows.move_to_end(key)
        return self._windows[key]

    def span(self, epoch: int, cursor: int, ranks: int) -> Span:
        """The end and the numbers of a window; it is planned if it was not yet."""
        key = (epoch, cursor, ranks)
        if key not in self._spans:
            if len(self._spans) == KEEP_SPANS:
                self._spans.clear()
            self._spans[key] = self.window(*key).span
        return self._spans[key]

    def _plan(self, epoch: int, cursor: int, ranks: int) -> Window:
        policy, table = self.policy, self.units
        rest = self.order(epoch)[cursor:]
        bins = policy.cut(table, rest, ranks, self.drop_last)
        bins = even(bins, ranks, self.drop_last and bins.taken == len(rest), table, policy.padded)
        costs, weights = table.weigh(bins.units, bins.splits, policy.padded)
        if policy.deals:
            cells = deal(weights, ranks, (self.seed, epoch, cursor))
            bins, costs = select(bins, cells), costs[cells]
        return Window(
            epoch=epoch,
            cursor=cursor,
            end=cursor + bins.taken,
            steps=len(bins) // ranks,
            ranks=ranks,
            units=bins.units,
            splits=bins.splits,
            costs=costs.reshape(-1, ranks),
            dropped=bins.taken + bins.repeated - len(bins.units),
            repeated=bins.repeated,
            table=table,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_orders": {}, "_windows": OrderedDict(), "_spans": {}}

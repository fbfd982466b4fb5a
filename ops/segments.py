"""Segments: the cells of a grid that share a cell of what is kept of it.

Reducing, normalising or sorting along ragged axes is work on segments. ``rows`` segments lie over the
grid of the kept axes; every method takes payloads [cells, *] or [rows, *].
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .axis import Grid
from .kernels import segment, structure
from .layout import from_envelope, positions_of, to_envelope


@dataclass(frozen=True)
class Segments:
    """The cells of ``grid`` that fall on each cell of ``grid.sub(kept)``; on each sample if none is kept."""

    grid: Grid
    kept: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Number of segments."""
        return self.grid.sub(self.kept).cells if self.kept else self.grid.batch_size

    @property
    def maps(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """index, order and splits, as the segment kernels take them."""
        return self.grid.map_to(self.kept), self.grid.order_by(self.kept), self.grid.splits(self.kept)

    def _maps_of(self, values: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """``maps`` without the index where it is not read."""
        order = self.grid.order_by(self.kept)
        needed = order is not None or segment.reads_index(values)
        return self.grid.map_to(self.kept) if needed else None, order, self.grid.splits(self.kept)

    @property
    def axis(self) -> int:
        """The axis that is not kept, where it is one."""
        return self.grid.others(self.kept)[0]

    def require_filled(self, what: str, least: int = 1) -> None:
        """Raise IndexError, naming the sample, where a segment has fewer than ``least`` cells."""
        for k in self.grid.others(self.kept):
            structure.check_longer(self.grid.axes[k].lengths, least, what)

    def counts(self) -> Tensor:
        """Cells of each segment, int [rows] on the values' device."""
        if not self.kept and self.grid.offsets.device.type == "cpu":
            return self.grid.lengths
        return structure.counts(self.grid.splits(self.kept), self.rows)

    def sum(self, values: Tensor) -> Tensor:
        """[cells, *] -> [rows, *]."""
        return segment.sum_rows(values, *self._maps_of(values), self.rows)

    def expand(self, values: Tensor) -> Tensor:
        """[rows, *] -> [cells, *]."""
        return segment.expand_rows(values, *self.maps)

    def peak(self, values: Tensor, dims: list[int], largest: bool) -> Tensor:
        """Largest or smallest value of each segment and over ``dims``: [cells, *] -> [rows, *]."""
        return segment.peak_rows(values, *self._maps_of(values), self.rows, dims, largest)

    def softmax(self, values: Tensor, logarithm: bool) -> Tensor:
        """Softmax of each segment, or its logarithm: [cells, *] -> [cells, *]."""
        return segment.softmax_rows(values, *self._maps_of(values), self.rows, logarithm)

    def argpeak(self, values: Tensor, largest: bool) -> Tensor:
        """Position along the reduced axis of the first largest or smallest value: int64 [rows, *]."""
        positions = positions_of(self.grid, self.axis)
        return segment.argpeak_rows(values.detach(), *self.maps, positions, self.rows, largest)

    def slots(self, positions: Tensor) -> Tensor:
        """Where positions inside segments lie, segment after segment: int [rows, *] -> int64 [rows, *]."""
        starts = self.grid.splits(self.kept)[: self.rows]
        return starts.view(-1, *[1] * (positions.dim() - 1)) + positions.long()

    def cells(self, positions: Tensor) -> Tensor:
        """The cells at positions inside segments: int [rows, *] -> int64 [rows, *]."""
        slots, order = self.slots(positions), self.grid.order_by(self.kept)
        return slots if order is None else order.index_select(0, slots.flatten()).long().view_as(slots)

    def positions_at(self, cells: Tensor) -> Tensor:
        """Positions along the reduced axis of cells: int64 [*] -> int64 [*]."""
        found = positions_of(self.grid, self.axis).index_select(0, cells.flatten())
        return found.long().view_as(cells)

    def sorted(self, values: Tensor, descending: bool = False) -> Tensor:
        """Cells by value, segment after segment: [cells, *] -> int64 [cells, *]."""
        return segment.sort_rows(values.detach(), self.maps[0], descending)

    def in_place_of(self, by_slot: Tensor) -> Tensor:
        """What lies segment after segment, in the order of cells: [cells, *] -> [cells, *]."""
        if self.grid.order_by(self.kept) is None:
            return by_slot
        return by_slot.index_select(0, self.grid.map_to((*self.kept, *self.grid.others(self.kept))))

    def padded(self, values: Tensor, fill: float) -> Tensor:
        """[cells, *] -> [rows, longest, *], along the reduced axis."""
        return to_envelope(values, self.grid, self.axis, fill)

    def unpadded(self, padded: Tensor) -> Tensor:
        """[rows, longest, *] -> [cells, *]."""
        return from_envelope(padded, self.grid, self.axis)

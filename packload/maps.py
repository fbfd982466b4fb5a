"""Coordinate maps: which are delivered with a batch, and the numpy that computes them.

=================  ==========================  ========================================================
name               of                          what, in ``ops`` (int32)
=================  ==========================  ========================================================
``"sample_ids"``   every axis, every pair      :attr:`Axis.sample_ids`: the sample of every row or cell
``"positions"``    every axis                  :attr:`Axis.positions`: the position inside its sample
``"coordinates"``  pairs                       :meth:`Grid.coordinates`: every cell's row of each axis
``"row_splits"``   pairs                       :meth:`Grid.row_splits`, at every level
``"columns"``      pairs                       cells by each further axis first, and their splits
``"n n"``          pairs that have no field    their maps, as of a field with this pattern
=================  ==========================  ========================================================

Each entry costs 4 bytes: of an axis 4 a row for each map; of a pair 4 a cell for each axis
(``coordinates``), for each further axis (``columns``) and for ``sample_ids``, and 4 a row for splits.

By default a batch brings ``sample_ids`` and ``positions`` of every axis, and ``coordinates``,
``row_splits`` and ``columns`` of every *pair*: a grid in whose pattern a name returns (``"n n _"``), or
whose axes all have a field of their own (``"n m"`` beside ``"n"`` and ``"m"``). Images are no pairs. A
batch with more than :data:`PAIR_CELLS` cells in a pair leaves that pair's maps to ``ops``, which builds
them where they are needed; maps that are asked for by name are always delivered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .block import Map
from .errors import CollateError

#: The most cells of a pair for which maps come by default: 16 MiB a map.
PAIR_CELLS = 2**22

OF_AXES = ("sample_ids", "positions")
OF_PAIRS = ("coordinates", "row_splits", "columns")

Lengths = NDArray[np.int64]
Indices = NDArray[np.int32]

#: From this mean length on, one numpy call a sample is faster than one a batch, which reads an index.
_LONG = 1500
#: The same for the cells of pairs.
_LARGE = 2000
_LINE_KEPT = 2**22
_line: Indices = np.arange(2**12, dtype=np.int32)


class Maps:
    """What a user asked for: kinds of maps, and products of axes that no field has.

    Args:
        wanted: names from the module's table, and patterns of two or more axes; None for the default.

    Raises:
        CollateError: a name is not in the table.
    """

    def __init__(self, wanted: Iterable[str] | None) -> None:
        self.implied = wanted is None
        names = (*OF_AXES, *OF_PAIRS) if wanted is None else tuple(wanted)
        self.kinds = tuple(name for name in names if name in OF_AXES + OF_PAIRS)
        others = [tuple(name.split()) for name in names if name not in self.kinds]
        for axes in others:
            if len(axes) < 2 or not all(word.isidentifier() for word in axes):
                raise CollateError(
                    f"maps: {' '.join(axes)!r} is neither one of {[*OF_AXES, *OF_PAIRS]} nor a pattern of "
                    "two or more axes, such as 'n n'"
                )
        self.products: tuple[tuple[str, ...], ...] = tuple(others)
        if self.products and not any(kind in OF_PAIRS for kind in self.kinds):
            self.kinds += OF_PAIRS

    def of(self, axes: int, grids: Sequence[tuple[int, ...]], single: set[int]) -> tuple[Map, ...]:
        """The maps of so many axes and these grids; ``single`` axes have a field of their own."""
        maps = [Map(k, kind) for k in range(axes) for kind in OF_AXES if kind in self.kinds]
        for part, grid in enumerate(grids, axes):
            if not self.implied or len(set(grid)) < len(grid) or single.issuperset(grid):
                maps += self._of_grid(part, len(grid))
        return tuple(maps)

    def _of_grid(self, part: int, rank: int) -> list[Map]:
        maps = []
        if "sample_ids" in self.kinds and not self.implied:
            maps.append(Map(part, "sample_ids"))
        if "coordinates" in self.kinds:
            maps += [Map(part, "map", (k,)) for k in range(rank)]
        if "row_splits" in self.kinds:
            maps += [Map(part, "splits", tuple(range(level))) for level in range(1, rank)]
        if "columns" in self.kinds:
            for k in range(1, rank):
                maps += [Map(part, "order", (k,)), Map(part, "splits", (k,))]
        return maps


def write(
    wanted: Map, out: Indices, axes: Sequence[Lengths], starts: Sequence[Indices], cells: Lengths
) -> None:
    """Compute a map into ``out``.

    Args:
        axes: the lengths [B] of each axis of the partition; one for an axis itself.
        starts: where the samples' rows begin on each axis, [B + 1].
        cells: the cells [B] of each sample.
    """
    if wanted.kind == "sample_ids":
        _runs(out, numbers(len(cells)), cells)
    elif wanted.kind == "positions":
        _count(out, cells, starts[0])
    elif wanted.kind == "splits":
        _splits(out, axes, wanted.kept or ())
    elif wanted.kind == "map" and wanted.kept == (0,):
        rest = np.repeat(prod(axes[1:]), axes[0])
        _runs(out, numbers(int(starts[0][-1])), rest)
    elif len(axes) == 2 and len(out) < _LARGE * len(cells):
        _by_row(wanted, out, axes, starts, cells)
    else:
        _by_sample(wanted, out, axes, starts, cells)


def _runs(out: Indices, values: Indices, counts: Lengths) -> None:
    """Each value as often as its count says."""
    if len(out) < _LONG * len(counts):
        out[:] = values.repeat(counts)
        return
    begin = 0
    for value, end in zip(values.tolist(), counts.cumsum().tolist()):
        out[begin:end] = value
        begin = end


def _count(out: Indices, counts: Lengths, starts: Indices) -> None:
    """0, 1, 2, ... anew for each count."""
    if len(out) < _LONG * len(counts):
        np.subtract(numbers(len(out)), starts[:-1].repeat(counts), out=out)
    elif len(out):
        line = numbers(int(counts.max()))
        np.concatenate([line[:n] for n in counts.tolist()], out=out)


def numbers(count: int) -> Indices:
    """0, 1, 2, ... ``count - 1``, from a line that is kept; not to be written to."""
    global _line
    if count > len(_line):
        line = np.arange(max(count, 2 * len(_line)), dtype=np.int32)
        if len(line) > _LINE_KEPT:
            return line[:count]
        _line = line
    return _line[:count]


def _splits(out: Indices, axes: Sequence[Lengths], kept: tuple[int, ...]) -> None:
    """Offsets of the cells over each cell of the grid of the kept axes."""
    rest: Any = prod(lengths for k, lengths in enumerate(axes) if k not in kept)
    out[0] = 0
    np.cumsum(np.repeat(rest, prod(axes[k] for k in kept)), out=out[1:])


def _by_row(wanted: Map, out: Indices, axes: Sequence[Lengths], starts: Any, cells: Lengths) -> None:
    """As :func:`_by_sample`, for pairs, in one go: each row of the pair, or each column, is a progression."""
    rows, columns = (lengths.astype(np.int32) for lengths in axes)
    if wanted.kind == "map":  # the columns of each row follow each other
        runs = columns.repeat(rows)
        first = starts[1][:-1].repeat(rows)
        np.subtract(numbers(len(out)), (_before(runs) - first).repeat(runs), out=out)
        return
    runs, stride = rows.repeat(columns), columns.repeat(columns)
    first = _before(cells).repeat(columns) + numbers(len(runs)) - starts[1][:-1].repeat(columns)
    np.subtract(numbers(len(out)), _before(runs).repeat(runs), out=out)
    out *= stride.repeat(runs)
    out += first.repeat(runs)


def _before(counts: Any) -> Indices:
    """What comes before each count."""
    return counts.cumsum(dtype=np.int32) - counts.astype(np.int32)


def _by_sample(wanted: Map, out: Indices, axes: Sequence[Lengths], starts: Any, cells: Lengths) -> None:
    """One broadcast assignment a sample: a coordinate of every cell, or the cells in another order."""
    kept = wanted.kept or ()
    rank = len(axes)
    line = numbers(len(out) if wanted.kind == "order" else int(starts[kept[0]][-1]))
    full = kept + tuple(k for k in range(rank) if k not in kept)
    along = tuple(-1 if k == kept[0] else 1 for k in range(rank))
    begin = 0
    for sample, (shape, end) in enumerate(zip(zip(*(a.tolist() for a in axes)), cells.cumsum().tolist())):
        if wanted.kind == "order":
            block = line[begin:end].reshape(shape).transpose(full)
            out[begin:end].reshape(block.shape)[...] = block
        elif end > begin:
            first = starts[kept[0]][sample]
            out[begin:end].reshape(shape)[...] = line[first : first + shape[kept[0]]].reshape(along)
        begin = end

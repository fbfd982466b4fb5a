"""What a loader did: figures of one pass, each defined where it is computed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch.utils._pytree as pytree
from torch import Tensor

from .batch import Batch
from .block import Spec
from .feed import Seconds

_KEPT = 4096
"""Times of a stage that are kept: those of so many batches last."""
_TOGETHER = 256
"""Batches whose sizes are counted in one go: what is gathered of a batch costs the loop a microsecond."""
MOST_SHAPES = 1 << 16
"""Shapes that are told apart; more are not counted."""


class StageTimes(NamedTuple):
    """Seconds of one stage: medians, 99th percentiles over the last 4096 batches, and the sum over all."""

    p50: float
    p99: float
    total: float


@dataclass(frozen=True)
class Stats:
    """Figures of a loader, from the beginning of its latest pass to the last batch it handed out.

    Attributes:
        batches: handed out.
        samples: in these.
        skipped: samples that the batch sampler or the dataset leaves out of the pass, as they say.
        positions: valid cells of all axes and grids of these batches, each axis and grid once.
        bytes: of these batches' buffers; of tensors inside, where a collate function makes something else.
        seconds: from the first batch's being asked for to the last one's being handed out.
        occupancy: valid cells over the cells that padding to each batch's longest sample would make, all
            batches together, by the name of the axis or grid (``"n"``, ``"n x n"``).
        shapes: how many different shapes came: batch size, cells and longest sample of every axis and grid.
            What is compiled for fixed shapes is compiled so often.
        copied_per_byte: bytes that were written into batches, once by collating, once more for each move,
            over bytes handed out. The copy to a device counts.
        overflows: batches that found no free slot and were made in fresh memory.
        stages: times of everything that is done, or waited for, for a batch:

            * ``wait``: the consumer waits in ``next``: what the loader costs the loop
            * ``full``: a worker waits to be let draw, since enough is ready: the loop is the slower side
            * ``draw``: a worker waits for its turn at the batch sampler, and for the sampler
            * ``fetch``, ``collate``, ``pin``, ``copy``: a worker is at it (a copy: until it is issued)
    """

    batches: int = 0
    samples: int = 0
    skipped: int = 0
    positions: int = 0
    bytes: int = 0
    seconds: float = 0.0
    occupancy: dict[str, float] = field(default_factory=dict)
    shapes: int = 0
    copied_per_byte: float = 0.0
    overflows: int = 0
    stages: dict[str, StageTimes] = field(default_factory=dict)

    @property
    def samples_per_second(self) -> float:
        """Samples over seconds; so do the next two."""
        return self._rate(self.samples)

    @property
    def positions_per_second(self) -> float:
        """Positions over seconds."""
        return self._rate(self.positions)

    @property
    def bytes_per_second(self) -> float:
        """Bytes over seconds."""
        return self._rate(self.bytes)

    def _rate(self, amount: int) -> float:
        return amount / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        filled = ", ".join(f"{name} {share:.1%}" for name, share in self.occupancy.items())
        lines = [
            f"{self.batches} batches, {self.samples} samples, {self.skipped} skipped, {self.seconds:.2f} s",
            f"{self.samples_per_second:.0f} samples/s, {self.positions_per_second:.3g} positions/s, "
            f"{self.bytes_per_second / 1e6:.1f} MB/s",
            f"occupancy {filled or '-'}; {self.shapes} shapes; {self.copied_per_byte:.2f} bytes copied per "
            f"byte; {self.overflows} overflows",
        ]
        for name, times in self.stages.items():
            lines.append(
                f"{name:<8} p50 {1e3 * times.p50:8.3f} ms   p99 {1e3 * times.p99:8.3f} ms   "
                f"total {times.total:.2f} s"
            )
        return "\n".join(lines)


class Recorder:
    """Gathers the figures of one pass; used by the consumer's thread alone."""

    def __init__(self) -> None:
        self.begin: float | None = None
        self._end = 0.0
        self._batches = self._samples = self._bytes = self._copied = 0
        self._valid: dict[str, int] = {}
        self._padded: dict[str, int] = {}
        self._shapes: set[int] = set()
        self._rows: dict[int, tuple[Spec, list[tuple[int, ...]]]] = {}
        self._gathered = 0
        self._times: dict[str, deque[float]] = {}
        self._totals: dict[str, float] = {}

    def asked(self) -> None:
        """A batch is asked for."""
        if self.begin is None:
            self.begin = perf_counter()

    def handed_out(self, result: Any, indices: Any, seconds: Seconds, copies: int) -> None:
        """A batch is handed out.

        Args:
            result: a Batch, or what a collate function made.
            indices: what it was made of.
            seconds: of its stages.
            copies: how often its bytes were written.
        """
        self._end = perf_counter()
        self._batches += 1
        for name, value in seconds:
            times = self._times.get(name)
            if times is None:
                times = self._times[name] = deque(maxlen=_KEPT)
                self._totals[name] = 0.0
            times.append(value)
            self._totals[name] += value
        block = result.block if isinstance(result, Batch) else None
        if block is None:
            tensors = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
            samples, nbytes = (
                len(indices) if hasattr(indices, "__len__") else 0,
                sum(x.nbytes for x in tensors),
            )
        else:
            samples, nbytes = block.extents.batch_size, block.extents.nbytes
            known = self._rows.get(id(block.spec)) or self._rows.setdefault(id(block.spec), (block.spec, []))
            known[1].append((samples, *block.extents.cells, *block.extents.peaks))
            self._gathered += 1
            if self._gathered == _TOGETHER:
                self._sizes()
        self._samples += samples
        self._bytes += nbytes
        self._copied += copies * nbytes

    def _sizes(self) -> None:
        """Count what was gathered of cells: valid, and padded to the longest sample of each batch."""
        for spec, rows in self._rows.values():
            numbers = np.array(rows, np.int64)
            sizes, cells, peaks = numbers[:, 0], *np.split(numbers[:, 1:], 2, axis=1)
            for part in range(spec.partitions):
                axes = spec.axes_of(part)
                name = " x ".join(spec.axes[k] or "n" for k in axes)
                padded = int((sizes * peaks[:, list(axes)].prod(1)).sum())
                self._valid[name] = self._valid.get(name, 0) + int(cells[:, part].sum())
                self._padded[name] = self._padded.get(name, 0) + padded
            self._shapes.update(hash(row) for row in rows[: MOST_SHAPES - len(self._shapes)])
        self._rows.clear()
        self._gathered = 0

    def stats(self, skipped: int, moved: int, overflows: int) -> Stats:
        """The figures.

        Args:
            skipped: samples that are left out.
            moved: bytes that were copied besides.
            overflows: batches in fresh memory.
        """
        self._sizes()
        return Stats(
            batches=self._batches,
            samples=self._samples,
            skipped=skipped,
            positions=sum(self._valid.values()),
            bytes=self._bytes,
            seconds=self._end - self.begin if self.begin is not None and self._batches else 0.0,
            occupancy={name: self._valid[name] / padded for name, padded in self._padded.items() if padded},
            shapes=len(self._shapes),
            copied_per_byte=(self._copied + moved) / self._bytes if self._bytes else 0.0,
            overflows=overflows,
            stages={name: self._stage(name) for name in self._times},
        )

    def _stage(self, name: str) -> StageTimes:
        p50, p99 = np.percentile(list(self._times[name]), (50, 99)).tolist()
        return StageTimes(p50, p99, self._totals[name])

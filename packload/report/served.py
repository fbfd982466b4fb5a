"""What an epoch serves, in the form that figures are computed from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from packload.plan.window import Window

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Served:
    """The batches of an epoch on all ranks, as one list of indices cut by offsets.

    An index is that of a sample, or of a piece of one where a plan cuts samples: figures count both alike.

    Batches are in the order of time: those of step 0 on rank 0, 1, ..., then those of step 1.

    Attributes:
        indices: int64 [served].
        offsets: int64 [steps * ranks + 1], where each batch begins.
        ranks: number of ranks.
    """

    indices: Indices
    offsets: Indices
    ranks: int

    @classmethod
    def of(cls, batches: Sequence[Iterable[Sequence[int]]]) -> Served:
        """Put together the batches of every rank: one iterable of index lists for each.

        Raises:
            ValueError: there is no rank, a batch is empty, or the ranks have unequal numbers of steps.
        """
        ranks = [[np.asarray(batch, dtype=np.int64) for batch in rank] for rank in batches]
        steps = [len(rank) for rank in ranks]
        if not ranks or len(set(steps)) > 1:
            raise ValueError(f"the ranks must have one number of steps; they have {steps}")
        ordered = [rank[step] for step in range(steps[0]) for rank in ranks]
        sizes = np.array([len(batch) for batch in ordered], np.int64)
        if len(sizes) and sizes.min() == 0:
            step, rank = divmod(int(sizes.argmin()), len(ranks))
            raise ValueError(f"step {step} of rank {rank} is an empty batch")
        indices = np.concatenate(ordered) if ordered else np.empty(0, np.int64)
        return cls(indices, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), len(ranks))

    @classmethod
    def of_windows(cls, windows: Iterable[Window], ranks: int) -> Served:
        """Put together the windows of a plan; the indices are those of its units.

        Args:
            ranks: the world size that the windows were planned for.
        """
        parts = list(windows)
        sizes = np.concatenate([np.empty(0, np.int64), *(np.diff(window.splits) for window in parts)])
        indices = np.concatenate([np.empty(0, np.int64), *(window.units for window in parts)])
        return cls(indices, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), ranks)

    @property
    def sizes(self) -> Indices:
        """Samples of each batch, int64 [steps * ranks]."""
        return np.diff(self.offsets)

    @property
    def batches(self) -> int:
        """Number of batches of all ranks."""
        return len(self.offsets) - 1

    @property
    def steps(self) -> int:
        """Number of steps, the same on every rank."""
        return self.batches // self.ranks

    def sums(self, values: np.ndarray) -> np.ndarray:
        """The sum over each batch of per-sample ``values`` [N]: [steps * ranks]."""
        return _by_batch(np.add, values[self.indices], self.offsets)

    def peaks(self, values: np.ndarray) -> np.ndarray:
        """The largest of per-sample ``values`` [N, ...] in each batch: [steps * ranks, ...]."""
        return _by_batch(np.maximum, values[self.indices], self.offsets)

    def by_rank(self, values: np.ndarray) -> np.ndarray:
        """Per-batch ``values`` [steps * ranks] as [steps, ranks]."""
        return values.reshape(self.steps, self.ranks)


def _by_batch(reduce: np.ufunc, values: np.ndarray, offsets: Indices) -> np.ndarray:
    if len(offsets) == 1:
        return values[:0]
    return reduce.reduceat(values, offsets[:-1])

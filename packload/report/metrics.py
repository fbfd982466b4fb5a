"""The figures of a batching policy, each defined in words where it is computed.

All are functions of what an epoch serves (:class:`Served`) and of the samples' lengths, int64 [N], or
[N, k] for samples of k sizes. A *measure* turns lengths [M] or [M, k] into [M]: the cells of a sample
(:func:`cells`) or its cost. A batch of B samples, padded, is B samples of the largest length in each
dim, so its measure is B times that of these lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from packload.cost import tokens
from packload.report.served import Served

Measure = Callable[[np.ndarray], np.ndarray]


def cells(lengths: np.ndarray) -> np.ndarray:
    """The cells of each sample: its length, or the product of its sizes. Lengths [M, ...] give [M]."""
    return lengths if lengths.ndim == 1 else lengths.prod(1)


def cells_of(cost: Measure) -> Measure:
    """What counts as cells under a cost: positions, if it charges those of all fields, else :func:`cells`."""
    return tokens if cost is tokens else cells


def occupancy(served: Served, lengths: np.ndarray, measure: Measure = cells) -> float:
    """Valid cells over the cells of padded batches, of all batches together; 1 where there are none.

    With the cells of sequences, images or pairs as the measure it is what is called their occupancy.
    """
    padded = padded_measure(served, lengths, measure).sum()
    return float(served.sums(measure(lengths)).sum() / padded) if padded else 1.0


def padded_measure(served: Served, lengths: np.ndarray, measure: Measure = cells) -> np.ndarray:
    """The measure of each batch when padded: [steps * ranks]."""
    return served.sizes * measure(served.peaks(lengths))


def padding(served: Served, lengths: np.ndarray, measure: Measure = cells) -> float:
    """The cells that padded batches would hold beyond the valid ones: what packing does not compute."""
    return float(padded_measure(served, lengths, measure).sum() - served.sums(measure(lengths)).sum())


def fill(served: Served, cost: np.ndarray, budget: float) -> np.ndarray:
    """The cost of each batch over the budget: [steps * ranks]; above 1 where a batch exceeds it.

    Args:
        cost: of each sample, [N].
        budget: of one batch.
    """
    return served.sums(cost) / budget


def slowest(served: Served, cost: np.ndarray) -> np.ndarray:
    """In each step, the cost of the most expensive rank over the mean of the ranks: [steps], at least 1.

    A step of data-parallel training lasts as long as its slowest rank. A step without cost gives 1.
    """
    steps = served.by_rank(served.sums(cost)).astype(np.float64)
    mean = steps.mean(1)
    return np.divide(steps.max(1), mean, out=np.ones_like(mean), where=mean > 0)


def waiting(served: Served, cost: np.ndarray) -> float:
    """The cost of the slowest ranks over the mean cost of ranks, both summed over the epoch.

    It is what the epoch takes over what it would take with perfectly even ranks; unlike the mean of
    :func:`slowest` it counts a step by what it costs.
    """
    steps = served.by_rank(served.sums(cost))
    mean = steps.mean(1).sum() if steps.size else 0
    return float(steps.max(1).sum() / mean) if mean else 1.0


def adjacent_correlation(served: Served, lengths: np.ndarray, measure: Measure = cells) -> float:
    """How alike in length are samples served one after the other: Pearson's r, pairs of all ranks together.

    A pair is a sample and the next one on the same rank, in the same batch or in the next. Around 0 the
    order is random in length; near 1 a batch, or the run of batches it is in, holds one length only. nan
    where lengths do not vary or there is no pair.
    """
    size = measure(lengths)[served.indices].astype(np.float64)
    rank = np.repeat(np.arange(served.batches) % served.ranks, served.sizes)
    order = np.argsort(rank, kind="stable")
    size, rank = size[order], rank[order]
    same = rank[1:] == rank[:-1]
    one, next_one = size[:-1][same], size[1:][same]
    if not len(one) or one.std() == 0 or next_one.std() == 0:
        return float("nan")
    return float(np.corrcoef(one, next_one)[0, 1])


def padded_shapes(served: Served, lengths: np.ndarray) -> int:
    """How many shapes padded batches have: distinct (samples, largest lengths)."""
    return len(np.unique(np.column_stack([served.sizes, served.peaks(lengths)]), axis=0))


def packed_shapes(served: Served, lengths: np.ndarray, measure: Measure = cells) -> int:
    """How many shapes the values of packed batches have: distinct totals of cells."""
    return len(np.unique(served.sums(measure(lengths))))


@dataclass(frozen=True)
class Figures:
    """What a policy does, in figures.

    Attributes:
        name: of the policy.
        steps: an epoch's steps on each rank.
        samples: samples served by all ranks.
        dropped: samples that are not served, those apart that were skipped as oversize.
        repeated: entries beyond a sample's first.
        occupancy: see :func:`occupancy`, of cells.
        cost_occupancy: the same of costs.
        padding: see :func:`padding`, in cells.
        oversize: what became of samples above the budget: for each word how many, of a plan's ``counts``.
        fill: the mean of :func:`fill`; None without a budget.
        largest_cells: the most valid cells in a batch.
        largest_padded: the most cells of a batch when padded.
        largest_samples: the most samples in a batch.
        slowest: the mean of :func:`slowest`.
        waiting: see :func:`waiting`.
        adjacent: see :func:`adjacent_correlation`.
        padded_shapes: see :func:`padded_shapes`.
        packed_shapes: see :func:`packed_shapes`.
        seconds: what planning the epoch of one rank took.
    """

    name: str
    steps: int
    samples: int
    dropped: int
    repeated: int
    occupancy: float
    cost_occupancy: float
    padding: float
    oversize: Mapping[str, int]
    fill: float | None
    largest_cells: int
    largest_padded: int
    largest_samples: int
    slowest: float
    waiting: float
    adjacent: float
    padded_shapes: int
    packed_shapes: int
    seconds: float


def figures(
    name: str,
    served: Served,
    lengths: np.ndarray,
    cost: Measure = cells,
    budget: float | None = None,
    seconds: float = float("nan"),
    oversize: Mapping[str, int] | None = None,
) -> Figures:
    """All figures of what was served. Cells are those of :func:`cells_of` the cost.

    Args:
        lengths: of all samples of the data set, int64 [N] or [N, k].
        cost: what a sample is charged, of lengths [M] or [M, k].
        budget: the most that a batch may cost, if it was planned by one.
        seconds: what planning took.
        oversize: what became of samples above the budget.
    """
    costs, measure = cost(lengths), cells_of(cost)
    distinct = len(np.unique(served.indices))
    ratios = slowest(served, costs)
    return Figures(
        name=name,
        steps=served.steps,
        samples=len(served.indices),
        dropped=len(lengths) - distinct,
        repeated=len(served.indices) - distinct,
        occupancy=occupancy(served, lengths, measure),
        cost_occupancy=occupancy(served, lengths, cost),
        padding=padding(served, lengths, measure),
        oversize={what: count for what, count in (oversize or {}).items() if count},
        fill=float(fill(served, costs, budget).mean()) if budget and served.batches else None,
        largest_cells=_most(served.sums(measure(lengths))),
        largest_padded=_most(padded_measure(served, lengths, measure)),
        largest_samples=_most(served.sizes),
        slowest=float(ratios.mean()) if len(ratios) else 1.0,
        waiting=waiting(served, costs),
        adjacent=adjacent_correlation(served, lengths, measure),
        padded_shapes=padded_shapes(served, lengths),
        packed_shapes=packed_shapes(served, lengths, measure),
        seconds=seconds,
    )


def _most(values: np.ndarray) -> int:
    return int(values.max()) if len(values) else 0

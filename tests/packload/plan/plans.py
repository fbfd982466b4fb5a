"""Plans for tests: every sampler over small data, and what a plan must hold, worked out by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

import packload
from packload import BucketBatchSampler, BudgetBatchSampler, FixedBatchSampler, RandomBatchSampler
from packload.plan import PlanSampler

Make = Callable[..., PlanSampler]

#: Every policy, every way through the budget policy: make(lengths, **ranks and seed), lengths below 50.
POLICIES: dict[str, Make] = {
    "random": lambda lengths, **kw: RandomBatchSampler(lengths, 3, **kw),
    "bucket": lambda lengths, **kw: BucketBatchSampler(lengths, 3, buckets=4, **kw),
    "budget_of_small_samples": lambda lengths, **kw: BudgetBatchSampler(lengths, 1000, **kw),
    "budget_of_large_samples": lambda lengths, **kw: BudgetBatchSampler(lengths, 60, **kw),
    "budget_padded": lambda lengths, **kw: BudgetBatchSampler(lengths, 100, padded=True, **kw),
    "several_budgets": lambda lengths, **kw: BudgetBatchSampler(
        lengths, {"tokens": 100, "samples": 4, "pair_cells": 3000}, **kw
    ),
    "budget_in_fractions": lambda lengths, **kw: BudgetBatchSampler(
        lengths, 7.5, cost=packload.cost.quadratic(0.1, 0.001), **kw
    ),
    "fixed": lambda lengths, **kw: FixedBatchSampler(
        lengths, 3, **{k: v for k, v in kw.items() if k != "seed"}
    ),
}


def some_lengths(count: int, seed: int = 0, high: int = 50) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, high, count)


def all_ranks(make: Make, lengths: Sequence[int], ranks: int, **kw: Any) -> list[list[list[Any]]]:
    """The batches of every rank of a world."""
    return [list(make(lengths, rank=rank, world_size=ranks, **kw)) for rank in range(ranks)]


def occurrences(batches: Iterable[list[list[Any]]]) -> Counter[Any]:
    """How often each index stands in the batches of all ranks."""
    return Counter(index for rank in batches for batch in rank for index in batch)

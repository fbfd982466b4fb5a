"""Policies side by side on the lengths of one data set."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from packload.cost import Cost
from packload.plan.sampler import PlanSampler
from packload.plan.samplers import BucketBatchSampler, BudgetBatchSampler, RandomBatchSampler
from packload.plan.units import Oversize
from packload.report.metrics import Figures, figures
from packload.report.served import Served


@dataclass(frozen=True)
class Settings:
    """What policies are compared at.

    Attributes:
        batch_size: samples of a random and of a bucketed batch.
        budget: what a batch filled to a budget costs at most; batches of the others are measured by it.
        world_size: number of ranks.
        cost: what a sample is charged: a function of lengths.
        seed: of the plans.
        oversize: what becomes of samples above the budget; see :class:`~packload.BudgetBatchSampler`.
    """

    batch_size: int
    budget: float
    world_size: int
    cost: Cost
    seed: int = 0
    oversize: Oversize = "raise"


@dataclass(frozen=True)
class Result:
    """What one policy does.

    Attributes:
        lengths: of what it deals out, int64 [N] or [N, k]: of pieces, where it cuts samples.
        served: the batches of an epoch.
        figures: of these.
    """

    lengths: np.ndarray
    served: Served
    figures: Figures


def compare(lengths: np.ndarray, settings: Settings) -> list[Result]:
    """Plan an epoch by the policies random, bucket and budget, and measure each.

    Args:
        lengths: of all samples, int64 [N] or [N, k].

    Raises:
        ValueError: settings that no plan can have, or samples above the budget if ``oversize`` is "raise".
    """
    size, budget, oversize = settings.batch_size, settings.budget, settings.oversize
    rest: dict[str, Any] = {
        "cost": settings.cost,
        "seed": settings.seed,
        "rank": 0,
        "world_size": settings.world_size,
    }
    return [
        measure(lambda: RandomBatchSampler(lengths, size, **rest), settings),
        measure(lambda: BucketBatchSampler(lengths, size, **rest), settings),
        measure(lambda: BudgetBatchSampler(lengths, budget, oversize=oversize, **rest), settings),
    ]


def measure(make: Callable[[], PlanSampler], settings: Settings) -> Result:
    """Make a sampler, plan its first epoch, and measure it.

    Planning time is that of both: the plan of all ranks, from lengths in memory.

    Raises:
        TypeError: the lengths are by field; give them as columns [N, k].
    """
    start = time.perf_counter()
    sampler = make()
    windows = list(sampler.windows())
    seconds = time.perf_counter() - start
    units = sampler.plan.units
    lengths = units.lengths
    if isinstance(lengths, Mapping):
        raise TypeError(f"figures are of lengths in columns; got fields {list(lengths)}. Stack them: [N, k].")
    served = Served.of_windows(windows, settings.world_size)
    cost, budget, name = settings.cost, settings.budget, sampler.plan.policy.name
    measured = figures(name, served, lengths, cost, budget, seconds, units.counts)
    return Result(lengths, served, measured)

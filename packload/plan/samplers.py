"""The batch samplers: one for each policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset, Sampler

from ..cost import Cost
from .bucket import Bucket, borders_of
from .budget import LARGE
from .budget import Budget as BudgetPolicy
from .caps import Budget, make_caps, read_lengths
from .fixed import Fixed
from .policy import Policy, check_batch_size
from .random import Random
from .sampler import PlanSampler
from .units import Oversize, Units, make_units


class RandomBatchSampler(PlanSampler):
    """Random batches of one size."""

    def __init__(
        self,
        lengths: Any,
        batch_size: int,
        *,
        cost: Cost | str | None = None,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
        padded: bool = False,
    ) -> None:
        policy = Random(check_batch_size(batch_size), padded)
        _build(self, lengths, policy, None, cost, "raise", seed, rank, world_size, drop_last)


class BucketBatchSampler(PlanSampler):
    """Batches of one size, of samples of about one length."""

    def __init__(
        self,
        lengths: Any,
        batch_size: int,
        *,
        buckets: int | Sequence[float] = 64,
        cost: Cost | str | None = None,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
        padded: bool = False,
    ) -> None:
        size = check_batch_size(batch_size)

        def policy(units: Units) -> Policy:
            return Bucket(size, borders_of(units.loads, buckets), padded)

        _build(self, lengths, policy, None, cost, "raise", seed, rank, world_size, drop_last)


class BudgetBatchSampler(PlanSampler):
    """Batches filled to a budget."""

    def __init__(
        self,
        lengths: Any,
        budget: Budget,
        *,
        cost: Cost | str | Mapping[str, Cost | str] | None = None,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        oversize: Oversize = "raise",
        drop_last: bool = False,
        padded: bool = False,
    ) -> None:
        def policy(units: Units) -> Policy:
            caps = tuple(zip(units.caps.names, units.caps.caps))
            return BudgetPolicy(caps, units.fraction >= LARGE, padded)

        _build(self, lengths, policy, budget, cost, oversize, seed, rank, world_size, drop_last)


class FixedBatchSampler(PlanSampler):
    """Batches in the data set's order, the same in every epoch: for evaluation."""

    def __init__(
        self,
        lengths: Any,
        batch_size: int,
        *,
        cost: Cost | str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
        padded: bool = False,
    ) -> None:
        policy = Fixed(check_batch_size(batch_size), padded)
        _build(self, lengths, policy, None, cost, "raise", 0, rank, world_size, drop_last)


def _build(
    sampler: PlanSampler,
    lengths: Any,
    policy: Policy | Any,
    budget: Budget | None,
    cost: Any,
    oversize: Oversize,
    seed: int,
    rank: int | None,
    world_size: int | None,
    drop_last: bool,
) -> None:
    if isinstance(lengths, (Sampler, Dataset)):
        raise TypeError(
            f"lengths is a {type(lengths).__name__}. A plan is made from lengths and sharded by itself."
        )
    read = read_lengths(lengths)
    caps = make_caps(budget, cost, read)
    units = make_units(read, caps, oversize)
    made = policy if isinstance(policy, Policy) else policy(units)
    PlanSampler.__init__(
        sampler,
        read,
        caps,
        made,
        units,
        seed=seed,
        rank=rank,
        world_size=world_size,
        oversize=oversize,
        drop_last=drop_last,
    )

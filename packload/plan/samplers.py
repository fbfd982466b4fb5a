"""The batch samplers, one for each policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..cost import Cost
from .bucket import Bucket, make_borders
from .budget import Budget as BudgetPolicy
from .budget import is_large
from .caps import Budget, Costs
from .fixed import Fixed
from .policy import check_batch_size
from .random import Random
from .sampler import PlanSampler
from .units import Oversize


class RandomBatchSampler(PlanSampler):
    """Random batches of one size.

    Args:
        lengths: of all samples, in the data set's order: integers [N], [N, D], or by field.
        batch_size: samples of a batch.
        cost: what ranks are balanced by: the batches of one step cost about the same. By default tokens.
        seed: of the plan; each epoch has an order of its own.
        rank: this process's; by default that of ``torch.distributed``, or 0.
        world_size: the number of ranks; by default that of ``torch.distributed``, or 1.
        drop_last: drop samples that make no whole step of whole batches, else the last are smaller.
        padded: a batch costs what it costs padded.
    """

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
        super().__init__(
            lengths,
            lambda _: policy,
            cost=cost,
            seed=seed,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
        )


class BucketBatchSampler(PlanSampler):
    """Batches of one size, of samples of about one cost: little is padded, and all of a batch are alike.

    Args:
        lengths: of all samples, in the data set's order: integers [N], [N, D], or by field.
        batch_size: samples of a batch.
        buckets: how many, laid where they leave least to pad; or their borders, the largest cost in each
            but the last.
        cost: what samples are sorted by, and ranks balanced by. By default tokens.
        seed: of the plan; each epoch has an order of its own.
        rank: this process's; by default that of ``torch.distributed``, or 0.
        world_size: the number of ranks; by default that of ``torch.distributed``, or 1.
        drop_last: drop samples that make no whole step of whole batches, else the last are smaller.
        padded: a batch costs what it costs padded.
    """

    def __init__(
        self,
        lengths: Any,
        batch_size: int,
        *,
        buckets: int | Sequence[float] = 128,
        cost: Cost | str | None = None,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
        padded: bool = False,
    ) -> None:
        size = check_batch_size(batch_size)
        super().__init__(
            lengths,
            lambda units: Bucket(size, make_borders(units.loads, buckets), padded),
            cost=cost,
            seed=seed,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
        )


class BudgetBatchSampler(PlanSampler):
    """Batches filled to a budget, of any number of samples.

    Args:
        lengths: of all samples, in the data set's order: integers [N], [N, D], or by field.
        budget: the cap on a batch's cost; or several caps by name, ``{"tokens": 16384, "samples": 64}``, of
            which the first is what ranks are balanced by.
        cost: what a sample is charged, a function of lengths; by default tokens. Of several budgets, costs by
            the same names; those called as in ``packload.cost`` need none.
        seed: of the plan; each epoch has an order of its own.
        rank: this process's; by default that of ``torch.distributed``, or 0.
        world_size: the number of ranks; by default that of ``torch.distributed``, or 1.
        oversize: what becomes of samples above the budget: ``"raise"``, ``"skip"``, ``"alone"``, ``"split"``
            or ``"truncate"``.
        drop_last: drop batches that make no whole step at an epoch's end, else batches are halved for it.
        padded: a batch costs what it costs padded, and samples of about one length share it.
    """

    def __init__(
        self,
        lengths: Any,
        budget: Budget,
        *,
        cost: Costs = None,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        oversize: Oversize = "raise",
        drop_last: bool = False,
        padded: bool = False,
    ) -> None:
        super().__init__(
            lengths,
            lambda u: BudgetPolicy(tuple(zip(u.caps.names, u.caps.caps)), is_large(u), padded),
            budget=budget,
            cost=cost,
            seed=seed,
            rank=rank,
            world_size=world_size,
            oversize=oversize,
            drop_last=drop_last,
        )


class FixedBatchSampler(PlanSampler):
    """Batches of one size in the data set's order, the same in every epoch: for evaluation.

    Batch b goes to rank ``b % world_size`` in step ``b // world_size``.

    Args:
        lengths: of all samples, in the data set's order: integers [N], [N, D], or by field.
        batch_size: samples of a batch.
        cost: what batches are reported to cost. By default tokens.
        rank: this process's; by default that of ``torch.distributed``, or 0.
        world_size: the number of ranks; by default that of ``torch.distributed``, or 1.
        drop_last: drop samples that make no whole step of whole batches, else the last are smaller.
        padded: a batch costs what it costs padded.
    """

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
        super().__init__(
            lengths, lambda _: policy, cost=cost, rank=rank, world_size=world_size, drop_last=drop_last
        )

"""Shards to packed batches: a data set, a plan over its index, and a loader.

    indexes -> lengths -> plan -> index lists -> ShardDataset -> collate -> batches

Nothing is decided while shards are read. Which samples a step has on which rank follows from the indexes, the
policy, the seed and the epoch; workers only fetch. So every rank has the same number of steps, however shards
are divided, more workers or ranks than shards are fine, and the state of a run is a place in the plan.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from ..collate import Collate
from ..cost import Cost
from ..loader import Loader
from ..plan import (
    BucketBatchSampler,
    BudgetBatchSampler,
    CutDataset,
    FixedBatchSampler,
    RandomBatchSampler,
)
from ..plan.planner import Planner
from ..plan.sampler import PlanSampler
from ..schema import Schema, parse_schema
from .ahead import AheadSampler
from .columns import choose_lengths
from .decode import Decoder
from .errors import ShardError
from .order import windowed_order
from .read import ShardDataset, Urls
from .safety import DEFAULT, Safety

Policy = Literal["budget", "bucket", "random", "fixed"]
Lengths = str | Sequence[str] | Mapping[str, Any] | NDArray[Any] | None


class ShardPlanner(Planner):
    """A planner whose epochs mix the samples of a few shards at a time.

    Attributes:
        shard_of: [count] the shard of each unit.
        mixed: how many shards are mixed.
    """

    def __init__(self, plan: Planner, shard_of: NDArray[Any], mixed: int) -> None:
        super().__init__(plan.units, plan.policy, plan.seed, plan.drop_last)
        self.shard_of = shard_of
        self.mixed = mixed

    def order(self, epoch: int) -> NDArray[Any]:
        """[count]: the order of all units in an epoch."""
        if not self.policy.shuffles:
            return super().order(epoch)
        if epoch not in self._orders:
            self._orders = {epoch: windowed_order(self.shard_of, self.mixed, self.seed, epoch)}
        return self._orders[epoch]


def shard_sampler(
    dataset: ShardDataset,
    *,
    schema: Schema | None = None,
    policy: Policy | None = None,
    budget: Any = None,
    batch_size: int | None = None,
    lengths: Lengths = None,
    cost: Cost | str | Mapping[str, Cost | str] | None = None,
    mixed: int = 16,
    seed: int = 0,
    rank: int | None = None,
    world_size: int | None = None,
    **options: Any,
) -> PlanSampler:
    """The batch sampler of a data set of shards; see :func:`shards` for arguments.

    Raises:
        ValueError: arguments do not fit together; or the lengths to plan by are not clear.
    """
    name = policy or ("random" if budget is None else "budget")
    if name not in get_args(Policy):
        raise ValueError(f"policy={policy!r} is none of {get_args(Policy)}")
    if (name == "budget") != (budget is not None) or (name == "budget") == (batch_size is not None):
        needs = "budget=... and no batch_size" if name == "budget" else "batch_size=... and no budget"
        raise ValueError(f"the policy {name!r} needs {needs}; got budget={budget}, batch_size={batch_size}")
    if mixed < 1:
        raise ValueError(f"mixed={mixed}: at least one shard")
    if lengths is None and name in ("random", "fixed"):
        values, charge = dataset.sizes(), cost
    else:
        values, charge = choose_lengths(dataset, schema, lengths, cost)
    common: dict[str, Any] = {"cost": charge, "rank": rank, "world_size": world_size, **options}
    sampler: PlanSampler
    if name == "budget":
        sampler = BudgetBatchSampler(values, budget, seed=seed, **common)
    elif name == "fixed":
        sampler = FixedBatchSampler(values, batch_size or 1, **common)
    else:
        made = BucketBatchSampler if name == "bucket" else RandomBatchSampler
        sampler = made(values, batch_size or 1, seed=seed, **common)
    units = sampler.plan.units
    samples = np.asarray(units.sample_of(np.arange(units.count)))
    plan = ShardPlanner(sampler.plan, dataset.shard_of(samples), mixed)
    sampler.replace_plan(plan, data={"shards": dataset.fingerprint}, policy={"mixed": mixed})
    return sampler


def shards(
    urls: Urls,
    *,
    schema: Schema | None = None,
    decode: Mapping[str, Decoder | None] | None = None,
    budget: Any = None,
    batch_size: int | None = None,
    policy: Policy | None = None,
    lengths: Lengths = None,
    cost: Cost | str | Mapping[str, Cost | str] | None = None,
    mixed: int = 16,
    seed: int = 0,
    rank: int | None = None,
    world_size: int | None = None,
    fields: Sequence[str] | None = None,
    map: Callable[[dict[str, Any]], Any] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    index: str | os.PathLike[str] | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    cache: str | os.PathLike[str] | None = None,
    cache_bytes: int = 10 * 10**9,
    safety: Safety = DEFAULT,
    options: Mapping[str, Any] | None = None,
    plan: Mapping[str, Any] | None = None,
    **loader: Any,
) -> Loader:
    """Packed batches of indexed shards.

        loader = packload.shards("data/*.tar", schema={"tokens.npy": "n"}, budget=16384)
        for batch in loader:
            ...

    Args:
        urls: the shards: paths, addresses, patterns with braces or stars, or a list of these; each with its
            index (``packload index``).
        schema: patterns by path, see :class:`packload.Collate`.
        decode: functions of a member's bytes, by field or by the end of its name; None: leave the bytes.
        budget, batch_size: what a batch's samples may cost together; or how many they are.
        policy: ``"budget"``, ``"bucket"``, ``"random"`` or ``"fixed"``; by default ``"budget"`` if a budget
            is given, else ``"random"``.
        lengths: what to plan by: a column of the index (``"txt.words"``), several (``("jpg.h", "jpg.w")``),
            a mapping of these by name, or an array of all samples' lengths. By default that of the one ragged
            field whose lengths the index has.
        cost: what a sample is charged, see :mod:`packload.cost`; by default its cells.
        mixed: shards whose samples are mixed at a time. With a cache, its size should hold so many, twice.
        seed: of the order.
        rank, world_size: by default those of ``torch.distributed``, else 0 and 1.
        fields, map, index, on_error, cache, cache_bytes, safety, options: see :class:`ShardDataset`.
        collate: by default ``packload.Collate(schema)``.
        plan: further arguments of the batch sampler: ``oversize``, ``drop_last``, ``padded``, ``buckets``.
        loader: further arguments of :class:`packload.Loader`: ``workers``, ``mode``, ``device``, ...

    Returns:
        A loader. ``loader.dataset`` is the :class:`ShardDataset`, with ``damages`` and ``skipped``;
        ``loader.batch_sampler`` the plan.

    Raises:
        ShardError: a shard or its index cannot be used; or processes see different data.
        ValueError: arguments do not fit together.
    """
    dataset = ShardDataset(
        urls,
        fields=fields,
        decode=decode,
        map=map,
        index=index,
        on_error=on_error,
        cache=cache,
        cache_bytes=cache_bytes,
        safety=safety,
        options=options,
    )
    sampler = shard_sampler(
        dataset,
        schema=schema,
        policy=policy,
        budget=budget,
        batch_size=batch_size,
        lengths=lengths,
        cost=cost,
        mixed=mixed,
        seed=seed,
        rank=rank,
        world_size=world_size,
        **(plan or {}),
    )
    _check_agreement(dataset.fingerprint, json.dumps(sampler.state_dict(), sort_keys=True))
    batches: Any = sampler
    if any([dataset.store.is_cached(url) for url in dataset.urls]):
        batches = AheadSampler(sampler, dataset)
    made = Collate(schema) if collate is None else collate
    return Loader(_cut(dataset, sampler, schema), batches, made, seed=seed, **loader)


def _cut(dataset: ShardDataset, sampler: PlanSampler, schema: Schema | None) -> Any:
    """The data set, or where the plan has pieces of samples one that cuts them."""
    if sampler.plan.units.bounds is None:
        return dataset
    axes = {name for pattern in parse_schema(schema).values() for name in pattern.names}
    if len(axes) != 1:
        raise ValueError(
            f"samples above the budget are to be cut, and the schema has the axes {sorted(axes)}: it must "
            "name one, in every field that is cut, e.g. {'tokens.npy': 'n'}."
        )
    return CutDataset(dataset, schema or {}, axes.pop())


def _check_agreement(samples: str, plan: str) -> None:
    """Refuse to start where processes would have different plans, and so different numbers of steps.

    Args:
        samples: what identifies the samples that this process sees.
        plan: the state of its plan.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (samples, plan))
    digests = [one for one, _ in told]
    others = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if others:
        raise ShardError(
            f"ranks {others} see other samples than rank 0 (digests {sorted(set(digests))}). Give all ranks "
            "the same shards in the same order, whole on every machine."
        )
    others = [rank for rank, (_, other) in enumerate(told) if other != told[0][1]]
    if others:
        raise ShardError(
            f"ranks {others} plan otherwise than rank 0: {told[others[0]][1]} and {told[0][1]}. Give all "
            "ranks the same indexes, lengths, budget, policy and seed."
        )

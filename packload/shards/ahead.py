"""The shards of the next window, fetched into the cache while those of this one are served."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .read import ShardDataset


class AheadSampler:
    """A batch sampler that tells the data set which shards come next.

    It is the plan's sampler in all else: what it does not have itself is asked of that.

    Args:
        sampler: of a plan with a :class:`~packload.shards.stream.ShardPlanner`.
        dataset: whose cache is filled.
    """

    batch_size = None

    def __init__(self, sampler: Any, dataset: ShardDataset) -> None:
        self._sampler = sampler
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> _Ahead:
        return _Ahead(self._sampler, self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_sampler"], name)


class _Ahead(Iterator[Any]):
    def __init__(self, sampler: Any, dataset: ShardDataset) -> None:
        self._inner = iter(sampler)
        self._sampler = sampler
        self._dataset = dataset
        self._told: set[int] = set()
        self._groups: dict[int, list[int]] = {}
        self._epoch = -1

    def __iter__(self) -> _Ahead:
        return self

    def __next__(self) -> Any:
        batch = next(self._inner)
        if self._epoch != self._sampler.epoch:
            self._epoch = self._sampler.epoch
            self._groups, self._told = self._next_groups(), set()
        first = batch[0] if isinstance(batch[0], int) else batch[0].index
        shard = int(self._dataset.shard_of(np.array([first]))[0])
        for coming in self._groups.get(shard, ()):
            if coming not in self._told:
                self._told.add(coming)
                self._dataset.store.fetch(self._dataset.urls[coming], self._dataset.indexes[coming].tar_bytes)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """That of the plan's iterator."""
        state: dict[str, Any] = self._inner.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of the plan's iterator."""
        self._inner.load_state_dict(state)
        self._epoch = -1

    def _next_groups(self) -> dict[int, list[int]]:
        """For each shard those of the window after its own."""
        plan = self._sampler.plan
        shards = plan.shard_of[plan.order(self._epoch)]
        _, first = np.unique(shards, return_index=True)
        order = shards[np.sort(first)].tolist()
        windows = [order[i : i + plan.mixed] for i in range(0, len(order), plan.mixed)]
        return {shard: after for window, after in zip(windows, windows[1:]) for shard in window}

"""The shards of the plan's next window, fetched into the cache while those of this one are served."""

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
        self._window: tuple[int, int] | None = None

    def __iter__(self) -> _Ahead:
        return self

    def __next__(self) -> Any:
        batch = next(self._inner)
        at = self._inner.state_dict()
        window = (at["epoch"], at["cursor"])
        if window != self._window:
            self._window = window
            for shard in self._coming(*window):
                self._dataset.store.fetch(self._dataset.urls[shard], self._dataset.indexes[shard].tar_bytes)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """That of the plan's iterator."""
        state: dict[str, Any] = self._inner.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of the plan's iterator."""
        self._inner.load_state_dict(state)
        self._window = None

    def _coming(self, epoch: int, cursor: int) -> list[int]:
        """The shards of the plan's window after that which begins at a cursor, in the order of its units."""
        plan = self._sampler.plan
        if cursor >= plan.units.count:
            return []
        end = plan.window(epoch, cursor, self._sampler.world_size).end
        shards = plan.shard_of[plan.order(epoch)[end : 2 * end - cursor]]
        found, first = np.unique(shards, return_index=True)
        order: list[int] = found[np.argsort(first)].tolist()
        return order

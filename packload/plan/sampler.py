"""What all batch samplers share: ranks, iteration, epochs, state."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import Sampler

from ..cost import Lengths
from .caps import Caps, count_of
from .planner import Planner
from .policy import Policy
from .state import Position, read, write
from .units import Item, Oversize, Units, make_units
from .window import Window


class PlanSampler(Sampler[list[Item]]):
    """Hands out this rank's batches of a plan: lists of indices, for ``DataLoader(batch_sampler=...)``.

    Attributes:
        plan: the planner; ``plan.window(epoch, cursor, world_size)`` is the grid of all ranks.
        seed: of the plan.
        batch_size: None, as batches differ in size.
        drop_last: whether an epoch's end that makes no whole step is dropped.
    """

    batch_size = None

    def __init__(
        self,
        lengths: Lengths,
        caps: Caps,
        policy: Policy,
        units: Units,
        *,
        seed: int,
        rank: int | None,
        world_size: int | None,
        oversize: Oversize,
        drop_last: bool,
    ) -> None:
        self.plan = Planner(units, policy, seed, drop_last)
        self.seed, self.drop_last = seed, drop_last
        self._rank, self._world_size = _check_ranks(rank, world_size)
        self._identity = {
            "policy": {
                **policy.identity(),
                "cost": _hash(units.caps.charge(lengths)[::2]),
                "oversize": oversize,
                "drop_last": drop_last,
            },
            "data": {"samples": count_of(lengths), "hash": _hash(lengths)},
        }
        self._begin = Position(0)
        self._moved = 0
        self._live: _Live | None = None
        self._epoch_over = False

    @property
    def rank(self) -> int:
        """This process's rank: as given, or that of ``torch.distributed``, or 0."""
        if self._rank is not None:
            return self._rank
        return dist.get_rank() if _distributed() else 0

    @property
    def world_size(self) -> int:
        """The number of ranks: as given, or that of ``torch.distributed``, or 1."""
        if self._world_size is not None:
            return self._world_size
        return dist.get_world_size() if _distributed() else 1

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or that the next iteration serves."""
        return self._begin.epoch

    @property
    def step(self) -> int:
        """Steps of the epoch that were served before this iteration: more than 0 after a resume."""
        return self._begin.steps

    @property
    def sampler(self) -> EpochForwarder:
        """What frameworks look for to call ``set_epoch`` on."""
        return EpochForwarder(self)

    @property
    def counts(self) -> dict[str, int]:
        """What is not a sample in one batch, whole: over the data, and in the epoch under way.

        Samples ``skipped``, ``alone``, ``split`` (to so many ``pieces``) and ``truncated`` because they are
        above the budget; units ``dropped`` from, and ``repeated`` in, the epoch.
        """
        windows = list(self.windows())
        return {
            **self.plan.units.counts,
            "dropped": sum(w.dropped for w in windows),
            "repeated": sum(w.repeated for w in windows),
        }

    def windows(self, epoch: int | None = None) -> Iterator[Window]:
        """The windows of an epoch, for all ranks; by default those left of the epoch under way."""
        begin = self._begin if epoch is None or epoch == self._begin.epoch else Position(epoch)
        cursor = begin.cursor
        while cursor < self.plan.units.count:
            window = self.plan.window(begin.epoch, cursor, self.world_size)
            yield window
            cursor = window.end

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch.

        The epoch that a loaded state stands in is kept where it stands. An iterator that runs already is not
        touched.
        """
        if epoch != self._begin.epoch or self._epoch_over:
            self._go_to(Position(int(epoch)))

    def __len__(self) -> int:
        """Steps of the epoch under way, those before a resume included."""
        return self._begin.served + sum(window.steps for window in self.windows())

    def __iter__(self) -> PlanIterator:
        return PlanIterator(self)

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Where the run stands: a small JSON-able dict, the same for all ranks.

        Args:
            consumed: batches of this epoch that were used, those before a resume included. A ``DataLoader``
                takes batches from here before they are used, so that nobody else can know.

        Raises:
            RuntimeError: without ``consumed``, when batches have been handed out.
            ValueError: ``consumed`` is less than was served before, or more than was handed out.
        """
        if consumed is not None:
            return self._write(self._after(consumed))
        if self._live is None:
            return self._write(self._begin)
        if _called_by("torchdata."):
            return self._write(self._live.position)
        raise RuntimeError(
            f"{self._live.position.steps} batches of epoch {self._begin.epoch} have been handed out, and only you "
            "know how many were used: a DataLoader fetches ahead. Say so, state_dict(consumed=k), with k batches "
            f"of this epoch used ({self.step} of them before this run); or take the state of a "
            "StatefulDataLoader or a packload.Loader, which know."
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state. Iterators that run already raise at their next batch.

        Raises:
            ValueError: the state is of other data, another policy or seed, or lies inside a window that was
                planned for another world size.
        """
        self._go_to(self._read(state))

    def _go_to(self, position: Position) -> None:
        self._begin, self._live, self._epoch_over = position, None, False
        self._moved += 1

    def _write(self, position: Position) -> dict[str, Any]:
        return write(position, self.seed, self._identity)

    def _read(self, state: Mapping[str, Any]) -> Position:
        position = read(state, self.seed, self._identity, self.plan.units.count)
        if position.step and position.world_size != self.world_size:
            raise ValueError(
                f"the state is {position.step} steps into a window planned for {position.world_size} ranks; here are "
                f"{self.world_size}. The number of ranks can change where a window ends."
            )
        return replace(position, world_size=self.world_size)

    def _start(self) -> Position:
        """Where the next iteration begins."""
        begin = Position(self._begin.epoch + 1) if self._epoch_over else self._begin
        return replace(begin, world_size=self.world_size)

    def _after(self, consumed: int) -> Position:
        """The position after so many steps of the epoch."""
        handed = (
            self._live.position.steps if self._live and self._live.position.epoch == self.epoch else self.step
        )
        if not self.step <= consumed <= handed:
            raise ValueError(
                f"consumed={consumed}: {handed} batches of epoch {self.epoch} have been handed out, {self.step} of "
                "them before this run. Give the number of batches of this epoch that were used, those included."
            )
        at = replace(self._begin, world_size=self.world_size)
        for window in self.windows():
            if consumed < at.served + window.steps:
                return replace(at, step=consumed - at.served)
            at = after(at, window)
        return at


class _Live:
    """The position of the iterator that was begun last, shared with the sampler."""

    def __init__(self, position: Position) -> None:
        self.position = position


class PlanIterator(Iterator[list[Item]]):
    """The batches of one rank, from where the sampler stands to the end of the epoch.

    Its own state is exact: that after the batch it returned last.
    """

    def __init__(self, sampler: PlanSampler) -> None:
        self._sampler = sampler
        self._live: _Live | None = None
        self._moved = 0
        self._window: Window | None = None

    def __iter__(self) -> PlanIterator:
        return self

    def __next__(self) -> list[Item]:
        live = self._live or self._bind(self._sampler._start())
        if self._moved != self._sampler._moved:
            raise RuntimeError(
                "the sampler was moved, by load_state_dict or set_epoch, after this iterator began. Start a new one."
            )
        at = live.position
        while self._window is None or at.cursor != self._window.cursor:
            if at.cursor >= self._sampler.plan.units.count:
                self._end(at)
                raise StopIteration
            self._window = self._sampler.plan.window(at.epoch, at.cursor, at.world_size)
            if not self._window.steps:
                at = after(at, self._window)
        cell = self._window.cell(at.step, self._sampler.rank)
        at = replace(at, step=at.step + 1)
        live.position = after(at, self._window) if at.step == self._window.steps else at
        return cell

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands after the last batch; the next epoch's beginning after the end was told."""
        sampler = self._sampler
        if self._live is None or (sampler._epoch_over and sampler._live is self._live):
            return sampler._write(sampler._start())
        return sampler._write(self._live.position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state. Raises as the sampler's."""
        self._window = None
        self._bind(self._sampler._read(state))

    def _bind(self, position: Position) -> _Live:
        sampler = self._sampler
        if sampler._epoch_over or position.epoch != sampler._begin.epoch or self._live is not None:
            sampler._begin, sampler._epoch_over = position, False
        self._live = sampler._live = _Live(position)
        self._moved = sampler._moved
        return self._live

    def _end(self, at: Position) -> None:
        assert self._live is not None
        self._live.position = at
        if self._sampler._live is self._live:
            self._sampler._epoch_over = True


class EpochForwarder:
    """Hands ``set_epoch`` on to a batch sampler: frameworks call it on ``batch_sampler.sampler``."""

    def __init__(self, target: PlanSampler) -> None:
        self._target = target

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""
        self._target.set_epoch(epoch)


def after(position: Position, window: Window) -> Position:
    """The position at the end of a window."""
    return replace(
        position,
        cursor=window.end,
        window=position.window + 1,
        step=0,
        served=position.served + window.steps,
    )


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _check_ranks(rank: int | None, world_size: int | None) -> tuple[int | None, int | None]:
    if (rank is None) != (world_size is None):
        raise ValueError(f"give both rank and world_size, or neither; got {rank} and {world_size}.")
    if rank is not None and world_size is not None and not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in a world of {world_size}.")
    return rank, world_size


def _called_by(package: str) -> bool:
    """Whether the caller's caller belongs to a package."""
    return sys._getframe(2).f_globals.get("__name__", "").startswith(package)


def _hash(value: Any) -> str:
    digest = hashlib.blake2b(digest_size=12)
    _update(digest, value)
    return digest.hexdigest()


def _update(digest: Any, value: Any) -> None:
    if isinstance(value, Mapping):
        for name, part in value.items():
            digest.update(repr(name).encode())
            _update(digest, part)
    elif isinstance(value, tuple):
        for part in value:
            _update(digest, part)
    else:
        digest.update(f"{value.dtype.str}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value))

"""What all batch samplers share: ranks, epochs, iteration, state."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from operator import index
from typing import Any, Self

import torch.distributed as dist
from torch.utils.data import BatchSampler, Sampler

from .caps import Budget, Costs, count_of, make_caps, read_lengths
from .planner import Planner
from .policy import Policy
from .state import Position, digest, read, write
from .units import Item, Oversize, Units, make_units
from .window import Span, Window

_RECIPE = (
    "A plan deals batches to ranks by itself: keep the framework from sharding its loader again (Lightning: "
    "Trainer(use_distributed_sampler=False); Accelerate and Trainer of transformers: leave the loader out of "
    "prepare()). The page on sampling has recipes."
)


class PlanSampler(Sampler[list[Item]]):
    """A policy's batches for this rank: lists of indices, for ``DataLoader(dataset, batch_sampler=...)``.

    The order is that of a plan made ahead, so it is the same for any number of workers. Each iteration serves
    an epoch; the one after a whole epoch serves the next, and ``set_epoch`` names another.

    Attributes:
        plan: makes the windows, the grids [steps, ranks] of batches.
        seed: of the plan.
        batch_size: None, as batches differ in size.
    """

    batch_size = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse a sampler in place of lengths: so frameworks re-create batch samplers to shard them."""
        if args and isinstance(args[0], Sampler):
            raise TypeError(f"{cls.__name__} is made from lengths; got a {type(args[0]).__name__}. {_RECIPE}")
        return super().__new__(cls)

    def __init__(
        self,
        lengths: Any,
        make_policy: Callable[[Units], Policy],
        *,
        budget: Budget | None = None,
        cost: Costs = None,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        oversize: Oversize = "raise",
        drop_last: bool = False,
    ) -> None:
        """
        Args:
            lengths: of all samples, in the data set's order: integers [N], [N, D], or by field.
            make_policy: makes the policy once it is known what samples are charged.
            budget: one cap or several by name; None if the policy has none.
            cost: what samples are charged; one of ``packload.cost`` or any function of lengths.
            seed: of the plan, any integer.
            rank: this process's; by default that of ``torch.distributed``, or 0.
            world_size: the number of ranks; by default that of ``torch.distributed``, or 1.
            oversize: what becomes of samples above the budget.
            drop_last: drop what makes no whole step at an epoch's end, else split batches for it.
        """
        read = read_lengths(lengths)
        units = make_units(read, make_caps(budget, cost, read), oversize)
        policy = make_policy(units)
        self.seed, self._drop_last = as_integer(seed, "seed"), bool(drop_last)
        self.plan = Planner(units, policy, self.seed, self._drop_last)
        self._rank, self._world_size = _check_ranks(rank, world_size)
        self._identity = {
            "data": {"samples": count_of(read), "lengths": digest(read)},
            "policy": {
                **policy.identity(),
                "costs": digest(units.charges, units.loads),
                "oversize": oversize,
                "drop_last": self._drop_last,
            },
        }
        self._begin = Position(0)
        self._live: _Live | None = None
        self._loads = 0

    def replace_plan(self, plan: Planner, *, data: Mapping[str, Any], policy: Mapping[str, Any]) -> None:
        """Put another planner of the same units in place, before the first iteration.

        Args:
            plan: makes the windows.
            data, policy: what else identifies the data and the way they are planned, JSON-able; a state is
                refused where it differs.
        """
        self.plan = plan
        self._identity = {
            "data": {**self._identity["data"], **data},
            "policy": {**self._identity["policy"], **policy},
        }

    @property
    def rank(self) -> int:
        """This process's rank."""
        if self._rank is not None:
            return self._rank
        return dist.get_rank() if _distributed() else 0

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        if self._world_size is not None:
            return self._world_size
        return dist.get_world_size() if _distributed() else 1

    @property
    def epoch(self) -> int:
        """The epoch under way: that of the iteration begun last, or of the one to come if there was none."""
        return self._begin.epoch

    @property
    def step(self) -> int:
        """Steps of the epoch under way that were served before this run: above 0 after a resume."""
        return self._begin.steps

    @property
    def sampler(self) -> EpochForwarder:
        """What frameworks call ``set_epoch`` on."""
        return EpochForwarder(self)

    @property
    def skipped(self) -> int:
        """How many samples are in no batch because they are above the budget; nothing is planned for it."""
        return self.plan.units.counts["skipped"]

    @property
    def counts(self) -> dict[str, int]:
        """How many samples are in no batch, in several, or not whole; the epoch is planned for it.

        Samples ``skipped``, ``alone``, ``split`` (to so many ``pieces``) and ``truncated`` because they are
        above the budget; units ``dropped`` from the epoch under way and ``repeated`` in it.
        """
        spans = [span for _, span in self._walk(self._here(self._begin))]
        dropped, repeated = sum(span.dropped for span in spans), sum(span.repeated for span in spans)
        return {**self.plan.units.counts, "dropped": dropped, "repeated": repeated}

    def windows(self, epoch: int | None = None) -> Iterator[Window]:
        """The plan for all ranks, window after window: of an epoch, by default of what this run serves.

        Args:
            epoch: any; by default the one under way, from where this run began in it.
        """
        begin = self._here(self._begin if epoch is None else Position(epoch))
        return (self.plan.window(at.epoch, at.cursor, at.world_size) for at, _ in self._walk(begin))

    def set_epoch(self, epoch: int) -> None:
        """Serve an epoch next, from its beginning; or from where a loaded state stands in it.

        An iterator that runs is not touched.

        Raises:
            TypeError, ValueError: it is no integer, or below 0.
        """
        number = as_integer(epoch, "epoch")
        if number < 0:
            raise ValueError(f"epochs count from 0; got {epoch}.")
        if number != self._begin.epoch or self._all_served():
            self._go_to(Position(number))

    def __len__(self) -> int:
        """Steps of the epoch under way, those before a resume included."""
        return self._begin.served + sum(span.steps for _, span in self._walk(self._here(self._begin)))

    def __iter__(self) -> PlanIterator:
        self._check_owner(sys._getframe(1).f_locals.get("self"))
        return PlanIterator(self)

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Where the run stands: a small JSON-able dict, the same for all ranks.

        Args:
            consumed: how many batches of this epoch were used, those before a resume (``step``) included. A
                DataLoader fetches batches ahead, so that only its user can know.

        Raises:
            RuntimeError: without ``consumed``, if batches were handed out.
            ValueError: ``consumed`` is less than ``step``, or more than was handed out.
        """
        if consumed is not None:
            return self._write(self._after(as_integer(consumed, "consumed")))
        if self._live is None:
            return self._write(self._next())
        # Loaders of torchdata ask right after they took a batch, and keep the answer until it is used.
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torchdata."):
            return self._write(self._live.position)
        raise RuntimeError(
            f"{self._live.position.steps} batches of epoch {self.epoch} were handed out, and a DataLoader "
            "fetches ahead: how many were used? Tell state_dict(consumed=...), counting this epoch's batches"
            f"{f' with the {self.step} before this run' if self.step else ''}, or save the state of a "
            "StatefulDataLoader or packload.Loader, which know."
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state stands. Iterators that run raise at their next batch.

        Raises:
            ValueError: the state is of other data, another policy or seed, or lies inside a window that was
                planned for another world size.
        """
        self._go_to(self._read(state))
        self._loads += 1

    def _go_to(self, position: Position) -> None:
        self._begin, self._live = position, None

    def _all_served(self) -> bool:
        """Whether the epoch's last batch was handed out: not all who take it ask for one more."""
        if self._live is None or self._live.position.step:
            return False
        return not any(span.steps for _, span in self._walk(self._live.position))

    def _write(self, position: Position) -> dict[str, Any]:
        return write(position, self.seed, self._identity)

    def _read(self, state: Mapping[str, Any]) -> Position:
        at = self._here(read(state, self.seed, self._identity, self.plan.units.count))
        if at.step:
            ends = (
                at.cursor < self.plan.units.count and self.plan.span(at.epoch, at.cursor, at.world_size).steps
            )
            if at.step >= ends:
                raise ValueError(f"the state's {at} is no place in its window, which has {int(ends)} steps.")
        return at

    def _here(self, position: Position) -> Position:
        """A position in the plan of this world size."""
        ranks = self.world_size
        if position.step and position.world_size != ranks:
            raise ValueError(
                f"step {position.steps} of epoch {position.epoch} is step {position.step} of a window "
                f"planned for {position.world_size} ranks, and here are {ranks}. The number of ranks can "
                f"change only where a window ends; this one goes on with {position.world_size}."
            )
        return replace(position, world_size=ranks)

    def _next(self) -> Position:
        """Where the next iteration begins."""
        launched = os.environ.get("WORLD_SIZE", "1")
        if self._world_size is None and not _distributed() and launched not in ("", "0", "1"):
            warnings.warn(
                f"WORLD_SIZE is {launched}, and torch.distributed is not set up: every process serves all "
                "samples. Set it up before the loader is used, or give rank and world_size.",
                RuntimeWarning,
                stacklevel=3,
            )
        return self._here(Position(self._begin.epoch + 1) if self._all_served() else self._begin)

    def _after(self, consumed: int) -> Position:
        """The position after so many steps of the epoch under way."""
        handed = self.step if self._live is None else self._live.position.steps
        if not self.step <= consumed <= handed:
            raise ValueError(
                f"consumed={consumed}: {handed} batches of epoch {self.epoch} were handed out, {self.step} "
                "of them before this run. Count the batches of this epoch that were used, those included."
            )
        end = self._here(self._begin)
        for at, span in self._walk(end):
            if consumed < at.served + span.steps:
                return replace(at, step=consumed - at.served)
            end = at.after(span)
        return end

    def _walk(self, at: Position) -> Iterator[tuple[Position, Span]]:
        """The windows of an epoch from a position in it on: where each begins, and its numbers."""
        while at.cursor < self.plan.units.count:
            span = self.plan.span(at.epoch, at.cursor, at.world_size)
            yield at, span
            at = at.after(span)

    def _check_owner(self, owner: Any) -> None:
        """Look at who asks for an iterator, and refuse what would go wrong in silence."""
        if not isinstance(owner, BatchSampler):
            return
        if getattr(owner, "num_processes", 1) > 1 and getattr(owner, "batch_sampler", None) is self:
            if self.world_size > 1:
                taken = f"{type(owner).__name__} deals out what is one rank's of {self.world_size} already"
                raise RuntimeError(f"{taken}. {_RECIPE}")
        elif getattr(owner, "sampler", None) is self:
            raise TypeError(
                f"{type(self).__name__} yields batches: give it as batch_sampler=, not as sampler=."
            )


class _Live:
    """The position of the iterator begun last, shared between it and the sampler."""

    def __init__(self, position: Position) -> None:
        self.position = position


class PlanIterator(Iterator[list[Item]]):
    """One rank's batches, from where the sampler stands to the end of the epoch.

    Nothing is fixed before the first batch is asked for. The iterator's own state is exact: it is that after
    the batch that was returned last.
    """

    def __init__(self, sampler: PlanSampler) -> None:
        self._sampler = sampler
        self._live: _Live | None = None
        self._loads = 0
        self._told = False
        self._window: Window | None = None

    def __next__(self) -> list[Item]:
        sampler = self._sampler
        live = self._live or self._begin(sampler._next())
        if self._loads != sampler._loads:
            raise RuntimeError(
                "a state was loaded into the sampler after this iterator began. Start a new iterator: it "
                "goes on where the state stands."
            )
        at = live.position
        window = self._window
        while window is None or window.cursor != at.cursor:
            if at.cursor >= sampler.plan.units.count:
                live.position, self._told = at, True
                raise StopIteration
            window = self._window = sampler.plan.window(at.epoch, at.cursor, at.world_size)
            if not window.steps:
                at = at.after(window.span)
        cell = window.cell(at.step, sampler.rank)
        at = replace(at, step=at.step + 1)
        live.position = at.after(window.span) if at.step == window.steps else at
        return cell

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands: after the batch returned last, or in the next epoch once the end was told."""
        sampler = self._sampler
        if self._live is None:
            return sampler._write(sampler._next())
        at = self._live.position
        return sampler._write(Position(at.epoch + 1, world_size=at.world_size) if self._told else at)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state stands; raises as the sampler's."""
        self._window = None
        self._begin(self._sampler._read(state))

    def _begin(self, position: Position) -> _Live:
        sampler = self._sampler
        self._live, self._loads, self._told = _Live(position), sampler._loads, False
        sampler._begin, sampler._live = position, self._live
        return self._live


class EpochForwarder:
    """Hands ``set_epoch`` on to a batch sampler: frameworks look for it on ``batch_sampler.sampler``."""

    def __init__(self, target: PlanSampler) -> None:
        self._target = target

    def set_epoch(self, epoch: int) -> None:
        """See :meth:`PlanSampler.set_epoch`."""
        self._target.set_epoch(epoch)


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _check_ranks(rank: int | None, world_size: int | None) -> tuple[int | None, int | None]:
    if (rank is None) != (world_size is None):
        raise ValueError(f"give both rank and world_size, or neither; got {rank} and {world_size}.")
    if rank is None or world_size is None:
        return None, None
    rank, world_size = as_integer(rank, "rank"), as_integer(world_size, "world_size")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of {world_size} ranks.")
    return rank, world_size


def as_integer(value: Any, what: str) -> int:
    """An integer as an int.

    Raises:
        TypeError: it is none: a fraction is not cut off, and a text not read.
    """
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"{what} must be an integer; got {value!r}.") from None

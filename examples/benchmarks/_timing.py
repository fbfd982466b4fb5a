"""Timing for machines that are shared: every side in one run, in turn, and medians of many rounds."""

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Case:
    """What is timed: ``call(prepare())``, of which only the call counts.

    Without ``fresh``, ``prepare`` runs once and every call gets the same argument; with it, every call gets
    an argument of its own, so that nothing a call caches on its argument helps the next.
    """

    call: Callable[[Any], object]
    prepare: Callable[[], Any] = lambda: None
    fresh: bool = False


def interleaved(
    cases: Mapping[str, Case], *, rounds: int, calls: int = 1, warm_up: int = 1
) -> dict[str, list[float]]:
    """Seconds of one call, a figure a round, for each case.

    A round times ``calls`` calls of every case; the case that begins changes from round to round. The first
    ``warm_up`` rounds are not counted. The garbage collector rests meanwhile.
    """
    names = list(cases)
    arguments = {name: case.prepare() for name, case in cases.items()}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with _no_garbage_collection():
        for turn in range(warm_up + rounds):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                one = _time(cases[name], arguments[name], calls)
                if turn >= warm_up:
                    seconds[name].append(one)
    return seconds


def _time(case: Case, argument: Any, calls: int) -> float:
    arguments = [case.prepare() for _ in range(calls)] if case.fresh else [argument] * calls
    call = case.call
    start = time.perf_counter()
    for argument in arguments:
        call(argument)
    return (time.perf_counter() - start) / calls


def median_difference(one: list[float], other: list[float]) -> float:
    """The median of ``one - other``, round by round: what the rounds share cancels out."""
    return statistics.median(a - b for a, b in zip(one, other, strict=True))


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """Run torch's operators on ``number`` threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

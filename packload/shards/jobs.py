"""Work on many shards in several processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")
Progress = Callable[[int, int], None]
"""Told after every shard: how many are done, and of how many."""


def run_jobs(work: Callable[[T], R], jobs: Sequence[T], workers: int, progress: Progress | None) -> list[R]:
    """``[work(job) for job in jobs]``, in processes.

    When one raises, those that run are finished, the others are not begun, and the error goes on.

    Args:
        work: a function that can be pickled.
        jobs: its arguments.
        workers: processes; with less than two the work is done here.
        progress: called after each job.
    """
    results: dict[int, R] = {}
    for number, result in _results(work, jobs, min(workers, len(jobs))):
        results[number] = result
        if progress is not None:
            progress(len(results), len(jobs))
    return [results[number] for number in range(len(jobs))]


def _results(work: Callable[[Any], R], jobs: Sequence[Any], workers: int) -> Iterator[tuple[int, R]]:
    if workers < 2:
        for number, job in enumerate(jobs):
            yield number, work(job)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = {pool.submit(work, job): number for number, job in enumerate(jobs)}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise

"""Passes over a loader: one at a time, and each begins anew."""

from __future__ import annotations

import pytest
import torch

from packload import Loader

DATA = [torch.full((n + 1,), float(n)) for n in range(12)]
ORDER = [[k, k + 1] for k in range(0, 12, 2)]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_left_of_a_pass_that_another_ended_raises(workers: int) -> None:
    loader = Loader(DATA, ORDER, workers=workers)
    first = iter(loader)
    next(first)
    second = iter(loader)
    with pytest.raises(RuntimeError, match="one is under way at once"):
        next(first)
    assert [batch.values[0].item() for batch in second] == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_that_came_to_its_end_stays_at_its_end(workers: int) -> None:
    loader = Loader(DATA, ORDER, workers=workers)
    first = iter(loader)
    assert len(list(first)) == 6
    second = iter(loader)
    assert next(first, None) is None
    assert len(list(second)) == 6


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterator_as_batch_sampler_serves_one_pass_and_says_so_after_it(workers: int) -> None:
    loader = Loader(DATA, iter(ORDER), workers=workers)
    assert len(list(loader)) == 6
    with pytest.raises(RuntimeError, match="iterator.*used it up"):
        list(loader)

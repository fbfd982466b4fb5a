"""Datasets that can be pickled, and what is expected of batches of them."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

import packload


class Ragged:
    """``size`` samples of 0 to 9 numbers, all made from their index."""

    def __init__(self, size: int = 40) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        length = index * 7 % 10
        return {"x": np.arange(length, dtype=np.float32) + 100 * index, "index": index}


class Fetched(Ragged):
    """The same with ``__getitems__`` alone in use."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise AssertionError("__getitems__ is there")

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        return [super(Fetched, self).__getitem__(index) for index in indices]


class Bad(Ragged):
    """Calls ``fault`` at one index."""

    def __init__(self, at: int, fault: Callable[[], Any]) -> None:
        super().__init__()
        self.at, self.fault = at, fault

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.at:
            self.fault()
        return super().__getitem__(index)


class Slow(Ragged):
    """Takes a while over the first samples, so that batches are done out of order."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index % 8 == 0:
            time.sleep(0.02)
        return super().__getitem__(index)


class Random(Ragged):
    """Draws numbers by the seed of its batch."""

    def __getitem__(self, index: int) -> float:
        return float(np.random.default_rng([packload.batch_seed(), index]).random())


class GloballyRandom(Ragged):
    """Draws numbers from the generators of the process."""

    def __getitem__(self, index: int) -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(()))


class Named(ValueError):
    """An error that takes other arguments than its message, and cannot be pickled."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__(f"{name} has {number}")


def value_error() -> None:
    raise ValueError("a bad sample")


def named_error() -> None:
    raise Named("the sample", 3)


def exit_process() -> None:
    raise SystemExit(3)


def kill_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleep_long() -> None:
    time.sleep(60)


def many_tensors(samples: list[Any]) -> list[torch.Tensor]:
    """A collate function that gives 64 tensors of 10 floats."""
    return [torch.full((10,), float(samples[0]["index"] + k)) for k in range(64)]


def by_hand(samples: list[Any]) -> dict[str, Any]:
    """A collate function of another kind."""
    return {
        "x": torch.cat([torch.from_numpy(sample["x"]) for sample in samples]),
        "index": [sample["index"] for sample in samples],
        "text": "abc",
    }


def batches(size: int = 40, each: int = 4) -> list[list[int]]:
    """Index lists in an order of their own."""
    order = [index * 13 % size for index in range(size)]
    return [order[k : k + each] for k in range(0, size, each)]


def check(batch: Any, indices: list[int]) -> None:
    """Compare a batch of :class:`Ragged` with its samples."""
    assert batch.index.tolist() == indices
    offsets = batch.x.grid.offsets.tolist()
    for k, index in enumerate(indices):
        expected = torch.arange(index * 7 % 10, dtype=torch.float32) + 100 * index
        assert torch.equal(batch.x.values[offsets[k] : offsets[k + 1]], expected)

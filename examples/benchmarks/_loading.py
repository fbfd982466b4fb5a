"""The sides that :mod:`examples.benchmarks.loader` compares: data, collate functions, timed passes."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from packload import Loader

SAMPLES, PAYLOAD = 64, 20_000
"""Samples a batch, and bytes of float32 that a sample has on average."""
SEPARATOR = -100
CHAINS = Path(__file__).parents[1] / "data" / "ca_chains.npz"


class Arrays:
    """Samples in memory: ``count`` tensors [n, width] of float32, n uniform around the mean payload."""

    def __init__(self, count: int, width: int = 1, fields: int = 1, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        mean = PAYLOAD // (4 * width * fields)
        self.samples = [
            {
                f"f{k}": torch.from_numpy(generator.random((int(n), width), dtype=np.float32).squeeze(-1))
                if width == 1
                else torch.from_numpy(generator.random((int(n), width), dtype=np.float32))
                for k, n in enumerate(generator.integers(mean // 2, mean + mean // 2 + 1, fields))
            }
            for _ in range(count)
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.samples[index]


class Plain(Arrays):
    """The first field alone."""

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]["f0"]


def as_list(samples: list[Any]) -> list[Any]:
    """The collate function that leaves samples as they are."""
    return samples


def cat_and_offsets(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The collate function that one writes by hand: all rows, and where samples begin."""
    lengths = torch.tensor([len(sample) for sample in samples])
    return torch.cat(samples), torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


class Images:
    """Real pictures, decoded when they are asked for: uint8 arrays [3, h, w]."""

    def __init__(self) -> None:
        spec = find_spec("mvtbdata")
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError("the pictures are those of mvtb-data: pip install mvtb-data==1.6.1")
        root = Path(spec.submodule_search_locations[0])
        self.paths = sorted(p for p in root.rglob("*") if p.suffix.lower() in (".png", ".jpg", ".jpeg"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Image.Image:
        with Image.open(self.paths[index]) as image:
            return image.convert("RGB")


def padded_images(images: Sequence[Image.Image]) -> tuple[Tensor, Tensor]:
    """Pictures [B, 3, H, W] padded to the largest, and their sizes [B, 2]."""
    arrays = [torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1) for image in images]
    sizes = torch.tensor([array.shape[1:] for array in arrays])
    out = torch.zeros(len(arrays), 3, *sizes.amax(0).tolist(), dtype=torch.uint8)
    for row, array in zip(out, arrays):
        row[:, : array.shape[1], : array.shape[2]] = array
    return out, sizes


class Chains:
    """Real protein chains: CA coordinates [n, 3] and distances [n, n], both over the residues."""

    def __init__(self) -> None:
        with np.load(CHAINS) as file:
            self.coordinates, self.offsets, self.names = file["xyz"], file["offsets"], file["names"]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = self.coordinates[self.offsets[index] : self.offsets[index + 1]]
        squares = (x * x).sum(1)
        distances = np.sqrt(np.maximum(squares[:, None] + squares - 2 * (x @ x.T), 0))
        return {"name": str(self.names[index]), "xyz": x, "distances": distances}


def padded_chains(samples: list[dict[str, Any]]) -> tuple[Tensor, Tensor, Tensor]:
    """Coordinates [B, N, 3] and distances [B, N, N] padded to the longest chain, and lengths [B]."""
    lengths = [len(sample["xyz"]) for sample in samples]
    longest = max(lengths)
    xyz = torch.zeros(len(samples), longest, 3)
    distances = torch.zeros(len(samples), longest, longest)
    for k, (sample, n) in enumerate(zip(samples, lengths)):
        xyz[k, :n] = torch.from_numpy(sample["xyz"])
        distances[k, :n, :n] = torch.from_numpy(sample["distances"])
    return xyz, distances, torch.tensor(lengths)


# ---------------------------------------------------------------- passes


def index_lists(samples: int, batches: int, each: int = SAMPLES) -> list[list[int]]:
    """``batches`` lists of indices, round and round."""
    return [[(each * k + j) % samples for j in range(each)] for k in range(batches)]


def dataloader(dataset: Any, batches: list[list[int]], collate: Callable[[Any], Any]) -> DataLoader:
    """A DataLoader with two worker processes that stay alive from pass to pass."""
    return DataLoader(
        dataset, batch_sampler=batches, collate_fn=collate, num_workers=2, persistent_workers=True
    )


def loader(dataset: Any, batches: list[list[int]], collate: Any, **options: Any) -> Loader:
    """A Loader with two workers that stay alive from pass to pass."""
    return Loader(dataset, batches, collate, workers=2, persistent_workers=True, **options)


def pass_over(batches: Any) -> float:
    """Seconds a batch of one pass, from when the first one is there: workers have started by then."""
    iterator = iter(batches)
    next(iterator)
    begin, count = time.perf_counter(), 0
    for _ in iterator:
        count += 1
    return (time.perf_counter() - begin) / count


def in_turn(sides: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Seconds a batch of every side, a figure a round, after a round that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, side in sides.items():
            gc.collect()
            one = pass_over(side)
            if turn:
                seconds[name].append(one)
    return seconds


def consumer_microseconds(batches: Any, look: Callable[[Any], None]) -> list[float]:
    """CPU microseconds of the consumer's thread, a figure a batch: ``next`` and ``look``.

    Between them the thread computes for about a millisecond, as a loop does that has a use for its batches.
    """
    x = torch.randn(160, 160)
    figures: list[float] = []
    iterator = iter(batches)
    next(iterator)
    while True:
        for _ in range(4):
            x = torch.tanh(x @ x)
        begin = time.thread_time()
        try:
            batch = next(iterator)
        except StopIteration:
            return figures
        look(batch)
        figures.append(1e6 * (time.thread_time() - begin))


def descriptors_per_batch(batches: Any, held: int) -> float:
    """Open files that each of a number of held batches adds."""
    kept, iterator = [], iter(batches)
    kept.append(next(iterator))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(held):
        kept.append(next(iterator))
    return (len(os.listdir("/proc/self/fd")) - before) / held


@contextlib.contextmanager
def closing(*loaders: Any) -> Iterator[None]:
    """End the workers of loaders at the end."""
    try:
        yield
    finally:
        for one in loaders:
            if isinstance(one, Loader):
                one.close()
            else:
                one._iterator = None  # a DataLoader ends its workers when its iterator goes

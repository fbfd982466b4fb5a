"""Batches out of shards, beside webdataset with padded batches: ``python -m examples.benchmarks.shards``.

Both sides read the same shards with as many workers, in random order, and are timed in turn, an epoch each,
with workers that are already there. webdataset: its own decoders, a shuffle buffer, ``batched`` with padding
to the largest sample, ``WebLoader``. packload: ``packload.shards``. Memory is that of the process and all its
children together (the proportional set size), at its highest in the first epoch. CPU is what all of them used
for a sample; it depends less on other work on the machine than time does.

Of the three kinds, ``tokens`` are reviews stored as numbers, ``words`` reviews stored as text that workers
split and number, ``jpg`` are pictures.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset as wds
from torch.nn.utils.rnn import pad_sequence

import packload
from examples.benchmarks._timing import Case, interleaved
from examples.pictures import views
from packload.demo.data import Vocabulary, read_reviews, reviews_file, split_words
from packload.shards.indexing import index_shards

WORDS = 20_000
BATCH = 64
PICTURES = 16


@dataclass
class Side:
    """One way to read: makes a loader, and counts the samples of a batch."""

    name: str
    make: Callable[[], Iterable[Any]]


class Encode:
    """Turns a review of text into one of numbers."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": self.vocabulary.encode(split_words(sample["txt"])), "cls": sample["cls"]}


def pad_tokens(name: str, samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A padded batch of sequences, with lengths."""
    rows = [torch.from_numpy(sample[name]) for sample in samples]
    return {
        "tokens": pad_sequence(rows, batch_first=True),
        "lengths": torch.tensor([len(row) for row in rows]),
        "cls": torch.tensor([sample["cls"] for sample in samples]),
    }


def pad_images(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch of images [B, H, W, 3] with zeros at the right and below, and their sizes."""
    shapes = [sample["jpg"].shape for sample in samples]
    out = np.zeros((len(samples), max(s[0] for s in shapes), max(s[1] for s in shapes), 3), np.uint8)
    for row, sample in zip(out, samples):
        h, w, _ = sample["jpg"].shape
        row[:h, :w] = sample["jpg"]
    return {
        "jpg": torch.from_numpy(out),
        "sizes": torch.tensor(shapes),
        "cls": torch.tensor([sample["cls"] for sample in samples]),
    }


def web(urls: list[str], workers: int, *stages: Any, shuffle: int, batch: int, collate: Any) -> Iterable[Any]:
    """webdataset's pipeline, as its documentation has it."""
    dataset = wds.WebDataset(urls, shardshuffle=len(urls), seed=0).shuffle(shuffle)
    for stage in stages:
        dataset = stage(dataset)
    dataset = dataset.batched(batch, collation_fn=collate, partial=True)
    return wds.WebLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=workers > 0)


def epoch(loader: Iterable[Any]) -> int:
    """Iterate once; the number of samples."""
    return sum(len(batch["cls"]) for batch in loader)


def compare(title: str, sides: list[Side], rounds: int, samples: int) -> float:
    """Time both sides in turn, print a row for each, and return how many times as fast the last one is."""
    loaders = [side.make() for side in sides]
    memory = []
    for loader in loaders:
        with Memory() as watched:
            assert epoch(loader) == samples, f"{title}: an epoch does not have {samples} samples"
        memory.append(watched.most)
    used: dict[str, list[float]] = {side.name: [] for side in sides}
    cases = {side.name: Case(partial(_run, loader, used[side.name])) for side, loader in zip(sides, loaders)}
    seconds = interleaved(cases, rounds=rounds)
    base, other = (seconds[side.name] for side in sides)
    ratio = statistics.median(a / b for a, b in zip(base, other))
    cpus = [1e6 * statistics.median(used[side.name]) / samples for side in sides]
    for side, most, cpu in zip(sides, memory, cpus):
        speed = samples / statistics.median(seconds[side.name])
        times, less = ("", "") if side is sides[0] else (f"{ratio:.2f}", f"{cpus[0] / cpu:.2f}")
        print(
            f"| {title} | {side.name} | {speed:,.0f} | {times} | {cpu:.0f} | {less} | {most / 1e6:.0f} |",
            flush=True,
        )
    for loader in loaders:
        close = getattr(loader, "close", None)
        if close is not None:
            close()
    return ratio


def _run(loader: Iterable[Any], used: list[float], _: Any) -> None:
    before = cpu_now()
    epoch(loader)
    used.append(cpu_now() - before)


class Memory:
    """The highest proportional set size of this process and its children, beyond that at the start."""

    def __init__(self) -> None:
        self.most = 0

    def __enter__(self) -> Memory:
        self._begin = memory_now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.05):
            self.most = max(self.most, memory_now() - self._begin)


def memory_now() -> int:
    """Bytes of this process and all its children, shared pages divided among those that share them."""
    total = 0
    for process in _family():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            rollup = (process / "smaps_rollup").read_text()
            shares = [line.split()[1] for line in rollup.splitlines() if line.startswith("Pss:")]
            total += 1024 * sum(map(int, shares))
    return total


def cpu_now() -> float:
    """Seconds of CPU that this process and its living children have used."""
    ticks = 0
    for process in _family():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _family() -> list[Path]:
    """This process and all its children, as folders of ``/proc``."""
    found = []
    waiting = [Path("/proc/self")]
    while waiting:
        process = waiting.pop()
        found.append(process)
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in (process / "task").iterdir():
                waiting += [Path("/proc", pid) for pid in (task / "children").read_text().split()]
    return found


def write_text(folder: Path, limit: int | None) -> tuple[int, Encode]:
    """Reviews as text and as numbers, in shards of about 4 MB; how many, and what numbers their words."""
    reviews = read_reviews(reviews_file(), 0)[:limit]
    start = time.perf_counter()
    with packload.ShardWriter(folder / "text", size="4MB") as writer:
        for text, label in reviews:
            writer.write({"txt": text, "cls": label})
    _throughput("write text", start, writer.indexes)
    encode = Encode(Vocabulary((split_words(text) for text, _ in reviews), WORDS))
    with packload.ShardWriter(folder / "tokens", size="4MB") as writer:
        for text, label in reviews:
            writer.write({"npy": encode({"txt": text, "cls": label})["tokens"], "cls": label})
    return len(reviews), encode


def write_pictures(folder: Path, count: int) -> int:
    """Pictures as JPEG of quality 95."""
    pictures = list(views(count, (160, 384)))
    start = time.perf_counter()
    with packload.ShardWriter(folder / "jpg", size="2MB", workers=2) as writer:
        for picture, label in pictures:
            writer.write({"jpg": picture, "cls": label})
    _throughput("write JPEG, encoding included", start, writer.indexes)
    return len(pictures)


def _throughput(what: str, start: float, indexes: list[Any]) -> None:
    seconds = time.perf_counter() - start
    samples, size = sum(map(len, indexes)), sum(index.tar_bytes for index in indexes)
    print(f"| {what} | {samples / seconds:,.0f} | {size / seconds / 1e6:.0f} |", flush=True)


def index_again(folder: Path) -> None:
    """Index all shards anew in this process."""
    for name in ("text", "tokens", "jpg"):
        start = time.perf_counter()
        indexes = index_shards(str(folder / name / "*.tar"), again=True)
        _throughput(f"index {name}", start, indexes)


def urls_of(folder: Path) -> list[str]:
    """The shards of a folder."""
    return sorted(map(str, folder.glob("*.tar")))


def main() -> None:
    """Write shards, then time both sides on each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--reviews", type=int, default=None)
    parser.add_argument("--pictures", type=int, default=600)
    parser.add_argument("--only", choices=["tokens", "words", "jpg"], default=None)
    settings = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print("| | samples/s | MB/s |\n| --- | ---: | ---: |")
        reviews, encode = write_text(folder, settings.reviews)
        pictures = write_pictures(folder, settings.pictures)
        index_again(folder)
        print("\n| shards | side | samples/s | over webdataset | CPU us a sample | less | MB, highest |")
        print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
        sides = _sides(folder, settings.workers, encode)
        for title, samples in (("tokens", reviews), ("words", reviews), ("jpg", pictures)):
            if settings.only in (None, title):
                compare(title, sides[title], settings.rounds, samples)


def _sides(folder: Path, workers: int, encode: Encode) -> dict[str, list[Side]]:
    tokens, text, jpg = (urls_of(folder / name) for name in ("tokens", "text", "jpg"))
    pad = {name: partial(pad_tokens, name) for name in ("npy", "tokens")}
    theirs = {
        "tokens": partial(web, tokens, workers, _decode, shuffle=1000, batch=BATCH, collate=pad["npy"]),
        "words": partial(
            web, text, workers, _decode, _Map(encode), shuffle=1000, batch=BATCH, collate=pad["tokens"]
        ),
        "jpg": partial(web, jpg, workers, _rgb, shuffle=100, batch=PICTURES, collate=pad_images),
    }
    make = partial(packload.shards, rank=0, world_size=1, workers=workers, persistent_workers=True)
    ours = {
        "tokens": partial(make, tokens, batch_size=BATCH, schema={"npy": "n"}),
        "words": partial(make, text, batch_size=BATCH, map=encode, schema={"tokens": "n"}, mode="process"),
        "jpg": partial(make, jpg, batch_size=PICTURES, schema={"jpg": "_ h w"}),
    }
    modes = {"tokens": "threads", "words": "processes", "jpg": "threads"}
    return {
        name: [Side("webdataset", theirs[name]), Side(f"packload, {modes[name]}", ours[name])]
        for name in ours
    }


class _Map:
    """A stage of webdataset that applies a function to each sample."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, dataset: Any) -> Any:
        return dataset.map(self.function)


def _decode(dataset: Any) -> Any:
    return dataset.decode()


def _rgb(dataset: Any) -> Any:
    return dataset.decode("rgb8")


if __name__ == "__main__":
    main()

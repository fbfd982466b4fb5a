"""What loading costs: ``python -m examples.benchmarks.loader``.

* Collating: samples in memory to one buffer with offsets, positions and sample ids, beside one ``memcpy`` of
  all the bytes that are written, and of the payload, into warm memory.
* Handing over: batches of samples in memory through :class:`packload.Loader`, and through a ``DataLoader``
  that hands on a list, or concatenates; CPU time of the loop's thread; descriptors.
* Token batches beside the flattening collator of transformers, where it is installed.
* Real pictures (``pip install mvtb-data==1.6.1``) and real protein chains, beside padding to the largest.

Two workers each, one thread inside of each. All sides of a comparison take turns in one run; figures are
medians. ``--only collate,tokens`` measures some of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from examples.benchmarks import _loading as sides
from examples.benchmarks._timing import Case, interleaved, threads
from packload import Collate
from packload.transfer import Ring

AXIS_MAPS = ("sample_ids", "positions")


def table(title: str, *columns: str) -> Table:
    """A table whose first column is text."""
    made = Table(title=title, title_justify="left")
    for k, column in enumerate(columns):
        made.add_column(column, justify="right" if k else "left")
    return made


def median(values: list[float]) -> float:
    """The median."""
    return statistics.median(values)


def ratio(one: list[float], other: list[float]) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def judged(value: float, goal: float, at_least: bool = False) -> str:
    """A ratio, and whether it meets its goal."""
    met = value >= goal if at_least else value <= goal
    sign = ">=" if at_least else "<="
    return f"{value:.2f} ({sign} {goal:g}: {'yes' if met else 'NO'})"


# ---------------------------------------------------------------- collating


def collating(rounds: int) -> Table:
    """Samples of 4, 64 and 256 bytes a row to a warm slot.

    Samples out of memory: every call reads others of 100 MB, as an epoch does, and so does every memcpy. In
    cache: every call reads the same.
    """
    made = table(
        f"Collate {sides.SAMPLES} samples of mean {sides.PAYLOAD / 1000:g} kB with offsets, positions, ids",
        "bytes a row, samples",
        "us",
        "MB written",
        "over memcpy of all",
        "over memcpy of the payload",
    )
    for width in (1, 16, 64):
        for where, count in (("out of memory", 80), ("in cache", 1)):
            data = sides.Arrays(count * sides.SAMPLES, width)
            batches = [data.samples[k : k + sides.SAMPLES] for k in range(0, len(data), sides.SAMPLES)]
            collate, ring = Collate(maps=AXIS_MAPS), Ring(1)
            nbytes = collate.pack(batches[0], ring.allocate).nbytes
            payload = sum(sample["f0"].nbytes for sample in batches[0])
            copies = max(1, 100_000_000 // nbytes) if count > 1 else 1
            cases = {
                "collate": Case(packing(collate, ring, batches)),
                "all": Case(copying(nbytes, copies)),
                "payload": Case(copying(payload, copies)),
            }
            seconds = interleaved(cases, rounds=rounds, calls=20, warm_up=3)
            over_all, over_payload = (ratio(seconds["collate"], seconds[side]) for side in ("all", "payload"))
            cold = count > 1
            made.add_row(
                f"{4 * width}, {where}",
                f"{1e6 * median(seconds['collate']):.0f}",
                f"{nbytes / 1e6:.2f}",
                judged(over_all, 2) if cold else f"{over_all:.2f}",
                judged(over_payload, 2) if cold and width >= 16 else f"{over_payload:.2f}",
            )
    return made


def packing(collate: Collate, ring: Ring, batches: list[Any]) -> Callable[[Any], Any]:
    """Collating one batch after the other."""
    turn = itertools.cycle(batches)
    return lambda _: collate.pack(next(turn), ring.allocate)


def copying(nbytes: int, count: int) -> Callable[[Any], None]:
    """One memcpy into warm memory, from one of ``count`` sources after the other."""
    sources = np.random.default_rng(0).integers(0, 255, (count, nbytes), dtype=np.uint8)
    turn, target = itertools.cycle(sources), np.zeros(nbytes, np.uint8)
    return lambda _: np.copyto(target, next(turn))


# ---------------------------------------------------------------- handing over


def handing_over(rounds: int, batches: int) -> Table:
    """Items a second through each loader."""
    data, order = sides.Plain(640), sides.index_lists(640, batches)
    loaders = {
        "DataLoader, list": sides.dataloader(data, order, sides.as_list),
        "DataLoader, cat + offsets": sides.dataloader(data, order, sides.cat_and_offsets),
        "packload, threads": sides.loader(data, order, Collate(maps=AXIS_MAPS)),
        "packload, processes": sides.loader(data, order, Collate(maps=AXIS_MAPS), mode="process"),
    }
    with sides.closing(*loaders.values()):
        seconds = sides.in_turn(loaders, rounds)
    made = table(
        f"Batches of {sides.SAMPLES} samples in memory, 2 workers",
        "loader",
        "items/s",
        "ms a batch",
        "x list",
        "x cat + offsets",
    )
    goals = {"packload, threads": (5, 2), "packload, processes": (3, None)}
    for name, values in seconds.items():
        shown = []
        for base, goal in zip(
            ("DataLoader, list", "DataLoader, cat + offsets"), goals.get(name, (None, None))
        ):
            factor = ratio(seconds[base], values)
            shown.append(f"{factor:.2f}" if goal is None else judged(factor, goal, at_least=True))
        made.add_row(name, f"{sides.SAMPLES / median(values):,.0f}", f"{1e3 * median(values):.3f}", *shown)
    return made


def every_field(batch: Any) -> None:
    """Ask for every field."""
    for name in batch.keys():
        batch[name]


def consumer(batches: int) -> Table:
    """CPU time of the loop's thread, and descriptors."""
    made = table(
        "The loop's side: CPU us a batch in next, and with every field asked for; open files a batch",
        "loader",
        "fields",
        "next",
        "p99",
        "next + all fields",
        "files a held batch",
    )
    for mode in ("thread", "process"):
        for fields in (1, 10, 50):
            data, order = sides.Arrays(128, fields=fields), sides.index_lists(128, batches)
            loader = sides.loader(data, order, Collate(maps=AXIS_MAPS), mode=mode)
            with sides.closing(loader):
                alone = sides.consumer_microseconds(loader, lambda batch: None)
                whole = sides.consumer_microseconds(loader, every_field)
                files = sides.descriptors_per_batch(loader, 50)
            made.add_row(
                f"packload, {mode}",
                str(fields),
                judged(median(alone), 100),
                f"{np.percentile(alone, 99):.0f}",
                f"{median(whole):.0f}",
                f"{files:.2f}" if mode == "thread" else judged(files, 1),
            )
    return made


# ---------------------------------------------------------------- tokens


def token_samples(total: int, seed: int = 0) -> list[dict[str, Any]]:
    """Samples of token ids and labels, int64 arrays of log-normal lengths, ``total`` tokens in all."""
    generator = np.random.default_rng(seed)
    samples: list[dict[str, Any]] = []
    while total:
        n = min(total, 1 + int(generator.lognormal(5.3, 0.7)))
        samples.append({key: generator.integers(0, 32_000, n) for key in ("input_ids", "labels")})
        total -= n
    return samples


def flattened(collate: Collate, ring: Ring, samples: list[dict[str, Any]]) -> dict[str, Any]:
    """What models of transformers take: labels of first tokens masked, no sample sees the one before."""
    batch = collate.pack(samples, ring.allocate)
    ids, labels = batch.input_ids, batch.labels
    axis = ids.grid.axes[0]
    labels.values.index_fill_(0, axis.offsets[:-1].long(), sides.SEPARATOR)
    longest = axis.max_length
    return {
        "input_ids": ids.values[None],
        "labels": labels.values[None],
        "position_ids": axis.positions[None],
        "cu_seq_lens_q": axis.offsets,
        "cu_seq_lens_k": axis.offsets,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def tokens(rounds: int) -> Table | str:
    """32 k tokens, from arrays and from lists, beside transformers."""
    if importlib.util.find_spec("transformers") is None:
        return "Tokens: transformers is not installed"
    flatten = importlib.import_module("transformers").DataCollatorWithFlattening
    theirs = flatten(return_flash_attn_kwargs=True, return_tensors="pt")
    ours = partial(flattened, Collate({"input_ids": "n", "labels": "n"}, maps=["positions"]), Ring(2))
    made = table(
        "32 k tokens flattened: ids, labels, positions, cu_seqlens", "samples", "transformers us", "us", "x"
    )
    arrays = token_samples(32_768)
    lists = [{key: value.tolist() for key, value in sample.items()} for sample in arrays]
    for name, samples in (("arrays", arrays), ("lists", lists)):
        expected, got = theirs(samples), ours(samples)
        for key, value in expected.items():
            same = torch.equal(value, got[key]) if isinstance(value, torch.Tensor) else value == got[key]
            if not same and not torch.equal(value, got[key].to(value.dtype)):
                raise AssertionError(f"{key} differs")
        prepare: Callable[[], Any] = partial(list, samples)
        cases = {"theirs": Case(theirs, prepare), "ours": Case(ours, prepare)}
        seconds = interleaved(cases, rounds=rounds, calls=20, warm_up=2)
        factor = ratio(seconds["theirs"], seconds["ours"])
        made.add_row(
            name,
            *(f"{1e6 * median(seconds[side]):.0f}" for side in ("theirs", "ours")),
            judged(factor, 50, at_least=True) if name == "arrays" else f"{factor:.1f}",
        )
    return made


# ---------------------------------------------------------------- real data


def pictures(rounds: int) -> Table | str:
    """Decoding and collating real pictures, in threads and in the default DataLoader."""
    try:
        data = sides.Images()
    except ModuleNotFoundError as error:
        return f"Pictures: {error}"
    order = [[(7 * k) % len(data) for k in range(j, j + 8)] for j in range(0, len(data) - 8, 8)]
    loaders: dict[str, Any] = {
        "DataLoader, padded": sides.dataloader(data, order, sides.padded_images),
        "packload, threads": sides.loader(data, order, Collate()),
    }
    with sides.closing(*loaders.values()):
        seconds = sides.in_turn(loaders, rounds)
        stats = loaders["packload, threads"].stats()
    share = next(share for name, share in stats.occupancy.items() if " x " in name)
    made = table(
        f"{len(data)} pictures, batches of 8, decoded and collated by 2 workers; occupancy {share:.1%}",
        "loader",
        "pictures/s",
        "x",
    )
    for name, values in seconds.items():
        factor = ratio(seconds["DataLoader, padded"], values)
        made.add_row(name, f"{8 / median(values):.1f}", f"{factor:.2f}")
    return made


def proteins(rounds: int) -> Table:
    """Coordinates and distance maps over one axis, packed and padded."""
    data = sides.Chains()
    samples = [data[k] for k in range(0, len(data), 25)]
    collate, ring = Collate({"xyz": "n 3", "distances": "n n"}), Ring(1)
    bare = Collate({"xyz": "n 3", "distances": "n n"}, maps=AXIS_MAPS)
    batch = collate.pack(samples, ring.allocate)
    if batch.distances.grid.axes[0] is not batch.xyz.grid.axes[0]:
        raise AssertionError("the fields do not share their axis")
    cells, longest = batch.distances.grid.cells, batch.xyz.grid.axes[0].max_length
    nbytes, few = batch.nbytes, bare.pack(samples).nbytes
    del batch
    source = np.ones(nbytes, np.uint8)
    target = np.zeros_like(source)
    bare_ring = Ring(1)
    cases: dict[str, Callable[[Any], Any]] = {
        "packed, all maps of the pairs": lambda _: collate.pack(samples, ring.allocate),
        "packed, positions and ids": lambda _: bare.pack(samples, bare_ring.allocate),
        "padded to the longest": lambda _: sides.padded_chains(samples),
        "memcpy of all": lambda _: np.copyto(target, source),
    }
    seconds = interleaved({n: Case(c) for n, c in cases.items()}, rounds=rounds, calls=3, warm_up=2)
    made = table(
        f"{len(samples)} protein chains, 'n 3' and 'n n' over one axis; "
        f"occupancy of pairs {cells / (len(samples) * longest**2):.1%}",
        "collate",
        "us",
        "MB",
        "over memcpy of all",
    )
    sizes = [nbytes, few, 4 * len(samples) * longest * (3 + longest), nbytes]
    for (name, values), size in zip(seconds.items(), sizes):
        over = ratio(values, seconds["memcpy of all"])
        made.add_row(name, f"{1e6 * median(values):.0f}", f"{size / 1e6:.2f}", f"{over:.2f}")
    return made


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", type=int, default=300, help="of a pass through a loader")
    parser.add_argument("--only", default="collate,loaders,consumer,tokens,pictures,proteins")
    arguments = parser.parse_args()
    rounds, few = arguments.rounds, max(3, arguments.rounds // 3)
    parts: dict[str, Callable[[], Table | str]] = {
        "collate": lambda: collating(rounds),
        "loaders": lambda: handing_over(few, arguments.batches),
        "consumer": lambda: consumer(arguments.batches),
        "tokens": lambda: tokens(rounds),
        "pictures": lambda: pictures(few),
        "proteins": lambda: proteins(rounds),
    }
    console = Console(width=120)
    with threads(1):
        for name in arguments.only.split(","):
            console.print(parts[name]())


if __name__ == "__main__":
    main()

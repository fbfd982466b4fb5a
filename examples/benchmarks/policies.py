"""What batching policies do, on real lengths and on drawn ones: ``python -m examples.benchmarks.policies``.

* how full batches of a budget are, how even ranks, what a plan costs, for two distributions of lengths;
* ten million samples, in a process of its own: seconds and memory;
* IMDB in batches of 64, beside the occupancy that the paper on DanLing's NestedTensor reports;
* random, bucketed and budget batches of real texts, pictures and proteins.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from packload import BucketBatchSampler, BudgetBatchSampler, RandomBatchSampler
from packload.cost import Cost, area, pair_cells, tokens
from packload.plan import PlanSampler
from packload.report import Figures, Served, read_lengths, table
from packload.report.compare import Settings, compare
from packload.report.metrics import fill, occupancy, slowest, waiting

DATA = Path(__file__).parents[1] / "data" / "lengths"
RANKS = 8
BUCKETS = (16, 64, 128, 391)
"""Numbers of buckets: 128 is the sampler's own choice, 391 as many as batches."""
PAPER = {"random": 0.310, "bucket": 0.977}
"""Token occupancy of IMDB in batches of 64 that the paper on DanLing's NestedTensor reports."""


# --- lengths


def lognormal(
    count: int, most: int, mean: float = 499.0, deviation: float = 1.0, seed: int = 0
) -> np.ndarray:
    """Lengths [count] whose logarithm has a standard deviation, of 1 to ``most``."""
    numbers = np.random.default_rng(seed)
    drawn = numbers.lognormal(np.log(mean) - deviation**2 / 2, deviation, count)
    return np.clip(np.rint(drawn), 1, most).astype(np.int64)


def normal(
    count: int, most: int, mean: float = 3016.0, deviation: float = 1500.0, seed: int = 0
) -> np.ndarray:
    """Lengths [count] of 1 to ``most``."""
    drawn = np.random.default_rng(seed).normal(mean, deviation, count)
    return np.clip(np.rint(drawn), 1, most).astype(np.int64)


def real(name: str, *columns: str) -> np.ndarray:
    """Lengths that come with the examples."""
    return read_lengths(DATA / f"{name}.csv.gz", columns)[0]


# --- budgets


@dataclass(frozen=True)
class Drawn:
    """A distribution of lengths, a budget, and the share of it that is to be filled."""

    name: str
    draw: Callable[[int, int], np.ndarray]
    budget: int
    aim: float


DRAWN = [
    *(Drawn("lognormal, mean 499", lognormal, budget, 0.99) for budget in (8192, 8193, 12000)),
    *(Drawn("normal, mean 3016, sd 1500", normal, budget, 0.98) for budget in (8192, 8193, 12000)),
]


def budgets(count: int, rounds: int) -> Table:
    """Fill, balance and planning time of the budget policy: the process's own, not that of a busy machine."""
    shown = Table(title=f"budget policy: {count:,} samples, {RANKS} ranks, lengths cut at the budget")
    shown.add_column("lengths")
    columns = (
        "budget",
        "filled",
        "aim",
        "worst batch",
        "ranks, max / mean",
        "epoch over even",
        "us a sample",
    )
    for column in columns:
        shown.add_column(column, justify="right")
    for one in DRAWN:
        lengths = one.draw(count, one.budget)
        seconds, served = [], None
        for seed in range(rounds):
            sampler = BudgetBatchSampler(lengths, one.budget, seed=seed, rank=0, world_size=RANKS)
            start = time.process_time()
            windows = list(sampler.windows())
            seconds.append(time.process_time() - start)
            served = served or Served.of_windows(windows, RANKS)
        assert served is not None
        filled, ratios = fill(served, lengths, one.budget), slowest(served, lengths)
        if filled.max() > 1:
            raise RuntimeError(f"a batch costs {filled.max()} of the budget {one.budget}")
        shown.add_row(
            one.name,
            f"{one.budget}",
            f"{filled.mean():.2%}",
            f"{one.aim:.0%}",
            f"{filled.min():.1%}",
            f"{ratios.mean():.4f}",
            f"{waiting(served, lengths):.4f}",
            f"{statistics.median(seconds) / count * 1e6:.2f}",
        )
    return shown


# --- ten million


def plan_many(count: int) -> dict[str, float]:
    """Plan an epoch and hand out one rank's batches; seconds, and MiB of this process before and at most."""
    lengths = lognormal(count, 8192)
    before = _peak_mib()
    start = time.perf_counter()
    sampler = BudgetBatchSampler(lengths, 8192, rank=0, world_size=RANKS)
    steps = len(sampler)
    batches = sum(1 for _ in sampler)
    seconds = time.perf_counter() - start
    return {"steps": steps, "batches": batches, "seconds": seconds, "before": before, "peak": _peak_mib()}


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def many(count: int) -> str:
    """:func:`plan_many` in a process of its own, in words."""
    command = [sys.executable, "-m", "examples.benchmarks.policies", "--plan-many", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    return (
        f"{count:,} samples: {found['seconds']:.1f} s for the plan of {RANKS} ranks and the "
        f"{found['batches']:,} batches of one of them; at most {found['peak']:.0f} MiB of memory, "
        f"{found['before']:.0f} of them before the plan began (aims: 60 s, 2048 MiB)"
    )


# --- IMDB


def imdb() -> Table:
    """Token occupancy of padded batches of 64 reviews."""
    shown = Table(title="IMDB, 25 000 reviews in batches of 64: occupancy of padded batches")
    shown.add_column("lengths")
    shown.add_column("random", justify="right")
    for count in BUCKETS:
        shown.add_column(f"{count} buckets", justify="right")
    shown.add_row("the paper", f"{PAPER['random']:.1%}", *(f"{PAPER['bucket']:.1%}" for _ in BUCKETS))
    for column, most in (
        ("words", None),
        ("wordpieces", None),
        ("wordpieces", 1024),
        ("wordpieces", 512),
    ):
        lengths = real("imdb", column)
        lengths = lengths if most is None else np.minimum(lengths, most)
        random = RandomBatchSampler(lengths, 64, rank=0, world_size=1)
        buckets = [BucketBatchSampler(lengths, 64, buckets=n, rank=0, world_size=1) for n in BUCKETS]
        name = f"{column}, {'none cut off' if most is None else f'cut off at {most}'}"
        shown.add_row(name, *(f"{_occupancy(one, lengths):.1%}" for one in (random, *buckets)))
    return shown


def _occupancy(sampler: PlanSampler, lengths: np.ndarray) -> float:
    return occupancy(Served.of_windows(sampler.windows(), sampler.world_size), lengths)


# --- three policies


@dataclass(frozen=True)
class Real:
    """A file of lengths and what its policies are compared at."""

    title: str
    lengths: np.ndarray
    batch_size: int
    budget: int
    cost: Cost
    ranks: int = RANKS

    def figures(self) -> list[Figures]:
        """Of the three policies."""
        settings = Settings(self.batch_size, self.budget, self.ranks, self.cost)
        return [one.figures for one in compare(self.lengths, settings)]


def reals() -> list[Real]:
    """Texts, pairs of texts, pictures, proteins, pairs of residues."""
    texts, verses = real("imdb", "wordpieces"), real("verses", "english", "japanese")
    pictures, chains = real("stamps", "height", "width"), real("chains")
    return [
        Real("IMDB, wordpieces: 64 reviews, or 20 480 tokens", texts, 64, 20_480, tokens),
        Real("verses, English and Japanese: 64 pairs, or 6144 tokens of both", verses, 64, 6144, tokens),
        Real("pictures: 64, or 3 million pixels; one rank", pictures, 64, 3_000_000, area, 1),
        Real("proteins: 64 chains, or 16 384 residues", chains, 64, 16_384, tokens),
        Real("pair cells, chains cut at 1024: 8, or 2^20", np.minimum(chains, 1024), 8, 2**20, pair_cells),
    ]


def main() -> None:
    """Measure and print everything."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--samples", type=int, default=400_000, help="of the drawn lengths")
    parser.add_argument("--rounds", type=int, default=5, help="plans that are timed for each of them")
    parser.add_argument("--many", type=int, default=10_000_000, help="samples of the large plan; 0 for none")
    parser.add_argument("--plan-many", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.plan_many is not None:
        print(json.dumps(plan_many(arguments.plan_many)))
        return
    console = Console(width=120)
    console.print(budgets(arguments.samples, arguments.rounds))
    if arguments.many:
        console.print(many(arguments.many))
    console.print(imdb())
    for one in reals():
        console.print(table(one.figures(), one.title))


if __name__ == "__main__":
    main()

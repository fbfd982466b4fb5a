"""What ``packload policies`` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
from rich.console import Console

from packload.cost import COSTS, Cost, quadratic, tokens
from packload.plan.units import Oversize
from packload.report.compare import Result, Settings, compare
from packload.report.source import SourceError, read_lengths
from packload.report.tables import table

OVERSIZE: tuple[Oversize, ...] = get_args(Oversize)
COST_HELP = f"What a sample is charged: {', '.join(COSTS)}, pair, or A*n+B*n^2 with numbers A and B."


@dataclass(frozen=True)
class Options:
    """The command's options; see ``packload policies --help``."""

    source: str
    columns: Sequence[str]
    batch_size: int
    budget: float
    world_size: int
    cost: str | None
    seed: int
    oversize: str
    picture: Path | None


Drawer = Callable[[np.ndarray, Sequence[Result], Settings, str, Path], None]


def run(options: Options, console: Console, draw: Drawer | None = None) -> list[Result]:
    """Read lengths, plan an epoch by each policy, print the table and draw the picture.

    Args:
        draw: what draws the picture, if one is asked for.

    Raises:
        SourceError: the options do not make sense, lengths cannot be read, or the picture cannot be drawn.
    """
    lengths, names = read_lengths(options.source, options.columns)
    if not len(lengths):
        raise SourceError(f"{options.source}: there are no samples.")
    settings = _settings(options, lengths)
    try:
        results = compare(lengths, settings)
    except ValueError as error:
        raise SourceError(_for_the_command_line(str(error))) from error
    unit = " x ".join(names)
    console.print(
        f"{len(lengths):,} samples of {unit}: smallest {_size(lengths.min(0))}, "
        f"mean {_size(lengths.mean(0))}, largest {_size(lengths.max(0))}"
    )
    title = (
        f"batches of {options.batch_size} samples, or a budget of {options.budget:,.0f}; {_ranks(settings)}"
    )
    console.print(table([result.figures for result in results], title))
    if options.picture is not None and draw is not None:
        try:
            draw(lengths, results, settings, f"{Path(options.source).name}: {title}", options.picture)
        except (OSError, ValueError) as error:
            raise SourceError(f"the picture {options.picture} cannot be drawn: {error}") from error
        console.print(f"picture: {options.picture}")
    return results


def parse_cost(text: str | None, lengths: np.ndarray) -> Cost:
    """The cost that an option names; by default tokens, or the cells of samples of two sizes.

    Raises:
        SourceError: there is no such cost.
    """
    if text is None:
        return tokens if lengths.ndim == 1 else COSTS["area"]
    named = COSTS | {"pair": COSTS["pair_cells"]}
    if text in named:
        return named[text]
    linear, plus, square = text.replace(" ", "").partition("+")
    try:
        if not plus or not linear.endswith("*n") or not square.endswith("*n^2"):
            raise ValueError
        return quadratic(float(linear[:-2]), float(square[:-4]))
    except ValueError:
        raise SourceError(f"--cost {text!r} is none of {sorted(named)} and not A*n+B*n^2.") from None


def _settings(options: Options, lengths: np.ndarray) -> Settings:
    if options.oversize not in OVERSIZE:
        raise SourceError(f"--oversize {options.oversize!r} is none of {list(OVERSIZE)}.")
    cost = parse_cost(options.cost, lengths)
    oversize: Oversize = options.oversize
    budget = int(options.budget) if options.budget.is_integer() else options.budget
    return Settings(options.batch_size, budget, options.world_size, cost, options.seed, oversize)


def _for_the_command_line(text: str) -> str:
    return text.replace(
        "oversize='skip', 'alone', 'split' or 'truncate'", "--oversize skip, alone, split, truncate"
    )


def _size(sizes: np.ndarray) -> str:
    return " x ".join(f"{size:,.0f}" for size in np.atleast_1d(sizes))


def _ranks(settings: Settings) -> str:
    return f"{settings.world_size} rank{'s' if settings.world_size > 1 else ''}"

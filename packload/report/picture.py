"""The picture of several policies: lengths, how full batches are, how even ranks are.

It needs matplotlib, ``pip install 'packload[plot]'``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from packload.report.compare import Result, Settings
from packload.report.metrics import cells_of, fill, slowest

_COLOURS = ("#8a93a3", "#e08a1e", "#2a6fdb")
_BINS = 60


def save_picture(
    lengths: np.ndarray, results: Sequence[Result], settings: Settings, title: str, path: Path | str
) -> None:
    """Draw three panels to a file, of the type that its suffix names.

    From the left: a histogram of lengths (of cells, for samples of several sizes); the share of batches by
    cost over budget; for the share of steps on the horizontal axis, sorted, the cost of the slowest rank
    over the mean.

    Args:
        lengths: of all samples, int64 [N] or [N, k].
        results: of the policies.
        settings: that they were compared at.

    Raises:
        ValueError: the suffix names no type of picture.
    """
    figure = Figure(figsize=(14, 4), layout="constrained")
    one, two, three = figure.subplots(1, 3)
    _draw_lengths(one, cells_of(settings.cost)(lengths), lengths.ndim > 1)
    _draw_fill(two, results, settings)
    _draw_ranks(three, results, settings)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _draw_lengths(axes: Axes, sizes: np.ndarray, several: bool) -> None:
    axes.set_xlabel("cells of a sample" if several else "length of a sample")
    axes.set_ylabel("samples")
    axes.set_title(f"{len(sizes):,} samples, median {np.median(sizes):,.0f}, largest {sizes.max():,}")
    if sizes.min() > 0 and sizes.max() > 50 * np.median(sizes):
        bins = np.unique(np.geomspace(sizes.min(), sizes.max() + 1, _BINS))
        axes.set_xscale("log")
    else:
        bins = np.linspace(0, max(float(sizes.max()), 1), _BINS)
    axes.hist(sizes, bins=list(bins), color=_COLOURS[0])
    axes.axvline(float(np.median(sizes)), color="black", linewidth=1)


def _draw_fill(axes: Axes, results: Sequence[Result], settings: Settings) -> None:
    fills = [fill(one.served, settings.cost(one.lengths), settings.budget) for one in results]
    bins = _bins(max(1.0, *(float(one.max(initial=0)) for one in fills)))
    for result, one, colour in zip(results, fills, _COLOURS):
        share = np.full(len(one), 1 / max(len(one), 1))
        label = f"{result.figures.name}, mean {one.mean():.1%}" if len(one) else result.figures.name
        axes.hist(one, bins, weights=share, histtype="step", linewidth=1.8, color=colour, label=label)
    axes.axvline(1, color="black", linewidth=1, linestyle=":")
    axes.set_yscale("log")
    axes.set_title(f"batch cost over the budget of {settings.budget:,.0f}")
    axes.set_xlabel("cost / budget")
    axes.set_ylabel("share of batches")
    axes.legend()


def _bins(most: float) -> list[float]:
    """Bins from 0 to ``most``, of which one ends with 1: a full batch is not drawn beyond the budget."""
    width = 1 / max(round(_BINS / most), 1)
    return [0.0, *(width * k * (1 + 1e-9) for k in range(1, int(np.ceil(most / width)) + 1))]


def _draw_ranks(axes: Axes, results: Sequence[Result], settings: Settings) -> None:
    for result, colour in zip(results, _COLOURS):
        ratios = np.sort(slowest(result.served, settings.cost(result.lengths)))
        label = f"{result.figures.name}, mean {result.figures.slowest:.3f}"
        axes.plot(np.linspace(0, 1, len(ratios)), ratios, color=colour, label=label)
    axes.set_title(f"cost of the slowest of {settings.world_size} ranks over the mean")
    axes.set_xlabel("share of steps")
    axes.set_ylabel("max / mean")
    axes.legend()

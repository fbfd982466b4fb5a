"""The picture of several policies: lengths, how full batches are, how even ranks are.

It needs matplotlib, ``pip install 'packload[plot]'``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from packload.report.metrics import Measure, cells, fill, slowest
from packload.report.served import Served

_COLOURS = ("#8a93a3", "#e08a1e", "#2a6fdb", "#3a9b5c", "#a44ec2")
_BINS = 60


@dataclass(frozen=True)
class Scene:
    """What is drawn.

    Attributes:
        title: of the picture.
        unit: what a length counts.
        lengths: of all samples, int64 [N] or [N, k].
        served: what each policy serves, by its name.
        cost: what a sample is charged.
        budget: of a batch.
    """

    title: str
    unit: str
    lengths: np.ndarray
    served: Mapping[str, Served]
    cost: Measure
    budget: float


def save_picture(scene: Scene, path: Path | str) -> None:
    """Draw three panels to a file, of the type that its suffix names.

    From the left: a histogram of lengths (of cells, for samples of several sizes); the share of batches by
    cost over budget; for the share of steps on the horizontal axis, sorted, the cost of the slowest rank
    over the mean.

    Raises:
        ValueError: the suffix names no type of picture.
    """
    figure = Figure(figsize=(14, 4), layout="constrained")
    lengths, fills, ranks = figure.subplots(1, 3)
    _draw_lengths(lengths, scene)
    _draw_fill(fills, scene)
    _draw_ranks(ranks, scene)
    figure.suptitle(scene.title)
    figure.savefig(path, dpi=120)


def _draw_lengths(axes: Axes, scene: Scene) -> None:
    sizes = cells(scene.lengths)
    positive = sizes[sizes > 0]
    if len(positive) and positive.max() > 50 * np.median(positive):
        bins = np.unique(np.geomspace(positive.min(), positive.max() + 1, _BINS))
        axes.set_xscale("log")
    else:
        bins = np.linspace(0, max(float(sizes.max()) if len(sizes) else 0, 1), _BINS)
    axes.hist(sizes, bins=list(bins), color=_COLOURS[0])
    if len(sizes):
        axes.axvline(float(np.median(sizes)), color="black", linewidth=1)
        axes.set_title(f"{len(sizes):,} samples, median {np.median(sizes):,.0f}, longest {sizes.max():,}")
    axes.set_xlabel(scene.unit)
    axes.set_ylabel("samples")


def _draw_fill(axes: Axes, scene: Scene) -> None:
    cost = scene.cost(scene.lengths)
    filled = {name: fill(served, cost, scene.budget) for name, served in scene.served.items()}
    most = max((float(one.max()) for one in filled.values() if len(one)), default=1.0)
    bins = list(np.linspace(0, max(most, 1.0), _BINS))
    for (name, one), colour in zip(filled.items(), _COLOURS):
        share = np.full(len(one), 1 / max(len(one), 1))
        mean = f"{one.mean():.1%}" if len(one) else "-"
        axes.hist(
            one, bins, weights=share, histtype="step", linewidth=1.8, color=colour, label=f"{name}: {mean}"
        )
    axes.axvline(1, color="black", linewidth=1, linestyle=":")
    axes.set_yscale("log")
    axes.set_title(f"batch cost over the budget of {scene.budget:,.0f}")
    axes.set_xlabel("cost / budget")
    axes.set_ylabel("share of batches")
    axes.legend()


def _draw_ranks(axes: Axes, scene: Scene) -> None:
    cost = scene.cost(scene.lengths)
    for (name, served), colour in zip(scene.served.items(), _COLOURS):
        ratios = np.sort(slowest(served, cost))
        mean = f"{ratios.mean():.3f}" if len(ratios) else "-"
        axes.plot(np.linspace(0, 1, len(ratios)), ratios, color=colour, label=f"{name}: {mean}")
    axes.set_title(f"cost of the slowest rank over the mean, {_ranks(scene)}")
    axes.set_xlabel("share of steps")
    axes.set_ylabel("max / mean")
    axes.legend()


def _ranks(scene: Scene) -> str:
    counts = sorted({served.ranks for served in scene.served.values()})
    return " and ".join(map(str, counts)) + (" rank" if counts == [1] else " ranks")

"""What the demo shows at its end: a table and a picture."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from packload.demo.train import Comparison

MIB = 2**20
_PADDED, _PACKED = "#b0b7c3", "#2a6fdb"


@dataclass
class Result:
    """Everything the demo found out."""

    comparison: Comparison
    lengths: np.ndarray
    accuracy: float
    held_out: int
    steps: int
    """Packed training steps in all."""


def table(result: Result) -> Table:
    """Padded and packed side by side."""
    comparison = result.comparison
    padded, packed = comparison.padded, comparison.packed
    table = Table(title=f"{len(padded.seconds)} training steps on the same batches")
    for column in ("", "padded", "packed", ""):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("first loss", f"{padded.losses[0]:.6f}", f"{packed.losses[0]:.6f}", "")
    table.add_row(
        "last loss",
        f"{padded.losses[-1]:.6f}",
        f"{packed.losses[-1]:.6f}",
        f"differ by at most {comparison.loss_difference:.1e}",
    )
    table.add_row("first gradients", "", "", f"differ by at most {comparison.gradient_difference:.1e}")
    table.add_row("occupancy", f"{comparison.occupancy:.1%}", "100.0%", "")
    table.add_row(
        "seconds a step",
        f"{padded.seconds_per_step:.3f}",
        f"{packed.seconds_per_step:.3f}",
        f"{comparison.speedup:.1f} x faster",
    )
    table.add_row(
        "peak memory",
        f"{padded.peak_bytes / MIB:.0f} MiB",
        f"{packed.peak_bytes / MIB:.0f} MiB",
        f"{padded.peak_bytes / packed.peak_bytes:.1f} x less",
    )
    return table


def save_picture(result: Result, path: Path) -> None:
    """Draw the lengths of the reviews, and step time and memory side by side."""
    comparison = result.comparison
    padded, packed = comparison.padded, comparison.packed
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    lengths, seconds, memory = figure.subplots(1, 3, width_ratios=(2, 1, 1))
    _draw_lengths(lengths, result.lengths)
    _draw_bars(
        seconds,
        f"a training step: {comparison.speedup:.1f} x faster",
        "milliseconds, median",
        (padded.seconds_per_step * 1e3, packed.seconds_per_step * 1e3),
    )
    _draw_bars(
        memory,
        f"memory: {padded.peak_bytes / packed.peak_bytes:.1f} x less",
        "MiB, peak of a step",
        (padded.peak_bytes / MIB, packed.peak_bytes / MIB),
    )
    figure.suptitle(f"IMDB reviews in random batches: {comparison.occupancy:.0%} of a padded batch is text")
    figure.savefig(path, dpi=120)


def _draw_lengths(axes: Axes, lengths: np.ndarray) -> None:
    axes.hist(lengths, bins=list(range(0, int(lengths.max()) + 50, 50)), color=_PACKED)
    axes.axvline(float(np.median(lengths)), color="black", linewidth=1)
    axes.set_title(f"{len(lengths)} reviews, median {np.median(lengths):.0f}, longest {lengths.max()} words")
    axes.set_xlabel("words")
    axes.set_ylabel("reviews")


def _draw_bars(axes: Axes, title: str, label: str, heights: tuple[float, float]) -> None:
    bars = axes.bar(("padded", "packed"), heights, color=(_PADDED, _PACKED))
    axes.bar_label(bars, fmt="%.0f")
    axes.margins(y=0.12)
    axes.set_title(title)
    axes.set_ylabel(label)

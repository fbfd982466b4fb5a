"""The figures of several policies side by side, for the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.table import Table

from packload.report.metrics import Figures

Row = tuple[str, Callable[[Figures], str]]

_ROWS: tuple[Row, ...] = (
    ("steps on each rank", lambda f: f"{f.steps:,}"),
    ("samples served", lambda f: _served(f)),
    ("occupancy, padded", lambda f: f"{f.occupancy:.1%}"),
    ("occupancy of cost, padded", lambda f: f"{f.cost_occupancy:.1%}"),
    ("padding avoided, cells", lambda f: _short(f.padding)),
    (
        "samples above the budget",
        lambda f: ", ".join(f"{n:,} {what}" for what, n in f.oversize.items()) or "-",
    ),
    ("budget filled", lambda f: "-" if f.fill is None else f"{f.fill:.1%}"),
    ("largest batch, samples", lambda f: f"{f.largest_samples:,}"),
    ("largest batch, cells", lambda f: f"{f.largest_cells:,}"),
    ("largest batch, padded cells", lambda f: f"{f.largest_padded:,}"),
    ("rank cost, max / mean", lambda f: f"{f.slowest:.3f}"),
    ("adjacent lengths, correlation", lambda f: "-" if math.isnan(f.adjacent) else f"{f.adjacent:+.2f}"),
    ("distinct shapes, padded", lambda f: f"{f.padded_shapes:,}"),
    ("distinct shapes, packed", lambda f: f"{f.packed_shapes:,}"),
    ("planning, us a sample", lambda f: _planning(f)),
)

_SHOWN_IF: dict[str, Callable[[Figures], bool]] = {
    "occupancy of cost, padded": lambda f: f.cost_occupancy != f.occupancy,
    "samples above the budget": lambda f: bool(f.oversize),
}
"""Rows that are left out unless they say something that no other row does."""


def table(compared: Sequence[Figures], title: str) -> Table:
    """A column for each policy, a row for each figure."""
    shown = Table(title=title)
    shown.add_column("")
    for one in compared:
        shown.add_column(one.name, justify="right")
    for name, text in _ROWS:
        if name not in _SHOWN_IF or any(map(_SHOWN_IF[name], compared)):
            shown.add_row(name, *map(text, compared))
    return shown


def _served(one: Figures) -> str:
    dropped = f", {one.dropped:,} dropped" if one.dropped else ""
    repeated = f", {one.repeated:,} again" if one.repeated else ""
    return f"{one.samples:,}{dropped}{repeated}"


def _short(number: float) -> str:
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def _planning(one: Figures) -> str:
    return "-" if math.isnan(one.seconds) or not one.samples else f"{one.seconds / one.samples * 1e6:.2f}"

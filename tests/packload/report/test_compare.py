"""Policies side by side: what is measured is what the samplers hand out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

import packload
from packload.cost import area, pair_cells, quadratic, tokens
from packload.report import picture, tables
from packload.report.compare import Settings, compare, measure
from packload.report.served import Served

NAMES = ["random", "bucket", "budget"]


def _samplers(lengths: Any, settings: Settings, rank: int) -> list[Any]:
    rest = {
        "cost": settings.cost,
        "seed": settings.seed,
        "rank": rank,
        "world_size": settings.world_size,
    }
    return [
        packload.RandomBatchSampler(lengths, settings.batch_size, **rest),
        packload.BucketBatchSampler(lengths, settings.batch_size, **rest),
        packload.BudgetBatchSampler(lengths, settings.budget, **rest),
    ]


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=60),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 2**40),
)
def test_what_is_measured_is_what_the_ranks_are_handed(
    lengths: list[int], batch_size: int, ranks: int, seed: int
) -> None:
    settings = Settings(batch_size, 25, ranks, tokens, seed)
    results = compare(np.array(lengths), settings)
    assert [one.figures.name for one in results] == NAMES
    by_rank = [[list(s) for s in _samplers(lengths, settings, rank)] for rank in range(ranks)]
    for which, result in enumerate(results):
        expected = Served.of([rank[which] for rank in by_rank])
        assert result.served.indices.tolist() == expected.indices.tolist()
        assert result.served.offsets.tolist() == expected.offsets.tolist()
        assert result.figures.steps == len(by_rank[0][which])
        assert result.figures.seconds > 0
    assert results[2].figures.fill is not None and results[2].figures.fill <= 1


def test_costs_are_those_asked_for() -> None:
    sizes = np.array([[3, 4], [5, 6], [1, 2], [8, 1]])
    (random, *_) = compare(sizes, Settings(4, 30, 1, area))
    assert random.figures.fill == pytest.approx((12 + 30 + 2 + 8) / 30)
    assert random.figures.largest_cells == 52
    assert random.figures.largest_padded == 4 * 8 * 6
    (random, *_) = compare(sizes, Settings(4, 30, 1, tokens))
    assert random.figures.fill == 1.0
    assert random.figures.largest_cells == 30  # positions of both, where these are charged
    (random, *_) = compare(np.array([2, 3]), Settings(2, 100, 1, pair_cells))
    assert random.figures.occupancy == pytest.approx(5 / 6)
    assert random.figures.cost_occupancy == pytest.approx(13 / 18)


@pytest.mark.parametrize(
    ("oversize", "samples", "counted"),
    [
        ("skip", 2, {"skipped": 1}),
        ("alone", 3, {"alone": 1}),
        ("split", 4, {"split": 1, "pieces": 2}),
        ("truncate", 3, {"truncated": 1}),
    ],
)
def test_samples_above_the_budget_are_counted(oversize: Any, samples: int, counted: dict[str, int]) -> None:
    *_, budget = compare(np.array([3, 100, 4]), Settings(2, 50, 1, tokens, 0, oversize))
    assert budget.figures.samples == samples
    assert budget.figures.oversize == counted
    cells = {"skip": 7, "alone": 107, "split": 107, "truncate": 57}[oversize]
    assert budget.served.sums(budget.lengths).sum() == cells


def test_samples_above_the_budget_are_an_error_unless_told() -> None:
    with pytest.raises(ValueError, match="sample 1.*100.*50"):
        compare(np.array([3, 100, 4]), Settings(2, 50, 1, tokens))


def test_lengths_by_field_are_refused() -> None:
    settings = Settings(2, 50, 1, packload.cost.of("a"))
    with pytest.raises(TypeError, match="Stack them"):
        measure(lambda: packload.RandomBatchSampler({"a": [1, 2]}, 2, cost=settings.cost), settings)


# --- the table


def _text(table: Table) -> str:
    console = Console(width=120, record=True, quiet=True, force_terminal=False)
    with console.capture() as captured:
        console.quiet = False
        console.print(table)
    return captured.get()


def _row(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if f" {name} " in line]
    return [cell.strip() for cell in line.strip("│").split("│")][1:]


def test_the_table_has_a_column_for_each_policy() -> None:
    lengths = np.array([1, 1, 1, 1, 1, 20])
    results = compare(lengths, Settings(3, 50, 1, tokens))
    text = _text(tables.table([one.figures for one in results], "the title"))
    assert "the title" in text
    assert all(name in text for name in NAMES)
    assert _row(text, "steps on each rank") == ["2", "2", "1"]
    assert _row(text, "budget filled") == ["25.0%", "25.0%", "50.0%"]
    assert _row(text, "occupancy, padded")[1:] == ["39.7%", "20.8%"]
    assert _row(text, "padding avoided, cells")[1:] == ["38", "95"]
    assert "occupancy of cost" not in text
    assert "above the budget" not in text


def test_rows_appear_where_they_say_something() -> None:
    lengths = np.array([3, 9, 4, 2])
    results = compare(lengths, Settings(2, 20, 1, quadratic(1, 1), 0, "skip"))
    text = _text(tables.table([one.figures for one in results], ""))
    assert len(_row(text, "occupancy of cost, padded")) == 3
    assert _row(text, "samples above the budget") == ["-", "-", "1 skipped"]


@pytest.mark.parametrize(
    ("number", "shown"), [(0, "0"), (999, "999"), (1500, "1.5 k"), (2.5e6, "2.5 M"), (7e9, "7.0 G")]
)
def test_large_numbers_are_short(number: float, shown: str) -> None:
    assert tables._short(number) == shown


# --- the picture


@pytest.mark.parametrize(
    "lengths",
    [[5] * 9, [0, 0, 0], [1], [1, 1000, 1, 1, 1, 1], [[3, 4], [5, 60], [1, 2]]],
    ids=["equal", "empty", "one", "a long tail", "images"],
)
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_picture_is_drawn_of_any_lengths(tmp_path: Path, lengths: Any, suffix: str) -> None:
    array = np.array(lengths)
    settings = Settings(2, 2000, 2 if len(array) > 1 else 1, area if array.ndim > 1 else tokens)
    path = tmp_path / f"policies.{suffix}"
    picture.save_picture(array, compare(array, settings), settings, "the title", path)
    head = path.read_bytes()[:100]
    assert head.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


@pytest.mark.parametrize("most", [1.0, 1.3, 5.8, 400.0])
def test_a_full_batch_is_drawn_within_the_budget(most: float) -> None:
    counts, edges = np.histogram([1.0, most], picture._bins(most))
    (full,) = np.flatnonzero(np.isclose(edges[1:], 1.0))
    assert counts[full] == (2 if most == 1 else 1)
    assert counts.sum() == 2


def test_the_picture_shows_three_panels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []

    class Figure(picture.Figure):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            drawn.append(self)

    monkeypatch.setattr(picture, "Figure", Figure)
    array = np.arange(1, 200)
    settings = Settings(8, 400, 4, tokens)
    results = compare(array, settings)
    picture.save_picture(array, results, settings, "the title", tmp_path / "a.png")
    lengths, fills, ranks = drawn[0].axes
    assert sum(bar.get_height() for bar in lengths.patches) == 199
    assert [text.get_text().split(",")[0] for text in fills.get_legend().get_texts()] == NAMES
    for line, result in zip(ranks.lines, results):
        assert len(line.get_ydata()) == result.figures.steps
        assert np.mean(line.get_ydata()) == pytest.approx(result.figures.slowest)

"""The programs on policies, at a small size: they run, and say what they are there to say."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from examples import policies as example
from examples.benchmarks import policies as benchmark


def test_the_example_compares_and_trains(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["policies", "--steps", "2", "--batch-size", "4", "--limit", "80"])
    example.main()
    said = " ".join(capsys.readouterr().out.split())
    for name in ("random", "bucket", "budget"):
        assert f"{name}: 2 steps of" in said
    assert "budget filled" in said
    assert "20 held-out reviews right" in said


def test_the_benchmark_prints_every_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["policies", "--samples", "2000", "--rounds", "1", "--many", "0"])
    benchmark.main()
    said = " ".join(capsys.readouterr().out.split())
    for title in ("budget policy: 2,000 samples, 8 ranks", "IMDB, 25 000 reviews", "proteins: 64 chains"):
        assert title in said


def test_a_large_plan_hands_out_all_its_steps() -> None:
    found = benchmark.plan_many(20_000)
    assert found["batches"] == found["steps"] > 0
    assert 0 < found["before"] <= found["peak"]


@pytest.mark.parametrize("draw", [benchmark.lognormal, benchmark.normal])
def test_drawn_lengths_are_of_their_distribution(draw) -> None:
    lengths = draw(200_000, 10**6)
    mean = {"lognormal": 499, "normal": 3042}[draw.__name__]  # of a normal one, what is below 1 counts as 1
    assert lengths.mean() == pytest.approx(mean, rel=0.02)
    assert lengths.min() >= 1
    assert draw(1000, 100).max() == 100
    assert np.array_equal(draw(50, 500), draw(50, 500))

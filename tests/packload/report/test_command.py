"""``packload policies``, run as a user runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from packload import cli
from packload.report.command import parse_cost
from packload.report.source import SourceError

HERE = Path(__file__).parents[3]
DATA = HERE / "examples" / "data" / "lengths"
WIDE = {"COLUMNS": "200", "TERM": "dumb"}
SIZES = ("--batch-size", "64", "--budget", "16384")


def _run(*options: str | Path) -> Result:
    return CliRunner().invoke(cli.app, ["policies", *map(str, options)], env=WIDE)


def test_the_policies_of_real_reviews_are_compared_and_drawn(tmp_path: Path) -> None:
    out = tmp_path / "out.png"
    command = [sys.executable, "-m", "packload", "policies", str(DATA / "imdb.csv.gz"), *SIZES]
    command += ["--world-size", "8", "--column", "words", "--picture", str(out)]
    done = subprocess.run(
        command, env=os.environ | WIDE, cwd=HERE, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for said in ("25,000 samples of words", "8 ranks", "random", "bucket", "budget", "occupancy", str(out)):
        assert said in done.stdout
    assert out.stat().st_size > 10_000


def test_images_are_charged_their_area() -> None:
    result = _run(
        DATA / "stamps.csv.gz", "--column", "height", "--column", "width", "--batch-size", 8, "--budget", 3e6
    )
    assert result.exit_code == 0, result.output
    assert "796 samples of height x width: smallest 7 x 12" in result.output
    assert "occupancy of cost" not in result.output


def test_a_data_set_is_compared_by_its_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_texts.py").write_text("train = [{'ids': [0] * n, 'y': 1} for n in range(1, 50)]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    result = _run("some_texts:train", "--column", "ids", "--batch-size", 4, "--budget", 100)
    assert result.exit_code == 0, result.output
    assert "49 samples of ids: smallest 1, mean 25, largest 49" in result.output


def test_the_seed_decides_the_plan() -> None:
    options = (DATA / "proteins.csv.gz", *SIZES, "--seed")
    one, again, other = (
        [line for line in _run(*options, seed).output.splitlines() if "planning" not in line]
        for seed in (1, 1, 2)
    )
    assert one == again != other


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((DATA / "imdb.csv.gz", *SIZES), "'words', 'wordpieces'.*--column"),
        ((DATA / "imdb.csv.gz", *SIZES, "--column", "chars"), "no column 'chars'"),
        (("nowhere.csv", *SIZES), "no such file"),
        ((DATA / "proteins.csv.gz", "--batch-size", 4, "--budget", 100), "sample 194.*--oversize skip"),
        ((DATA / "proteins.csv.gz", *SIZES, "--oversize", "drop"), "'drop'.*'skip'"),
        ((DATA / "proteins.csv.gz", *SIZES, "--cost", "bytes"), "'bytes'.*'tokens'"),
        ((DATA / "proteins.csv.gz", *SIZES, "--cost", "area"), r"area needs lengths \[N, 2\]"),
        ((DATA / "proteins.csv.gz", "--batch-size", 4, "--budget", -1), "budget.*above 0"),
        (("packload:PackedTensor", *SIZES), "PackedTensor needs .'values', 'grid', 'order'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(options: tuple[str | Path, ...], said: str) -> None:
    result = _run(*options)
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    assert len(result.output.strip().splitlines()) == 1
    assert re.search(said, result.output), result.output


def test_no_samples_are_an_error(tmp_path: Path) -> None:
    np.save(tmp_path / "none.npy", np.empty(0, np.int64))
    result = _run(tmp_path / "none.npy", *SIZES)
    assert (result.exit_code, "no samples" in result.output) == (1, True)


def test_a_picture_without_matplotlib_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_PLOT_INSTALLED", False)
    result = _run(DATA / "proteins.csv.gz", *SIZES, "--picture", "x.png")
    assert result.exit_code == 1
    assert "pip install 'packload[plot]'" in result.output


def test_the_table_needs_no_matplotlib() -> None:
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from packload.cli import app\n"
        f"app(['policies', {str(DATA / 'proteins.csv.gz')!r}, '--batch-size', '8', '--budget', '16384'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | WIDE,
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "budget filled" in done.stdout


@pytest.mark.parametrize(
    ("text", "shape", "expected"),
    [
        (None, (2,), [3, 4]),
        (None, (2, 2), [15, 24]),
        ("tokens", (2, 2), [8, 10]),
        ("pair", (2,), [9, 16]),
        ("pair_cells", (2, 2), [15, 24]),
        ("2*n+0.5*n^2", (2,), [10.5, 16.0]),
        (" 1e1*n + 0*n^2", (2,), [30.0, 40.0]),
    ],
)
def test_costs_are_named_or_written_out(
    text: str | None, shape: tuple[int, ...], expected: list[float]
) -> None:
    lengths = np.array([3, 4]) if len(shape) == 1 else np.array([[3, 5], [4, 6]])
    assert parse_cost(text, lengths)(lengths).tolist() == expected


@pytest.mark.parametrize("text", ["", "n", "1*n", "a*n+b*n^2", "1*n+2*n", "-1*n+2*n^2"])
def test_other_costs_are_refused(text: str) -> None:
    with pytest.raises(SourceError, match="--cost"):
        parse_cost(text, np.array([1]))


@pytest.mark.parametrize("picture", ["a.bad", "nowhere/a.png"])
def test_a_picture_that_cannot_be_drawn_is_an_error_after_the_table(tmp_path: Path, picture: str) -> None:
    (tmp_path / "n.csv").write_text("n\n3\n4\n")
    result = _run(tmp_path / "n.csv", *SIZES, "--picture", tmp_path / picture)
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    assert "steps on each rank" in result.output and "cannot be drawn" in result.output


def test_a_data_set_of_the_folder_at_hand_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data_of_this_folder.py").write_text("train = [[1, 2], [3]]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    result = _run("data_of_this_folder:train", *SIZES)
    assert result.exit_code == 0, result.output
    assert "2 samples" in result.output

"""The command line, run as a user runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import packload
from packload import cli

WIDE = {"COLUMNS": "200", "TERM": "dumb"}


def test_help_lists_the_commands() -> None:
    result = CliRunner().invoke(cli.app, ["--help"], env=WIDE)
    assert result.exit_code == 0
    assert all(name in result.output for name in ("demo", "policies"))


def test_version_is_printed() -> None:
    result = CliRunner().invoke(cli.app, ["--version"])
    assert result.output.strip() == packload.__version__


def test_the_demo_trains_on_real_reviews_and_writes_its_picture(tmp_path: Path) -> None:
    out = tmp_path / "demo.png"
    options = ["--steps", "2", "--more-steps", "1", "--batch-size", "4", "--held-out", "8", "--limit", "60"]
    command = [sys.executable, "-m", "packload", "demo", *options, "--out", str(out)]
    done = subprocess.run(command, env=os.environ | WIDE, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for said in (
        "last loss",
        "occupancy",
        "seconds a step",
        "peak memory",
        "after 3 packed steps",
        "8 held-out",
    ):
        assert said in done.stdout
    assert out.stat().st_size > 10_000


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_DEMO_INSTALLED", False)
    result = CliRunner().invoke(cli.app, ["demo"])
    assert result.exit_code == 1
    assert "pip install 'packload[demo]'" in result.output


def test_missing_reviews_are_named_with_their_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packload.demo.data.importlib.util.find_spec", lambda name: None)
    result = CliRunner().invoke(cli.app, ["demo"])
    assert result.exit_code == 1
    assert "pip install 'packload[demo]'" in result.output

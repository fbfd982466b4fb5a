"""The streaming examples end at the weights of a run without a break."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def run(*arguments):
    command = [sys.executable, "-m", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_reviews_streamed_with_stops_give_the_weights_of_a_run_without():
    out = run("examples.stream_text", "--steps", 12, "--reviews", 1000)
    assert "all 30 weights are equal, bit for bit" in out


@pytest.mark.pictures
def test_pictures_streamed_with_stops_give_the_weights_of_a_run_without():
    out = run("examples.stream_images", "--steps", 6, "--pictures", 80)
    assert "all 6 weights are equal, bit for bit" in out

import json
import multiprocessing
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .runs import loader_of, train
from .tars import make_shards

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    make_shards(folder, 3, 10)
    return folder


ALL = sorted(f"s{s}-{k:03d}" for s in range(3) for k in range(10))


def run_and_kill(three, path, draw):
    """Train two epochs, killed at random points and started again with other workers; how often it was."""
    kills = 0
    while True:
        arguments = (three, path, 2, draw.choice([0, 1, 2, 4]), 0.02)
        process = multiprocessing.get_context("fork").Process(target=train, args=arguments)
        process.start()
        process.join(draw.uniform(0.03, 0.3))
        process.kill()
        process.join()
        if process.exitcode == 0:
            return kills
        assert process.exitcode == -signal.SIGKILL
        kills += 1
        assert kills < 200


@pytest.mark.parametrize("trials", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_run_killed_at_random_points_serves_every_sample_exactly_once(three, tmp_path, trials):
    epochs = loader_of(three, 0, rank=0, world_size=1)
    unbroken = [[batch["__key__"] for batch in epochs] for _ in range(2)]
    kills = 0
    for trial in range(trials):
        path = tmp_path / f"{trial}.json"
        kills += run_and_kill(three, path, random.Random(trial))
        served = [epoch["keys"] for epoch in json.loads(path.read_text())["served"]]
        assert served == unbroken
        for epoch in served:
            assert sorted(key for batch in epoch for key in batch) == ALL
    assert kills >= trials


def test_four_ranks_with_two_workers_over_three_shards(three):
    loaders = [loader_of(three, 2, rank=rank, world_size=4) for rank in range(4)]
    for _ in range(2):
        check([[batch["__key__"] for batch in loader] for loader in loaders])


def check(ranks):
    """Steps are equal and not one is empty, and all samples are served once."""
    assert len({len(batches) for batches in ranks}) == 1
    assert all(batch for batches in ranks for batch in batches)
    assert sorted(key for batches in ranks for batch in batches for key in batch) == ALL


@pytest.mark.slow
def test_four_ranks_of_torchrun_with_two_workers_over_three_shards(three, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--standalone"]
    command += ["-m", "tests.packload.shards.runs", three, tmp_path]
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    for epoch in range(2):
        check([rank[epoch] for rank in ranks])
    alone = [loader_of(three, 0, rank=rank, world_size=4) for rank in range(4)]
    for epoch in range(2):
        assert [rank[epoch] for rank in ranks] == [[b["__key__"] for b in loader] for loader in alone]

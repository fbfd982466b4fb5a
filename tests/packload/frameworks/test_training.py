"""Plans under Lightning, accelerate and the Hugging Face Trainer: every batch, epoch and rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch.utils.data import DataLoader

import packload
from tests.packload.frameworks import programs

pytestmark = pytest.mark.frameworks

HERE = Path(__file__).parents[3]
NAMES = ["random", "bucket", "budget", "fixed"]


def _planned(name: str = "budget", rank: int = 0, world_size: int = 1) -> programs.Epochs:
    """What a rank is to be served, read off the plan itself."""
    sampler = programs.make_sampler(name, rank=rank, world_size=world_size)
    epochs = []
    for epoch in range(programs.EPOCHS):
        grid = [window.cell(step, rank) for window in sampler.windows(epoch) for step in range(window.steps)]
        epochs.append(grid)
    return epochs


def _launch(what: str, out: Path, *, torchrun: bool = True) -> subprocess.CompletedProcess[str]:
    """Two processes of a program; Lightning starts its second one itself."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if torchrun else []
    command = [sys.executable, *start, "-m", programs.__name__, what, str(out)]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=HERE, env=variables, capture_output=True, text=True, timeout=300)


def _served(out: Path) -> list[programs.Epochs]:
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


# --- one process


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("workers", [0, 2])
def test_lightning_serves_every_epoch_as_planned(name: str, workers: int) -> None:
    assert programs.run_lightning(programs.make_sampler(name), workers=workers) == _planned(name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prepare", [True, False])
def test_accelerate_serves_every_epoch_as_planned(name: str, prepare: bool) -> None:
    assert programs.run_accelerate(programs.make_sampler(name), prepare=prepare) == _planned(name)


@pytest.mark.parametrize("name", NAMES)
def test_the_trainer_serves_every_epoch_as_planned(name: str, tmp_path: Path) -> None:
    assert programs.run_trainer(programs.make_sampler(name), tmp_path) == _planned(name)


# --- two processes


@pytest.mark.parametrize("what", ["lightning", "accelerate", "trainer"])
def test_two_processes_serve_the_plan_of_their_ranks(what: str, tmp_path: Path) -> None:
    done = _launch(what, tmp_path, torchrun=what != "lightning")
    assert done.returncode == 0, done.stderr[-3000:]
    served = _served(tmp_path)
    assert served == [_planned(rank=rank, world_size=2) for rank in range(2)]
    for epoch in range(programs.EPOCHS):
        union = [i for rank in served for batch in rank[epoch] for i in batch]
        assert sorted(union) == list(range(len(programs.LENGTHS)))
        assert len(served[0][epoch]) == len(served[1][epoch])


def test_accelerate_may_shard_a_plan_of_one_rank(tmp_path: Path) -> None:
    done = _launch("accelerate-whole", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    whole, served = _planned(), _served(tmp_path)
    for epoch in range(programs.EPOCHS):
        even = len(whole[epoch]) // 2 * 2
        for rank in range(2):
            assert served[rank][epoch][: even // 2] == whole[epoch][rank:even:2]


def test_lightning_predicts_every_sample_once_and_in_order() -> None:
    class Echo(lightning.LightningModule):
        def predict_step(self, batch: packload.Batch, _: int) -> list[int]:
            return batch.tokens.sizes[:, 0].tolist()

    lengths = [3, 5, 2, 4, 9, 1, 7]
    samples: Any = [{"tokens": torch.arange(n)} for n in lengths]
    sampler = packload.FixedBatchSampler(lengths, 2)
    loader: Any = DataLoader(samples, batch_sampler=sampler, collate_fn=packload.collate)
    found: Any = programs.make_trainer().predict(Echo(), loader)
    assert [n for batch in found for n in batch] == lengths


@pytest.mark.parametrize(
    ("what", "said"),
    [("lightning-again", "use_distributed_sampler=False"), ("accelerate-again", "prepare")],
)
def test_a_plan_of_ranks_is_not_sharded_again(what: str, said: str, tmp_path: Path) -> None:
    done = _launch(what, tmp_path, torchrun=what != "lightning-again")
    assert done.returncode != 0
    assert said in done.stderr
    assert not list(tmp_path.glob("rank*.json"))

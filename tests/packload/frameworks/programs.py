"""Programs that train with a plan of packload's under a framework, each process as a user starts it.

``python -m tests.packload.frameworks.programs lightning OUT`` and so on. Every process writes what it was
served to ``OUT/rank{r}.json``: for each epoch a list of batches, a batch being the indices of its samples.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import packload

LENGTHS: list[int] = np.random.default_rng(0).integers(1, 30, 203).tolist()
EPOCHS = 2
Epochs = list[list[list[int]]]


class Texts(Dataset):
    """Samples of given lengths that carry their index."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"tokens": torch.arange(LENGTHS[index]) % 50, "index": index, "label": index % 2}


class Model(nn.Module):
    """A classifier of packed tokens; keeps the indices that it was given, by epoch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 4)
        self.head = nn.Linear(4, 2)
        self.seen: Epochs = []

    def forward(self, tokens: packload.PackedTensor, index: Tensor, label: Tensor) -> dict[str, Tensor]:
        """The loss of a batch."""
        self.seen[-1].append(index.tolist())
        return {"loss": F.cross_entropy(self.head(self.embed(tokens).mean(1)), label)}


def make_sampler(name: str = "budget", **options: Any) -> packload.BudgetBatchSampler:
    """The plan under test; by default of the process's own rank."""
    kinds: dict[str, Callable[..., Any]] = {
        "random": lambda **o: packload.RandomBatchSampler(LENGTHS, 8, **o),
        "bucket": lambda **o: packload.BucketBatchSampler(LENGTHS, 8, buckets=4, **o),
        "budget": lambda **o: packload.BudgetBatchSampler(LENGTHS, 100, **o),
        "fixed": lambda **o: packload.FixedBatchSampler(LENGTHS, 8, **o),
    }
    return kinds[name](**options)


def make_loader(sampler: Any, workers: int = 0) -> DataLoader:
    """The loader that every recipe has."""
    return DataLoader(Texts(), batch_sampler=sampler, collate_fn=packload.collate, num_workers=workers)


# --- Lightning


class Module(lightning.LightningModule):
    """The model for Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def on_train_epoch_start(self) -> None:
        self.model.seen.append([])

    def training_step(self, batch: packload.Batch, _: int) -> Tensor:
        return self.model(**batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_trainer(**options: Any) -> lightning.Trainer:
    """A trainer that leaves nothing behind."""
    return lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def run_lightning(sampler: Any, *, workers: int = 0, **options: Any) -> Epochs:
    """Train under Lightning."""
    module = Module()
    make_trainer(**options).fit(module, make_loader(sampler, workers))
    return module.model.seen


# --- accelerate


def run_accelerate(sampler: Any, *, prepare: bool = False, workers: int = 0) -> Epochs:
    """Train under accelerate; the loader by the recipe, or through ``prepare`` as any other."""
    accelerator = Accelerator(cpu=True)
    model = Model()
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = make_loader(sampler, workers)
    if prepare:
        loader = accelerator.prepare(loader)
    else:
        loader = prepare_data_loader(loader, accelerator.device, 1, 0, put_on_device=True)
    for _ in range(EPOCHS):
        model.seen.append([])
        for batch in loader:
            accelerator.backward(wrapped(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
    return model.seen


# --- Hugging Face Trainer


class PlannedTrainer(Trainer):
    """A Trainer that takes the batches of a plan."""

    def __init__(self, *args: Any, sampler: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sampler = sampler

    def get_train_dataloader(self) -> DataLoader:
        loader = DataLoader(self.train_dataset, batch_sampler=self.sampler, collate_fn=self.data_collator)
        return prepare_data_loader(loader, self.accelerator.device, 1, 0, put_on_device=True)


class _EpochBegins(TrainerCallback):
    def on_epoch_begin(self, *args: Any, model: Any, **kwargs: Any) -> None:
        getattr(model, "module", model).seen.append([])


def run_trainer(sampler: Any, out: Path) -> Epochs:
    """Train under the Trainer of transformers."""
    arguments = TrainingArguments(
        str(out / "trainer"),
        num_train_epochs=EPOCHS,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    model = Model()
    trainer = PlannedTrainer(
        model,
        arguments,
        data_collator=packload.collate,
        train_dataset=Texts(),
        callbacks=[_EpochBegins()],
        sampler=sampler,
    )
    trainer.train()
    return model.seen


# --- as a process


def _main(what: str, out: Path) -> None:
    torch.set_num_threads(1)
    runs: dict[str, Callable[[], Epochs]] = {
        "lightning": lambda: run_lightning(
            make_sampler(), strategy="ddp", devices=2, use_distributed_sampler=False
        ),
        "lightning-again": lambda: run_lightning(make_sampler(), strategy="ddp", devices=2),
        "accelerate": lambda: run_accelerate(make_sampler()),
        "accelerate-again": lambda: run_accelerate(make_sampler(), prepare=True),
        "accelerate-whole": lambda: run_accelerate(make_sampler(rank=0, world_size=1), prepare=True),
        "trainer": lambda: run_trainer(make_sampler(), out),
    }
    seen = runs[what]()
    rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0)))
    (out / f"rank{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]))

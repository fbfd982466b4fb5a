"""Loaders and batches in accelerate and lightning."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import packload
from packload import Batch, Loader

from .samples import Ragged, batches, check

pytestmark = pytest.mark.frameworks


def some_batch() -> Batch:
    return packload.collate([Ragged()[k] for k in (3, 5, 7, 8)])


def test_lightning_moves_a_batch_as_one_object():
    module = pytest.importorskip("lightning.fabric.utilities.apply_func")
    moved = module.move_data_to_device({"inner": some_batch()}, torch.device("meta"))["inner"]
    assert isinstance(moved, Batch) and moved.buffer.device.type == "meta"
    assert moved.x.values.device.type == moved.index.device.type == "meta"
    stays = some_batch()
    check(module.move_data_to_device(stays, torch.device("cpu")), [3, 5, 7, 8])


def test_accelerate_moves_a_batch_as_one_object():
    operations = pytest.importorskip("accelerate.utils.operations")
    for non_blocking in (False, True):
        moved = operations.send_to_device([some_batch()], "meta", non_blocking=non_blocking)[0]
        assert isinstance(moved, Batch) and moved.buffer.device.type == "meta"
        assert moved.x.values.device.type == "meta"
    check(operations.send_to_device(some_batch(), "cpu"), [3, 5, 7, 8])


def test_accelerate_leaves_a_loader_as_it_is():
    accelerate = pytest.importorskip("accelerate")
    loader = Loader(Ragged(), batches())
    prepared = accelerate.Accelerator(cpu=True).prepare(loader)
    assert prepared is loader


def test_lightning_cannot_tell_the_number_of_samples_from_a_ragged_field_but_the_batch_says_it():
    data = pytest.importorskip("lightning.pytorch.utilities.data")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert data.extract_batch_size(some_batch()) == 1, "the first sample's length: say batch_size=..."
    assert some_batch().batch_size == 4
    dense = packload.collate([{"label": k, "name": str(k)} for k in range(5)])
    assert data.extract_batch_size(dense.label) == dense.batch_size == 5


class Positions(list):
    """A batch sampler that notes which epochs it was told."""

    def __init__(self) -> None:
        super().__init__(batches())
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def module_of(pytorch: Any) -> Any:
    class Module(pytorch.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)
            self.seen: list[list[int]] = []

        def training_step(self, batch: Batch, step: int) -> Any:
            check(batch, batch.index.tolist())
            self.seen.append(batch.index.tolist())
            loss = self.layer(batch.x[:, :, None]).sum()
            self.log("loss", loss, batch_size=batch.batch_size)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.0)

    return Module()


def trainer_of(pytorch: Any, path: Any, **options: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pytorch.Trainer(accelerator="cpu", default_root_dir=path, **quiet, **options)


@pytest.mark.filterwarnings("ignore")
def test_a_lightning_trainer_goes_on_inside_of_an_epoch(tmp_path):
    pytorch = pytest.importorskip("lightning.pytorch")
    whole, loader = module_of(pytorch), Loader(Ragged(), Positions(), workers=2)
    trainer_of(pytorch, tmp_path, max_epochs=2, enable_checkpointing=False).fit(whole, loader)
    assert whole.seen == 2 * batches()
    assert loader.batch_sampler.epochs[-1] == 1

    class Save(pytorch.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 13:
                trainer.save_checkpoint(tmp_path / "state.ckpt")

    loader = Loader(Ragged(), Positions(), workers=2)
    trainer_of(pytorch, tmp_path, max_epochs=2, callbacks=[Save()]).fit(module_of(pytorch), loader)
    second = module_of(pytorch)
    trainer = trainer_of(pytorch, tmp_path, max_epochs=2, enable_checkpointing=False)
    trainer.fit(second, Loader(Ragged(), Positions(), workers=3), ckpt_path=tmp_path / "state.ckpt")
    assert second.seen == whole.seen[13:]

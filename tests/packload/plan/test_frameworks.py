"""Accelerate, Lightning, the Trainer of transformers: what works as it is, and no plan is sharded twice."""

from __future__ import annotations

import pytest
from torch import Tensor, nn, tensor
from torch.optim import SGD
from torch.utils.data import DataLoader

from packload import BudgetBatchSampler, RandomBatchSampler
from tests.packload.plan.plans import some_lengths

pytestmark = pytest.mark.frameworks

LENGTHS = some_lengths(100)


def loader_of(**kw) -> DataLoader:
    data = [float(i) for i in range(100)]
    return DataLoader(data, batch_sampler=BudgetBatchSampler(LENGTHS, 60, **kw))


def test_accelerate_serves_a_plan_as_it_is_in_one_process():
    accelerate = pytest.importorskip("accelerate")
    prepared = accelerate.Accelerator(cpu=True).prepare(loader_of())
    expected = loader_of()
    for epoch in range(2):
        expected.batch_sampler.set_epoch(epoch)
        assert [b.tolist() for b in prepared] == [b.tolist() for b in expected]
    assert len(prepared) > 1


def test_accelerate_skips_batches_of_a_plan():
    accelerate = pytest.importorskip("accelerate")
    skipped = accelerate.skip_first_batches(loader_of(), 5)
    assert [b.tolist() for b in skipped] == [b.tolist() for b in loader_of()][5:]


def test_accelerate_sharding_a_ranks_batches_is_refused():
    shard = pytest.importorskip("accelerate.data_loader").BatchSamplerShard
    twice = shard(loader_of(rank=0, world_size=2).batch_sampler, 2, 0, even_batches=False)
    with pytest.raises(RuntimeError, match="one rank's of 2 already.*leave the loader out of prepare"):
        list(twice)


def test_accelerate_may_shard_a_plan_for_one_rank():
    shard = pytest.importorskip("accelerate.data_loader").BatchSamplerShard
    parts = [shard(loader_of(rank=0, world_size=1).batch_sampler, 2, r, even_batches=False) for r in range(2)]
    seen = [i for part in parts for batch in part for i in batch]
    assert sorted(seen) == list(range(100))


def model(pytorch):
    class Model(pytorch.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)
            self.seen: list[list[float]] = []

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            self.seen.append(batch.tolist())
            return self.layer(batch.float()[:, None]).sum()

        def configure_optimizers(self) -> SGD:
            return SGD(self.parameters(), 0.0)

    return Model()


def trainer(pytorch, folder, **kw):
    return pytorch.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **kw,
    )


def test_lightning_serves_a_plan_and_sets_its_epoch(tmp_path):
    pytorch = pytest.importorskip("lightning.pytorch")
    module = model(pytorch)
    trainer(pytorch, tmp_path).fit(module, loader_of())
    expected = loader_of()
    batches = []
    for epoch in range(2):
        expected.batch_sampler.set_epoch(epoch)
        batches += [b.tolist() for b in expected]
    assert module.seen == batches


@pytest.mark.parametrize("make", [BudgetBatchSampler, RandomBatchSampler])
def test_lightning_making_a_batch_sampler_again_is_refused(make):
    data = pytest.importorskip("lightning.pytorch.utilities.data")
    loader = DataLoader(range(100), batch_sampler=make(LENGTHS, 60, rank=0, world_size=2))
    with pytest.raises(TypeError, match="use_distributed_sampler=False"):
        data._update_dataloader(loader, loader.sampler)


def test_the_trainer_of_transformers_serves_a_plan(tmp_path):
    transformers = pytest.importorskip("transformers")
    seen: list[list[float]] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            seen.append(x.tolist())
            return {"loss": self.layer(x.float()[:, None]).sum()}

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self) -> DataLoader:
            return DataLoader(
                self.train_dataset,
                batch_sampler=BudgetBatchSampler(LENGTHS, 60),
                collate_fn=self.data_collator,
            )

    expected = BudgetBatchSampler(LENGTHS, 60)
    steps = len(expected)
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        num_train_epochs=2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        learning_rate=0.0,
        disable_tqdm=True,
    )
    data = [{"x": float(i)} for i in range(100)]

    def collate(samples: list[dict[str, float]]) -> dict[str, Tensor]:
        return {"x": tensor([sample["x"] for sample in samples])}

    Trainer(Model(), arguments, train_dataset=data, data_collator=collate).train()
    assert seen[:steps] == list(expected)
    assert seen[steps:] == list(expected)[: len(seen) - steps]

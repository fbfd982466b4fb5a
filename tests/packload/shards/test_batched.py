import io
import pickle

import numpy as np
import pytest
import torch
import torchdata.nodes as tn
import webdataset as wds
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import packload
from packload.shards import ShardWriter, batched

lengths = st.lists(st.integers(0, 20), max_size=40)


def samples(sizes):
    return [{"__key__": str(i), "tokens": np.arange(n)} for i, n in enumerate(sizes)]


@given(lengths, st.integers(1, 60), st.integers(1, 5), st.one_of(st.none(), st.integers(1, 5)))
def test_budgets_are_kept_and_every_sample_is_in_one_batch(sizes, budget, open_batches, most):
    stage = batched(budget, oversize="skip", open_batches=open_batches, batch_size=most)
    batches = list(stage(iter(samples(sizes))))
    served = sorted(int(key) for batch in batches for key in batch["__key__"])
    assert served == [i for i, n in enumerate(sizes) if n <= budget]
    assert stage.counts["skipped"] == sum(n > budget for n in sizes)
    for batch in batches:
        assert batch.tokens.grid.cells <= budget and batch.batch_size <= (most or 10**9)


def test_batches_are_nearly_full():
    sizes = np.random.default_rng(0).lognormal(5, 0.7, 3000).astype(int).clip(1, 2000)
    batches = list(batched(8192, cost="tokens")(samples(sizes)))
    assert sizes.sum() / (8192 * (len(batches) - 4)) > 0.98


def test_a_sample_above_the_budget_raises_is_skipped_or_is_alone():
    data = samples([3, 100, 4])
    with pytest.raises(ValueError, match="sample '1' costs 100, more than the budget of 50"):
        list(batched(50)(data))
    assert [b["__key__"] for b in batched(50, oversize="skip")(data)] == [["0", "2"]]
    stage = batched(50, oversize="alone")
    assert [b["__key__"] for b in stage(data)] == [["1"], ["0", "2"]] and stage.counts["alone"] == 1


def test_the_cost_is_that_of_the_one_ragged_field_or_of_the_one_named():
    pair = [{"x": np.zeros((n, 3)), "p": np.zeros((n, n))} for n in (2, 3, 4)]
    schema = {"x": "n _", "p": "n n"}
    with pytest.raises(ValueError, match=r"\['x', 'p'\] are ragged: say which one is charged, cost='x'"):
        list(batched(9, schema=schema)(pair))
    with pytest.raises(ValueError, match="cost='y' is no ragged field"):
        list(batched(9, schema=schema, cost="y")(pair))
    assert [b.batch_size for b in batched(9, schema=schema, cost="x", open_batches=1)(pair)] == [3]
    assert [b.batch_size for b in batched(16, schema=schema, cost="p", open_batches=1)(pair)] == [2, 1]
    one = [{"x": np.zeros((n, 3)), "y": [0] * n} for n in (2, 3, 4)]
    assert [b.batch_size for b in batched(5, schema={"x": "n _", "y": "n"}, open_batches=1)(one)] == [2, 1]
    assert [b.batch_size for b in batched(2, cost=lambda s: 1, open_batches=1)(one)] == [2, 1]
    with pytest.raises(ValueError, match="no ragged field"):
        list(batched(5)([{"txt": "x"}]))


@pytest.mark.parametrize(
    "leaf, cells",
    [
        (Image.new("L", (5, 3)), 15),
        (torch.zeros(3, 4, 5), 20),
        ([1, 2, 3], 3),
        ([[1, 2], [3, 4]], 2),
        ([], 0),
        (packload.ragged(np.zeros((2, 3)), "n m"), 6),
    ],
    ids=str,
)
def test_cells_of_leaves_of_every_kind(leaf, cells):
    assert batched(100).cost({"x": {"y": leaf}}) == cells
    assert batched(100).cost(leaf) == cells


@pytest.mark.parametrize(
    "arguments", [{"budget": 0}, {"budget": 1, "batch_size": 0}, {"budget": 1, "open_batches": 0}]
)
def test_arguments_out_of_range(arguments):
    with pytest.raises(ValueError, match="must be above 0"):
        batched(**arguments)
    with pytest.raises(ValueError, match="oversize='split'"):
        batched(1, oversize="split")


def test_the_stage_can_be_pickled():
    stage = pickle.loads(pickle.dumps(batched(30, schema={"tokens": "n"})))
    assert [b.batch_size for b in stage(samples([10, 10, 10, 5]))] == [3, 1]


@pytest.fixture
def folder(tmp_path):
    with ShardWriter(tmp_path, count=10) as writer:
        for i in range(40):
            image = io.BytesIO()
            Image.new("RGB", (3 + i, 5)).save(image, "PNG")
            writer.write({"npy": np.arange(i), "cls": i, "png": image.getvalue()})
    return tmp_path


def urls(folder):
    return sorted(map(str, folder.glob("*.tar")))


@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_pipeline_of_webdataset(folder, workers):
    stage = packload.batched(budget=100, schema={"npy": "n"}, cost="npy")
    dataset = wds.WebDataset(urls(folder), shardshuffle=False).decode("rgb8").compose(stage)
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=workers)
    batches = list(loader)
    assert sorted(c for batch in batches for c in batch.cls.tolist()) == list(range(40))
    assert all(batch.npy.grid.cells <= 100 for batch in batches)
    for batch in batches:
        assert batch.npy.grid.axes[0].lengths.tolist() == batch.cls.tolist()


def test_collate_as_the_collation_of_webdataset(folder):
    dataset = wds.WebDataset(urls(folder), shardshuffle=False).decode("pil").to_tuple("png", "cls")
    batches = list(dataset.batched(8, collation_fn=packload.collate))
    assert [batch[1].tolist() for batch in batches] == [list(range(i, i + 8)) for i in range(0, 40, 8)]
    assert batches[1][0].grid.axes[1].lengths.tolist() == list(range(11, 19))


def test_in_a_pipeline_of_torchdata_nodes(folder):
    data = packload.ShardDataset(urls(folder), fields=["npy", "cls"])
    lists = tn.SamplerWrapper(packload.BudgetBatchSampler(data.lengths("npy.0"), 100, rank=0, world_size=1))
    read = tn.ParallelMapper(lists, data.__getitems__, num_workers=2, method="thread")
    loader = tn.Loader(tn.Mapper(read, packload.collate), restart_on_stop_iteration=True)
    batches = list(loader)
    assert sorted(c for batch in batches for c in batch.cls.tolist()) == list(range(40))
    assert all(batch.npy.grid.cells <= 100 for batch in batches)

"""Loader: what comes out, in every mode."""

import gc

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import packload
from packload import Collate, CollateError

from .loaders import WAYS, every_way, indices, loader_of
from .samples import Fetched, Ragged, Random, Slow, batches, by_hand, check

# ---------------------------------------------------------------- what comes


@every_way
@pytest.mark.parametrize("dataset", [Ragged(), Fetched(), Slow()], ids=lambda d: type(d).__name__)
def test_batches_come_in_the_sampler_s_order(way, dataset):
    loader = loader_of(way, dataset)
    for _ in range(2):
        seen = 0
        for batch, expected in zip(loader, batches(), strict=True):
            check(batch, expected)
            seen += 1
        assert seen == len(loader) == 10


@every_way
def test_batches_that_are_kept_stay_as_they_were(way):
    kept = list(loader_of(way, prefetch=1, hold=1))
    for batch, expected in zip(kept, batches(), strict=True):
        check(batch, expected)


@every_way
def test_a_field_that_is_kept_outlives_its_batch_and_its_loader(way):
    loader = loader_of(way, hold=0)
    fields = [batch.x.values[:3] for batch in loader]
    expected = [field.clone() for field in fields]
    again = indices(loader)
    del loader
    gc.collect()
    assert again == batches()
    assert all(map(torch.equal, fields, expected))


@every_way
def test_what_other_collate_functions_make_goes_through(way):
    for batch, expected in zip(loader_of(way, collate=by_hand), batches(), strict=True):
        assert batch["index"] == expected and batch["text"] == "abc"
        assert torch.equal(batch["x"], by_hand([Ragged()[k] for k in expected])["x"])


@every_way
def test_samples_that_are_leaves_give_the_field_alone(way):
    data = [torch.arange(k % 5) for k in range(40)]
    for field, expected in zip(loader_of(way, data), batches(), strict=True):
        assert isinstance(field, packload.PackedTensor)
        assert [x.tolist() for x in field.unbind()] == [data[k].tolist() for k in expected]


@every_way
def test_a_schema_and_keys_of_any_kind(way):
    data = {f"key {k}": {"pair": np.ones((k, k)), "n": k} for k in range(6)}
    collate = Collate({"pair": "n n"})
    sampler = [["key 2", "key 5"], ["key 0"]]
    sizes = [[len(x) for x in batch.pair.unbind()] for batch in loader_of(way, data, sampler, collate)]
    assert sizes == [[2, 5], [0]]


@every_way
@pytest.mark.parametrize("sampler", [[], [[3]], [[k] for k in range(40)]], ids=["none", "one", "many"])
def test_passes_of_any_length(way, sampler):
    assert indices(loader_of(way, sampler=sampler)) == sampler


@every_way
def test_a_batch_of_no_samples_is_an_error(way):
    with pytest.raises(CollateError, match="no samples"):
        indices(loader_of(way, sampler=[[1], []]))


def test_slots_are_used_again_when_the_loop_keeps_one_batch():
    loader = loader_of("threads")
    for _ in range(3):
        for batch in loader:
            del batch
    assert loader.stats().overflows == 0
    loader = loader_of("processes", persistent_workers=True)
    for _ in range(3):
        for batch in loader:
            assert batch.batch_size == 4
    assert loader.stats().overflows == 0
    loader.close()


def test_what_a_dataloader_gives_is_what_a_loader_gives():
    plain = DataLoader(Ragged(), batch_sampler=batches(), collate_fn=packload.collate)
    for batch, other in zip(plain, loader_of("threads"), strict=True):
        assert torch.equal(batch.x.values, other.x.values) and torch.equal(batch.index, other.index)


# ---------------------------------------------------------------- other loaders


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_collate_works_in_other_loaders(kind, workers):
    loader = kind(
        Ragged(), batch_sampler=batches(), collate_fn=packload.collate, num_workers=workers, pin_memory=True
    )
    for _ in range(2):
        for batch, expected in zip(loader, batches(), strict=True):
            check(batch, expected)


def test_a_stateful_dataloader_goes_on_where_it_stood():
    def make():
        return StatefulDataLoader(
            Ragged(), batch_sampler=batches(), collate_fn=packload.collate, num_workers=2
        )

    loader = make()
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    other = make()
    other.load_state_dict(loader.state_dict())
    assert indices(other) == batches()[3:]


# ---------------------------------------------------------------- randomness, arguments


def test_seeds_follow_from_the_batch_alone_and_change_with_epoch_and_seed():
    def numbers(way, epochs=1, **options):
        loader = loader_of(way, Random(), **options)
        return [torch.cat(list(loader)).tolist() for _ in range(epochs)]

    expected = numbers("inline", 2)
    assert expected[0] != expected[1]
    for way in WAYS:
        assert numbers(way, 2) == expected
    assert numbers("threads", seed=1)[0] != expected[0]
    loader = loader_of("threads", Random())
    iterator = iter(loader)
    got = torch.cat([next(iterator) for _ in range(4)])
    other = loader_of("process", Random())
    other.load_state_dict(loader.state_dict())
    assert torch.cat([got, *other]).tolist() == expected[0]
    with pytest.raises(RuntimeError, match="loader calls"):
        packload.batch_seed()


def test_random_samplers_of_torch_work():
    order = BatchSampler(RandomSampler(range(40)), 4, False)
    assert sorted(sum(indices(loader_of("threads", sampler=order)), [])) == list(range(40))
    order = BatchSampler(SequentialSampler(range(40)), 7, True)
    assert sum(indices(loader_of("threads", sampler=order)), []) == list(range(35))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"workers": -1}, ValueError, "workers >= 0"),
        ({"prefetch": 0}, ValueError, "prefetch >= 1"),
        ({"hold": -1}, ValueError, "hold >= 0"),
        ({"mode": "fiber"}, ValueError, "'thread' or 'process', not 'fiber'"),
        ({"sampler": 3}, TypeError, "batch sampler, int"),
        ({"dataset": iter(())}, TypeError, "no __getitem__"),
    ],
)
def test_wrong_arguments_are_errors(options, error, text):
    with pytest.raises(error, match=text):
        loader_of("thread", **options)


def test_a_cpu_is_no_device_to_copy_to():
    loader = loader_of("threads", device="cpu", pin_memory=True)
    assert indices(loader) == batches() and loader.stats().copied_per_byte == 1.0


def test_a_device_gets_all_batches():
    for batch in loader_of("threads", device="meta"):
        assert batch.x.values.device.type == "meta"

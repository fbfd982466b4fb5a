"""Batch: a mapping of fields that moves, prints, pickles and flattens as a whole."""

from __future__ import annotations

import copy
import io
import pickle
from collections import namedtuple
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

import ops
from packload import Batch, Collate, PackedTensor, collate

Pair = namedtuple("Pair", "ids label")


def make(lengths: tuple[int, ...] = (3, 0, 2)) -> Batch:
    samples = [
        {
            "x": torch.randn(n, 4),
            "ids": list(range(n)) if n else torch.zeros(0, dtype=torch.int64),
            "keys": str(n),
            "meta": {"pair": torch.ones(n, n, dtype=torch.bool), "y": float(n)},
        }
        for n in lengths
    ]
    return Collate({"x": "n _", "ids": "n", "meta.pair": "n n"})(samples)


def packed_fields(batch: Batch) -> list[PackedTensor]:
    return [batch["x"], batch["ids"], batch["meta"]["pair"]]


def assert_same(a: Batch, b: Batch) -> None:
    for x, y in zip(packed_fields(a), packed_fields(b)):
        assert torch.equal(x.values, y.values) and torch.equal(x.sizes, y.sizes) and x.order == y.order
    assert torch.equal(a.meta.y, b.meta.y) and a["keys"] == b["keys"]


def assert_axes_shared(batch: Batch) -> None:
    axes = [axis for field in packed_fields(batch) for axis in field.axes]
    assert all(axis is axes[0] for axis in axes)


def test_a_batch_is_a_mapping_of_its_fields() -> None:
    batch = make()
    assert isinstance(batch, Mapping)
    assert list(batch) == list(batch.keys()) == ["x", "ids", "keys", "meta"]
    assert len(batch) == len(batch.values()) == len(batch.items()) == 4
    assert dict(batch)["x"] is batch["x"]
    assert "x" in batch and "y" not in batch and batch.get("y") is None


def test_batch_size_is_the_number_of_samples_whatever_the_first_field() -> None:
    assert make().batch_size == make().meta.batch_size == 3
    assert Batch({"text": ["a", "b"]}).batch_size == 2
    assert Batch({"y": torch.zeros(5, 2)}).batch_size == 5
    assert Batch({"inner": Batch({"y": torch.zeros(4)})}).batch_size == 4
    with pytest.raises(ValueError, match="no batch size"):
        _ = Batch({}).batch_size


def test_fields_are_attributes_and_methods_win() -> None:
    batch = make()
    assert batch.x is batch["x"] and batch.meta.pair is batch["meta"]["pair"]
    assert callable(batch.keys) and batch["keys"] == ["3", "0", "2"]
    assert "x" in dir(batch)
    with pytest.raises(AttributeError, match="'y'.*'x'"):
        _ = batch.y
    with pytest.raises(KeyError, match="'y'.*'x'"):
        _ = batch["y"]


def test_a_batch_of_tuples_unpacks_and_takes_positions() -> None:
    batch = collate([(torch.ones(2), 1), (torch.ones(3), 0)])
    ids, label = batch
    assert ids is batch[0] and label is batch[1] is batch[-1]
    assert list(batch.keys()) == [0, 1] and dict(batch.items())[0] is ids
    with pytest.raises(IndexError):
        _ = batch[2]


def test_a_batch_of_named_tuples_has_names_and_positions() -> None:
    batch = collate([Pair([1, 2], 0), Pair([3], 1)])
    ids, label = batch
    assert batch.ids is batch["ids"] is batch[0] is ids and batch.label is label


def test_a_batch_can_be_built_from_a_dict_or_pairs_and_copies_it() -> None:
    contents = {"x": torch.zeros(2)}
    batch = type(make())(contents)
    contents["y"] = torch.zeros(2)
    assert list(batch) == ["x"] == list(Batch([("x", 1)]))  # type: ignore[arg-type]
    first, second = Batch({0: "a", 1: "b"})
    assert (first, second) == ("a", "b")


def test_to_converts_floating_point_fields_only_and_shares_axes() -> None:
    batch = make()
    for moved in (batch.to(torch.float64), batch.to("cpu", torch.float64), batch.to(dtype=torch.float64)):
        assert moved is not batch
        assert moved.x.dtype == moved.meta.y.dtype == torch.float64
        assert moved.ids.dtype == torch.int64 and moved.meta.pair.dtype == torch.bool
        assert batch.x.dtype == torch.float32
        assert_axes_shared(moved)


def test_to_returns_a_batch_for_every_way_in_which_trainers_call_it() -> None:
    batch = make()
    device = torch.device("cpu")
    for moved in (batch.to(device), batch.to(device, non_blocking=True), batch.to(device=device)):
        assert_same(moved, batch)
    meta = batch.to("meta")
    assert meta.x.device.type == meta.x.offsets.device.type == "meta"
    assert meta.x.axes[0].max_length == 3
    assert_axes_shared(meta)


def test_to_keeps_the_tuple_kind() -> None:
    ids, label = collate([([1, 2], 0)]).to("cpu")
    assert ids.values.tolist() == [1, 2] and label.tolist() == [0]


def test_pin_memory_is_a_no_op_without_an_accelerator() -> None:
    batch = make()
    pinned = batch.pin_memory()
    if torch.accelerator.is_available():
        assert pinned.x.values.is_pinned()
        assert_axes_shared(pinned)
    else:
        assert pinned is batch


def test_record_stream_passes_over_host_tensors() -> None:
    make().record_stream(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("copied", [lambda b: pickle.loads(pickle.dumps(b)), copy.deepcopy, copy.copy])
def test_copies_and_pickles_keep_fields_and_shared_axes(copied: Any) -> None:
    batch = make()
    again = copied(batch)
    assert_same(again, batch)
    assert_axes_shared(again)
    assert list(copied(collate([([1], 2)]))) != [0, 1]


def test_torch_save_loads_weights_only() -> None:
    file = io.BytesIO()
    batch = make()
    torch.save(batch, file)
    file.seek(0)
    again = torch.load(file, weights_only=True)
    assert_same(again, batch)


def test_a_batch_is_a_pytree_node() -> None:
    batch = make()
    assert_same(pytree.tree_map(lambda leaf: leaf, batch), batch)
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(batch)[0]]
    assert any(path.startswith("['meta']['y']") for path in paths)
    doubled = pytree.tree_map_only(torch.Tensor, lambda t: t * 2 if t.is_floating_point() else t, batch)
    assert torch.equal(doubled.x.values, batch.x.values * 2)


def test_tree_specs_do_not_depend_on_lengths_or_batch_size() -> None:
    collation = Collate({"x": "n _", "pair": "n n"})

    def spec(lengths: list[int]) -> pytree.TreeSpec:
        samples = [{"x": torch.ones(n, 2), "pair": torch.ones(n, n), "y": n} for n in lengths]
        return pytree.tree_structure(collation(samples))

    assert spec([3, 1]) == spec([2, 2]) == spec([5]) == spec([0, 1, 2])


def test_a_batch_of_tuples_stays_one_through_a_pytree() -> None:
    ids, label = pytree.tree_map(lambda leaf: leaf, collate([([1, 2], 0)]))
    assert ids.values.tolist() == [1, 2] and label.tolist() == [0]


def test_mark_dynamic_takes_a_batch() -> None:
    batch = make()
    assert_same(ops.mark_dynamic(batch), batch)


def test_a_batch_is_a_dataclass_whose_tensors_data_parallel_wrappers_find() -> None:
    batch = make()
    assert is_dataclass(batch) and all(field.init for field in fields(batch))
    assert_same(replace(batch), batch)

    def walk(value: Any) -> list[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            return [value]
        if is_dataclass(value):
            return [t for field in fields(value) for t in walk(getattr(value, field.name))]
        if isinstance(value, dict):
            return [t for item in value.values() for t in walk(item)]
        return []

    found = walk(batch)
    for field in packed_fields(batch):
        assert any(tensor is field.values for tensor in found)


def test_one_graph_serves_batches_of_any_lengths() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def program(batch: Batch) -> torch.Tensor:
        ids, label = batch["pair"]
        return batch.x.values.sum() + ids.values.sum() + label.sum()

    compiled = torch.compile(program, backend=backend, fullgraph=True)
    collation = Collate({"x": "n _", "pair.0": "n"})
    for lengths in ([3, 2], [1, 4, 2], [5], [2, 2], [0, 3]):
        samples = [{"x": torch.randn(n, 4), "pair": (torch.randn(n), n)} for n in lengths]
        batch = ops.mark_dynamic(collation(samples))
        torch.testing.assert_close(compiled(batch), program(batch))
    assert len(graphs) == 1


def test_the_repr_shows_fields_types_and_structure() -> None:
    text = repr(make())
    assert text.splitlines() == [
        "Batch of 3 samples",
        "  x     packed float32 [n, 4] n <= 3, 5 cells",
        "  ids   packed int64 [n] n <= 3, 5 cells",
        "  keys  list   of 3",
        "  meta  Batch",
        "    pair  packed bool [n, n] n <= 3, 13 cells",
        "    y     dense  float32 [3]",
    ]
    assert repr(Batch({})) == "Batch of no fields"
    assert "3, image.h, image.w]" in repr(collate([{"image": torch.zeros(3, 2, 2)}]))


# ---------------------------------------------------------------- memory that moves


def of_two():
    return collate([{"x": torch.arange(5.0)}, {"x": torch.arange(3.0)}])


def test_sending_a_buffer_to_a_process_leaves_the_fields_where_they_are():
    big = collate([{"x": torch.arange(3e6)}, {"x": torch.arange(2e6)}])
    for batch in (big, pickle.loads(pickle.dumps(big)), copy.deepcopy(big)):
        ForkingPickler.dumps(batch.buffer)
        fresh = [torch.full((5_000_000,), 7.0) for _ in range(2)]  # takes what was freed, if anything was
        assert torch.equal(batch.x.values, torch.cat([torch.arange(3e6), torch.arange(2e6)]))
        del fresh


def test_a_field_whose_memory_was_moved_is_not_read_from_the_buffer():
    sent, replaced = of_two(), of_two()
    ForkingPickler.dumps(sent.x)
    sent.x.values.mul_(2)
    replaced.x.values.data = replaced.x.values.data * 2
    for batch in (sent, replaced):
        assert batch.buffer is None
        for copied in (pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch), batch.to(torch.float64)):
            assert copied.x.values.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 0.0, 2.0, 4.0]

"""Collate: what comes out is each sample's own data, the same types in every batch and for any workers."""

from __future__ import annotations

import pickle
import sys
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset

import packload
from packload import Batch, Collate, CollateError, PackedTensor, collate, ragged
from tests.strategies import PATTERNS, batches, make

Pair = namedtuple("Pair", "ids label")


@dataclass
class Record:
    ids: Any
    label: int


def assert_field(field: PackedTensor, samples: Sequence[Tensor]) -> None:
    assert isinstance(field, PackedTensor)
    assert field.sizes.tolist() == [list(sample.shape) for sample in samples]
    for got, sample in zip(field.to_list(), samples, strict=True):
        assert got.dtype == sample.dtype and torch.equal(got, sample)


def noncontiguous(sample: Tensor) -> Tensor:
    """The same values with other strides."""
    return torch.stack([sample, sample], -1)[..., 0]


LEAVES: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda t: t,
    "noncontiguous tensor": noncontiguous,
    "tensor with gradient": lambda t: t.clone().requires_grad_(),
    "array": lambda t: t.numpy(),
    "fortran array": lambda t: np.asfortranarray(t.numpy()),
    "read-only array": lambda t: np.frombuffer(t.numpy().tobytes() or b"", t.numpy().dtype).reshape(t.shape),
}


# ------------------------------------------------------------------ values


@pytest.mark.parametrize("leaf", list(LEAVES))
@given(batch=batches(patterns=PATTERNS))
def test_every_sample_comes_back_for_every_pattern_and_kind_of_leaf(leaf: str, batch: Any) -> None:
    out = Collate({"x": batch.pattern})([{"x": LEAVES[leaf](sample)} for sample in batch.samples])
    field = out.x
    assert field.values.is_contiguous() and field.values.shape[0] == field.grid.cells
    assert_field(field.detach(), batch.samples)


@given(batch=batches(patterns=PATTERNS, dtype=torch.bfloat16))
def test_types_that_numpy_lacks_are_packed_too(batch: Any) -> None:
    assert_field(Collate({"x": batch.pattern})([{"x": s} for s in batch.samples]).x, batch.samples)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.uint16, torch.int32, torch.float16, torch.float8_e4m3fn, torch.complex64],
)
def test_dtypes_are_kept(dtype: torch.dtype) -> None:
    samples = [torch.tensor([1, 0, 1]).to(dtype), torch.tensor([1]).to(dtype)]
    field = collate([{"x": sample} for sample in samples]).x
    assert field.dtype == dtype
    assert torch.equal(field.values.view(torch.uint8), torch.cat(samples).view(torch.uint8))


def test_python_numbers_have_the_dtypes_of_torch_tensor() -> None:
    batch = collate([{"i": 1, "f": 0.5, "b": True, "li": [1], "lf": [0.5, 1.5], "lb": [[True], [False]]}])
    dtypes = {name: field.dtype for name, field in batch.items()}
    assert dtypes == {
        "i": torch.int64,
        "f": torch.float32,
        "b": torch.bool,
        "li": torch.int64,
        "lf": torch.float32,
        "lb": torch.bool,
    }


def test_numbers_of_every_kind_become_a_dense_tensor() -> None:
    for numbers in ([1, 2], [np.int64(1), 2], [torch.tensor(1), 2], [np.array(1), torch.tensor(2)]):
        y = collate([{"y": number} for number in numbers]).y
        assert y.dtype == torch.int64 and y.tolist() == [1, 2]
    assert collate([{"y": np.float64(0.5)}]).y.dtype == torch.float64


def test_text_becomes_a_list() -> None:
    batch = collate([{"t": "a", "b": b"a", "n": None, "l": ["a"]}, {"t": None, "b": b"", "n": None, "l": []}])
    assert dict(batch) == {"t": ["a", None], "b": [b"a", b""], "n": [None, None], "l": [["a"], []]}


def test_an_empty_list_takes_the_dtype_of_the_other_samples() -> None:
    for samples in ([[], [1, 2]], [[1, 2], []], [[], torch.tensor([1, 2])], [np.array([1, 2]), []]):
        field = collate([{"x": sample} for sample in samples]).x
        assert field.dtype == torch.int64 and sorted(field.axes[0].lengths.tolist()) == [0, 2]


def test_tensors_arrays_and_lists_of_one_dtype_may_be_mixed() -> None:
    samples = [torch.tensor([1, 2]), np.array([3]), [4, 5, 6]]
    assert_field(collate([{"x": x} for x in samples]).x, [torch.as_tensor(x) for x in samples])


def test_gradients_flow_to_the_samples() -> None:
    samples = [
        {"x": torch.randn(3, n, requires_grad=True), "v": torch.randn(2, requires_grad=True)} for n in (2, 4)
    ]
    batch = Collate({"x": "_ n", "v": "2"})(samples)
    (batch.x.values.square().sum() + batch.v.square().sum()).backward()
    for sample in samples:
        for leaf in sample.values():
            assert leaf.grad is not None
            torch.testing.assert_close(leaf.grad, 2 * leaf.detach())


def test_structure_lies_on_the_device_of_the_samples() -> None:
    field = collate([{"x": torch.ones(n, device="meta")} for n in (2, 3)]).x
    assert field.device.type == field.offsets.device.type == "meta"
    assert field.axes[0].lengths.tolist() == [2, 3]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("leaf", ["tensor", "array", "tensor with gradient"])
@pytest.mark.parametrize("pattern", ["n _", "_ n", "n m", "3 4"])
def test_the_result_never_shares_memory_with_a_sample(pattern: str, leaf: str, count: int) -> None:
    samples = [{"x": LEAVES[leaf](torch.ones(3, 4))} for _ in range(count)]
    x = Collate({"x": pattern})(samples).x
    with torch.no_grad():
        (x.values if isinstance(x, PackedTensor) else x).zero_()
    for sample in samples:
        assert float(torch.as_tensor(sample["x"]).detach().sum()) == 12


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1), ("RGBA", 4), ("P", 1)])
def test_images_are_channels_first_in_shape_and_last_in_storage(mode: str, channels: int) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 255, (h, w, channels), dtype=np.uint8) for h, w in [(4, 6), (5, 3), (1, 1)]]
    images = [Image.fromarray(a if channels > 1 else a[..., 0], None if mode != "P" else "L") for a in arrays]
    if mode == "P":
        for image in images:
            image.putpalette(list(range(256)) * 3)
        assert images[0].mode == "P"
    field = collate([{"image": image} for image in images]).image
    assert_field(field, [torch.from_numpy(a).permute(2, 0, 1) for a in arrays])
    assert field.dtype == torch.uint8
    assert torch.equal(field.values, torch.cat([torch.from_numpy(a).reshape(-1, channels) for a in arrays]))


def test_an_image_of_one_channel_may_be_declared_without_a_channel_dim() -> None:
    masks = [Image.new("L", (3, 2), 7), Image.new("L", (1, 4), 9)]
    batch = Collate({"mask": "h w", "image": "3 h w"})(
        [{"mask": mask, "image": Image.new("RGB", mask.size)} for mask in masks]
    )
    assert_field(
        batch.mask, [torch.full((2, 3), 7, dtype=torch.uint8), torch.full((4, 1), 9, dtype=torch.uint8)]
    )
    assert batch.mask.grid is batch.image.grid


# ------------------------------------------------------------------ structure


def test_every_container_gives_the_same_fields() -> None:
    ids, labels = [torch.ones(2), torch.ones(3)], [0, 1]
    for samples in (
        [{"ids": i, "label": y} for i, y in zip(ids, labels)],
        [Pair(i, y) for i, y in zip(ids, labels)],
        [Record(i, y) for i, y in zip(ids, labels)],
    ):
        batch = collate(samples)
        assert isinstance(batch, Batch) and list(batch.keys()) == ["ids", "label"] and batch.batch_size == 2
        assert_field(batch.ids, ids)
        assert batch.label.tolist() == labels


def test_containers_nest() -> None:
    batch = collate([{"a": {"b": (Pair([1, 2], 3), Record([4.0], 5))}}])
    pair, record = batch["a"]["b"]
    assert pair.ids.values.tolist() == [1, 2] and record.ids.values.tolist() == [4.0]
    assert pair.label.tolist() == [3] and record["label"].tolist() == [5]


def test_samples_that_are_leaves_give_the_field_alone() -> None:
    assert_field(collate([torch.ones(2), torch.ones(3)]), [torch.ones(2), torch.ones(3)])
    assert collate([1, 2]).tolist() == [1, 2]
    assert collate(["a", "b"]) == ["a", "b"]
    assert_field(Collate({"": "_ n"})([torch.ones(4, 2)]), [torch.ones(4, 2)])


def test_fields_without_a_schema_need_not_agree() -> None:
    batch = collate([{"src": [1, 2], "tgt": [1]}, {"src": [1], "tgt": [1]}])
    assert batch.src.axes[0] is not batch.tgt.axes[0]
    assert (batch.src.axes[0].name, batch.tgt.axes[0].name) == ("src", "tgt")


def test_axes_declared_with_one_name_are_one_object() -> None:
    samples = [
        {
            "ids": np.ones(n, np.int64),
            "meta": {"mask": np.ones(n, bool)},
            "pair": ragged(torch.ones(n, n, 2), "n n _"),
            "other": torch.ones(n),
        }
        for n in (3, 0, 2)
    ]
    batch = Collate({"ids": "n", "meta.mask": "n"})(samples)
    axis = batch.ids.axes[0]
    assert axis.name == "n" and axis.lengths.tolist() == [3, 0, 2]
    assert batch.meta.mask.grid is batch.ids.grid
    assert batch["pair"].axes == (axis, axis) and batch["pair"].grid.cells == 13
    assert batch.other.axes[0] is not axis


@pytest.mark.parametrize("shape", [(4,), (2, 3), (0,)])
def test_a_pattern_without_a_name_gives_a_dense_tensor(shape: tuple[int, ...]) -> None:
    samples = [torch.randn(shape) for _ in range(3)]
    for pattern in (" ".join(map(str, shape)), " ".join("_" * len(shape))):
        for leaf in ("tensor", "noncontiguous tensor", "array", "fortran array"):
            out = Collate({"x": pattern})([{"x": LEAVES[leaf](sample)} for sample in samples]).x
            assert isinstance(out, Tensor) and torch.equal(out, torch.stack(samples))


def test_a_declared_tuple_of_numbers_is_a_vector() -> None:
    out = Collate({"box": "4"})([{"box": (1, 2, 3, 4)}, {"box": [5, 6, 7, 8]}]).box
    assert out.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert Collate({"box": "n"})([{"box": (1, 2)}, {"box": (3,)}]).box.values.tolist() == [1, 2, 3]


@given(lengths=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=2, max_size=4))
def test_types_do_not_depend_on_lengths_or_batch_size(lengths: list[list[int]]) -> None:
    collation = Collate({"elements": "4 n"})

    def kinds(sizes: list[int]) -> list[Any]:
        samples = [
            {"x": torch.ones(n), "e": torch.ones(n, 2), "elements": torch.ones(4, n), "y": n} for n in sizes
        ]
        out = collation(samples)
        return [
            (type(f), f.dtype, f.dim(), f.order if isinstance(f, PackedTensor) else None)
            for f in out.values()
        ]

    expected = [
        (PackedTensor, torch.float32, 2, (0, 1)),
        (PackedTensor, torch.float32, 3, (0, 1, 2)),
        (PackedTensor, torch.float32, 3, (0, 2, 1)),
        (Tensor, torch.int64, 1, None),
    ]
    for sizes in (*lengths, [7, 7], [7], [7, 5], [1]):
        assert kinds(sizes) == expected


def test_a_recipe_does_not_stick_to_later_samples_of_another_structure() -> None:
    collation = Collate()
    assert collation([{"x": [1, 2]}]).x.dim() == 2
    assert collation([{"x": [[1, 2]]}]).x.dim() == 3
    assert collation([{"x": 1}]).x.dim() == 1
    assert collation([{"y": "text"}]).y == ["text"]
    assert collation([{"x": [1, 2]}]).x.dim() == 2


def test_many_structures_do_not_pile_up() -> None:
    collation = Collate()
    for index in range(600):
        collation([{f"x{index}": 1}])
    assert len(collation._recipes) <= 256


# ------------------------------------------------------------------ workers


class Reviews(Dataset[Any]):
    """Samples of fixed random sizes with axes shared between fields."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = np.random.default_rng(index)
        n = int(rng.integers(0, 5))
        return {
            "__key__": f"k{index}",
            "ids": torch.from_numpy(rng.integers(0, 9, n)),
            "emb": rng.random((n, 3), dtype=np.float32),
            "pair": (ragged(torch.ones(n, n, dtype=torch.bfloat16), "n n"), {"own": np.arange(index)}),
            "image": Image.fromarray(rng.integers(0, 255, (2, index + 1, 3), dtype=np.uint8)),
            "label": index % 2,
        }


def summary(value: Any) -> Any:
    """Types, dtypes, structure and values of a batch, as plain data."""
    if isinstance(value, Batch):
        return {name: summary(field) for name, field in value.items()}
    if isinstance(value, PackedTensor):
        names = [axis.name for axis in value.axes]
        return "packed", value.dtype, value.order, names, value.sizes.tolist(), value.values.tolist()
    return ("dense", value.dtype, value.tolist()) if isinstance(value, Tensor) else value


def loaded(workers: int, **kwargs: Any) -> list[Batch]:
    collation = Collate({"ids": "n", "emb": "n _"})
    loader: DataLoader[Any] = DataLoader(
        Reviews(), batch_size=3, num_workers=workers, collate_fn=collation, **kwargs
    )
    return list(loader)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_same_data_give_the_same_batches_for_any_number_of_workers() -> None:
    expected = [summary(batch) for batch in loaded(0)]
    assert [len(batch["label"][2]) for batch in expected] == [3, 3, 1]
    for workers in (2, 3):
        batches_of_workers = loaded(workers)
        assert [summary(batch) for batch in batches_of_workers] == expected
        for batch in batches_of_workers:
            axis = batch.ids.axes[0]
            assert batch.emb.axes[0] is axis and batch["pair"][0].axes == (axis, axis)
            assert batch.emb.grid is batch.ids.grid


def test_collate_pickles_to_workers_that_are_spawned() -> None:
    expected = [summary(batch) for batch in loaded(0)]
    assert [summary(batch) for batch in loaded(1, multiprocessing_context="spawn")] == expected


def test_collate_pickles_with_its_schema() -> None:
    collation = Collate({"x": "_ n"})
    collation([{"x": torch.ones(2, 3)}])
    again = pickle.loads(pickle.dumps(collation))
    assert again.schema == collation.schema and repr(again) == "Collate({'x': '_ n'})"
    assert again([{"x": torch.ones(2, 3)}]).x.order == (0, 2, 1)
    assert pickle.loads(pickle.dumps(packload.collate)) is packload.collate
    assert pickle.loads(pickle.dumps(ragged([1], "n"))) == ragged([1], "n")


def test_an_error_keeps_its_type_and_message_on_the_way_from_a_worker() -> None:
    sent = None
    try:
        collate([{"x": 1, "key": "a"}, {"key": "b"}])
    except CollateError:
        sent = ExceptionWrapper(sys.exc_info(), where="in DataLoader worker process 0")
    assert sent is not None
    with pytest.raises(CollateError, match=r"sample 1 \(key 'b'\), field 'x'"):
        pickle.loads(pickle.dumps(sent)).reraise()


# ------------------------------------------------------------------ mistakes

MISTAKES: dict[str, tuple[list[Any], dict[str, str | None] | None, list[str]]] = {
    "a missing field": (
        [{"x": [1], "y": 1, "__key__": "a"}, {"x": [1], "__key__": "b"}],
        None,
        ["sample 1 (key 'b')", "field 'y'", "missing", "['x', '__key__']"],
    ),
    "a field that only a later sample has": (
        [{"x": 1}, {"x": 1, "y": 1}],
        None,
        ["sample 1", "'y'", "missing"],
    ),
    "a nested missing field": (
        [{"m": {"x": 1}, "id": "a"}, {"m": {"y": 1}, "id": "b"}],
        None,
        ["sample 1 (key 'b')", "'m.x'"],
    ),
    "a missing field of a dataclass": (
        [Record([1], 1), Pair([1], 1)],
        None,
        ["sample 1", "named tuple", "dataclass"],
    ),
    "a tuple of another length": ([(1, 2), (1, 2, 3)], None, ["sample 1", "field '2'"]),
    "another container": ([{"x": (1, 2)}, {"x": {"a": 1}}], None, ["sample 1", "'x'", "mapping", "tuple"]),
    "another dtype": (
        [{"x": torch.ones(2)}, {"x": torch.ones(3)}, {"x": torch.ones(4, dtype=torch.int64)}],
        None,
        ["sample 2", "field 'x'", "int64", "float32", "(4,)", "(2,)", "Convert"],
    ),
    "lists of ints and floats": (
        [{"x": [1, 2]}, {"x": [1.0]}],
        None,
        ["sample 1", "'x'", "float32", "int64"],
    ),
    "numbers of ints and floats": ([{"x": 1}, {"x": 0.5}], None, ["sample 1", "'x'", "float32", "int64"]),
    "an array of another dtype": (
        [{"x": np.zeros(2)}, {"x": np.zeros(2, np.float32)}],
        None,
        ["sample 1", "float32", "float64"],
    ),
    "None among numbers": ([{"x": 1}, {"x": None}], None, ["sample 1", "'x'", "NoneType", "int", "numbers"]),
    "a number among text": ([{"x": "a"}, {"x": 1}], None, ["sample 1", "'x'", "int", "str", "text"]),
    "an array among images": (
        [{"x": Image.new("L", (2, 2))}, {"x": np.zeros((2, 2))}],
        None,
        ["sample 1", "PIL"],
    ),
    "a wrong rank": (
        [{"x": torch.ones(2, 3)}, {"x": torch.ones(2, 3, 1)}],
        None,
        ["sample 1", "'x'", "(2, 3, 1)", "'n _'", "(2, 3)"],
    ),
    "a wrong rank for the schema": (
        [{"x": [1]}],
        {"x": "n _"},
        ["sample 0", "'x'", "(1,)", "'n _'", "declared"],
    ),
    "an array among numbers": ([{"x": 1}, {"x": np.ones(2)}], None, ["sample 1", "'x'", "float64"]),
    "a static dim that disagrees": (
        [{"x": torch.ones(4, 7)}, {"x": torch.ones(4, 5)}],
        None,
        ["sample 1", "'x'", "(4, 5)", "(4, 7)", "packload.Collate(schema={'x': '_ n'})"],
    ),
    "a fixed size that disagrees": (
        [{"x": [1, 2, 3]}],
        {"x": "4"},
        ["sample 0", "'x'", "(3,)", "'4'", "'3'"],
    ),
    "a dense field that varies": (
        [{"x": torch.ones(3)}, {"x": torch.ones(4)}],
        {"x": "_"},
        ["sample 1", "(4,)", "(3,)", "schema={'x': 'n'}"],
    ),
    "pair data without a schema": (
        [{"x": torch.ones(5, 5, 8)}, {"x": torch.ones(7, 7, 8)}],
        None,
        ["sample 1", "(7, 7, 8)", "schema={'x': 'n n _'}"],
    ),
    "images of several modes": (
        [{"x": Image.new("RGB", (2, 2))}, {"x": Image.new("L", (2, 2))}],
        None,
        ["sample 1", "(1, 2, 2)", "(3, 2, 2)", "convert('RGB')"],
    ),
    "a shared axis that disagrees": (
        [{"a": [1, 2], "b": [1, 2], "__key__": "k"}, {"a": [1, 2], "b": [1, 2, 3], "__key__": "l"}],
        {"a": "n", "b": "n"},
        ["sample 1 (key 'l')", "field 'b'", "axis 'n'", "(3,)", "field 'a'", "(2,)"],
    ),
    "a repeated name that disagrees": (
        [{"x": torch.ones(2, 2)}, {"x": torch.ones(2, 3)}],
        {"x": "n n"},
        ["sample 1", "'x'", "(2, 3)", "'n n'"],
    ),
    "a list that is not rectangular": ([{"x": [[1], [1, 2]]}], None, ["sample 0", "'x'", "rectangular"]),
    "numbers too large": ([{"x": [2**70]}], None, ["sample 0", "'x'", "object"]),
    "a number too large": ([{"x": 2**70}], None, ["sample 0", "'x'", "object"]),
    "empty lists alone": ([{"x": []}, {"x": []}], None, ["sample 0", "'x'", "dtype", "numpy.int64"]),
    "a foreign byte order": ([{"x": np.zeros(2, ">i4")}], None, ["sample 0", "'x'", ">i4", "byte order"]),
    "a mark in one sample only": (
        [{"x": ragged([1], "n")}, {"x": [1]}],
        None,
        ["sample 1", "'x'", "not marked", "'n'"],
    ),
    "a mark in a later sample": (
        [{"x": [1]}, {"x": ragged([1], "n")}],
        None,
        ["sample 1", "'x'", "marked 'n'"],
    ),
    "two marks": ([{"x": ragged([1], "n")}, {"x": ragged([1], "m")}], None, ["sample 1", "'m'", "'n'"]),
    "rank 4 without a schema": ([{"x": torch.ones(1, 1, 1, 1), "key": "k"}], None, ["key 'k'", "'n _ _ _'"]),
    "more rows than 32-bit offsets count": (
        [{"x": np.broadcast_to(np.uint8(0), (2**30,))}] * 2,
        None,
        ["field 'x'", "2147483647"],
    ),
    "a masked array": (
        [{"x": np.ones(2)}, {"x": np.ma.masked_array([1.0, 2.0], [True, False])}],
        None,
        ["sample 1", "'x'", "mask"],
    ),
    "no samples": ([], None, ["no samples"]),
}


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_a_mistake_names_sample_field_and_shapes(mistake: str) -> None:
    samples, schema, words = MISTAKES[mistake]
    with pytest.raises(CollateError) as error:
        Collate(schema)(samples)
    assert isinstance(error.value, ValueError)
    for word in words:
        assert word in str(error.value), str(error.value)


def test_collating_goes_on_after_an_error() -> None:
    collation = Collate({"x": "n"})
    with pytest.raises(CollateError):
        collation([{"x": [1]}, {"x": [0.5]}])
    assert collation([{"x": [1]}, {"x": [2, 3]}]).x.values.tolist() == [1, 2, 3]


def test_the_length_profiles_that_broke_ragged_libraries_are_ordinary_input() -> None:
    for lengths in ([3, 0, 5], [0, 0], [1], [4, 4, 4]):
        for pattern in PATTERNS:
            batch = make(lengths, pattern)
            assert_field(Collate({"x": pattern})([{"x": s} for s in batch.samples]).x, batch.samples)


def test_an_empty_first_sample_does_not_hide_the_rank_of_the_others():
    with pytest.raises(CollateError, match=r"sample 1: shape \(3, 4\) has 2 dims"):
        collate([torch.empty(0), torch.ones(3, 4)])

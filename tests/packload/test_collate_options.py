"""Fields dropped, renamed and cast."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from packload import Collate, CollateError


def samples() -> list[dict[str, Any]]:
    return [
        {
            "ids": np.arange(n),
            "x": torch.randn(n, 2, dtype=torch.float64),
            "image": np.full((3, n, n + 1), 255, np.uint8),
            "file": object(),
            "meta": {"a": n, "b": [1.5] * n, "text": "t"},
        }
        for n in (2, 3)
    ]


def test_dropped_fields_are_not_looked_at() -> None:
    batch = Collate(drop=["file", "meta.b"])(samples())
    assert list(batch) == ["ids", "x", "image", "meta"] and list(batch.meta) == ["a", "text"]
    assert list(Collate(drop=["file", "meta"])(samples())) == ["ids", "x", "image"]


def test_renamed_fields_keep_their_place() -> None:
    batch = Collate(drop=["file"], rename={"ids": "input_ids", "meta.a": "label", "meta": "more"})(samples())
    assert list(batch) == ["input_ids", "x", "image", "more"] and list(batch.more) == ["label", "b", "text"]
    assert batch.more.label.tolist() == [2, 3]


@pytest.mark.parametrize("kind", ["array", "tensor"])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.int64, torch.int32),
        (torch.int64, torch.uint8),
        (torch.int32, torch.int64),
        (torch.uint8, torch.float16),
        (torch.uint8, torch.bfloat16),
        (torch.float64, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.bool, torch.float32),
        (torch.float32, torch.complex64),
    ],
)
@pytest.mark.parametrize("pattern", ["n _", "_ n", "n m", "2 3"])
def test_a_cast_is_what_the_samples_would_be_cast_to(
    kind: str, source: torch.dtype, target: torch.dtype, pattern: str
) -> None:
    if kind == "array" and source == torch.bfloat16:
        return  # numpy has no bfloat16
    tensors = [(torch.rand(2, 3) * 9).to(source) for _ in range(3)]
    column = [{"x": t.numpy() if kind == "array" else t} for t in tensors]
    found = Collate({"x": pattern}, cast={"x": target})(column).x
    assert found.dtype == target
    for sample, tensor in zip(found.to_list() if pattern != "2 3" else found, tensors):
        assert torch.equal(sample, tensor.to(target))


def test_an_image_becomes_half_precision() -> None:
    image = Collate(drop=["file"], cast={"image": torch.float16})(samples()).image
    assert image.dtype == torch.float16 and (image.values == 255).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cast": {"x": torch.int64}}, ["'x'", "float64", "int64", "fractions"]),
        ({"cast": {"image": torch.int8}}, ["'image'", "255", "do not fit"]),
        ({"cast": {"meta.text": torch.int8}}, ["'meta.text'", "text"]),
        ({"cast": {"meta": torch.int8}}, ["'meta'", "not there"]),
        ({"drop": ["gone"]}, ["'gone'", "not there"]),
        ({"rename": {"gone": "here"}}, ["'gone'", "not there"]),
        ({"rename": {"ids": "x"}}, ["'x'", "two fields"]),
        ({"drop": "file"}, ["lists"]),
        ({"drop": ["meta.a", "meta.b", "meta.text"]}, ["'meta'", "dropped"]),
        ({"drop": ["ids", "x", "image", "meta", "file"]}, ["no field"]),
        ({"drop": ["ids"], "schema": {"ids": "n"}}, ["'ids'"]),
    ],
)
def test_a_change_that_does_not_fit_is_an_error(options: dict[str, Any], words: list[str]) -> None:
    options.setdefault("drop", ["file"])
    if isinstance(options["drop"], list) and "file" not in options["drop"]:
        options["drop"] = [*options["drop"], "file"]
    with pytest.raises(CollateError) as error:
        Collate(**options)(samples())
    for word in words:
        assert word in str(error.value), str(error.value)


def test_samples_of_several_dtypes_are_an_error_also_where_they_are_cast() -> None:
    with pytest.raises(CollateError, match="sample 1.*float64.*float32"):
        Collate(cast={"x": torch.float16})([{"x": np.ones(2, np.float32)}, {"x": np.ones(2)}])


def test_a_schema_that_is_no_mapping_is_an_error_and_bare_leaves_have_an_empty_path() -> None:
    with pytest.raises(CollateError, match=r"schema: 'n n _' is no mapping .*\{'': 'n _'\}"):
        Collate("n n _")  # type: ignore[arg-type]
    assert Collate({"": "n n _"})([torch.zeros(2, 2, 3), torch.zeros(1, 1, 3)]).shape == (2, 2, 2, 3)


def test_options_pickle() -> None:
    collation = Collate(
        {"x": "n _"}, maps=["positions"], drop=["file"], rename={"x": "y"}, cast={"x": torch.float32}
    )
    batch = pickle.loads(pickle.dumps(collation))(samples())
    assert (
        batch.y.dtype == torch.float32 and set(batch.y.axes[0].maps) == {"positions"} and "file" not in batch
    )


@dataclass
class Sample:
    x: torch.Tensor
    y: int


def test_options_reach_dataclasses_and_tuples() -> None:
    batch = Collate(rename={"x": "z"})([Sample(torch.ones(2), 1)])
    assert list(batch) == ["z", "y"]
    (only,) = Collate(drop=["1"])([(torch.ones(2), 1), (torch.ones(3), 2)])
    assert only.sizes.tolist() == [[2], [3]] or only.batch_size == 2

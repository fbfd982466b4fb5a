"""Lengths of Arrow tables and of Hugging Face data sets, read off their memory."""

from __future__ import annotations

import io
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import packload
from packload.plan.arrow import arrow_lengths
from packload.plan.lengths import lengths

pytestmark = pytest.mark.frameworks

lists = st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=40)


@given(lists, st.sampled_from([pa.list_, pa.large_list]), st.integers(1, 7), st.integers(0, 5))
def test_lengths_are_those_of_the_rows(rows: list[list[int]], kind: Any, chunk: int, start: int) -> None:
    arrays = [pa.array(rows[i : i + chunk], kind(pa.int64())) for i in range(0, len(rows), chunk)]
    table = pa.table({"x": pa.chunked_array(arrays), "text": ["t"] * len(rows)})
    for field in (None, "x"):
        assert lengths(table, field).tolist() == [len(row) for row in rows]
        assert lengths(table.slice(start), field).tolist() == [len(row) for row in rows[start:]]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=20), st.booleans())
def test_nested_lists_are_read_by_their_pattern(sizes: list[tuple[int, int]], inside: bool) -> None:
    values = pa.array([np.zeros(size).tolist() for size in sizes], pa.list_(pa.list_(pa.float64())))
    table = pa.table({"x": pa.StructArray.from_arrays([values], ["m"]) if inside else values})
    path = "x.m" if inside else "x"
    assert lengths(table, path).tolist() == [n for n, _ in sizes]
    expected = [[n, m if n else 0] for n, m in sizes]
    assert lengths(table, path, schema={path: "n m"}).tolist() == expected


def test_lists_that_are_all_empty_have_no_type_and_a_length() -> None:
    assert lengths(pa.table({"x": [[], []]})).tolist() == [0, 0]


def test_fixed_sizes_are_read() -> None:
    table = pa.table({"x": pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2))})
    assert lengths(table).tolist() == [2, 2]
    boxes = pa.array([[[1, 2]], [], [[1, 2]] * 3], pa.list_(pa.list_(pa.int64(), 2)))
    assert lengths(pa.table({"x": boxes})).tolist() == [1, 0, 3]
    assert lengths(pa.table({"x": boxes}), schema={"x": "n m"}).tolist() == [[1, 2], [0, 0], [3, 2]]


def test_columns_that_vary_alone_must_be_chosen_from() -> None:
    table = pa.table({"a": [[1], [2, 3]], "b": [[1, 2], []], "c": [1, 2]})
    with pytest.raises(packload.CollateError, match=r"\['a', 'b'\]"):
        lengths(table)
    got = lengths(table, ["b", "a"])
    assert {field: one.tolist() for field, one in got.items()} == {"b": [2, 0], "a": [1, 2]}
    with pytest.raises(packload.CollateError, match="sample 0, field 'b': axis 'n' has the length 2"):
        lengths(table, ["a", "b"], schema={"a": "n", "b": "n"})


@pytest.mark.parametrize(
    ("column", "path", "schema", "said"),
    [
        ([[1], None, [2]], "x", {}, "sample 1: its entry is null.*1 of 3"),
        ([{"m": [1]}, {"m": [2]}, None], "x.m", {}, "sample 2: its entry is null"),
        ([[[1]], [[2], None]], "x", {"x": "n m"}, "sample 1, field 'x': a null inside"),
        ([[[1]], [[2], [3, 4]]], "x", {"x": "n m"}, "sample 1, field 'x': lists of 1 and of 2 entries"),
        ([[[1, 2]], [[2], [3]]], "x", {"x": "n n"}, "sample 0, field 'x': axis 'n' has the length 2"),
        (["text", "more"], "x", {}, "no dim that varies"),
        ([1, 2], "x", {}, "no dim that varies"),
    ],
)
def test_what_does_not_fit_is_named(column: list[Any], path: str, schema: Any, said: str) -> None:
    with pytest.raises(packload.CollateError, match=said):
        lengths(pa.table({"x": column}), path, schema=schema)


# --- Hugging Face


@pytest.fixture(scope="module")
def tokens() -> datasets.Dataset:
    return datasets.Dataset.from_dict({"ids": [[0] * (i % 7) for i in range(50)], "label": list(range(50))})


def _by_samples(data: datasets.Dataset) -> list[int]:
    return [len(sample["ids"]) for sample in data]


@pytest.mark.parametrize(
    "view",
    [
        lambda d: d,
        lambda d: d.shuffle(seed=1),
        lambda d: d.select([4, 2, 2]),
        lambda d: d.select(range(10, 20)),
        lambda d: d.filter(lambda s: s["label"] % 3 == 0),
        lambda d: d.with_format("torch"),
        lambda d: d.with_format("numpy", columns=["ids"]),
        lambda d: d.shuffle(seed=1).select([3]),
        lambda d: datasets.concatenate_datasets([d.select([3, 1]), d.shuffle(seed=2)]),
        lambda d: d.select([]),
    ],
)
def test_every_view_has_the_lengths_of_its_samples(tokens: datasets.Dataset, view: Any) -> None:
    shown = view(tokens)
    assert lengths(shown).tolist() == _by_samples(shown)
    assert lengths(shown, "ids").tolist() == _by_samples(shown)


def test_samples_are_not_made(tokens: datasets.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    shuffled = tokens.shuffle(seed=0)
    expected = _by_samples(shuffled)
    monkeypatch.setattr(datasets.Dataset, "__getitem__", None)
    assert lengths(shuffled).tolist() == expected


def test_what_a_transform_makes_is_measured_itself(tokens: datasets.Dataset) -> None:
    twice = tokens.with_transform(lambda batch: {"ids": [ids * 2 for ids in batch["ids"]]})
    assert lengths(twice, progress=False).tolist() == [2 * n for n in _by_samples(tokens)]


def test_samples_without_a_length_can_be_filtered_out() -> None:
    data = datasets.Dataset.from_dict({"ids": [[1], None, [1, 2]]})
    with pytest.raises(packload.CollateError, match="sample 1: its entry is null"):
        lengths(data)
    assert lengths(data.filter(lambda s: s["ids"] is not None)).tolist() == [1, 2]
    with pytest.raises(packload.CollateError, match="sample 2"):
        lengths(data.select([2, 0, 1]))


def test_features_of_a_fixed_rank_are_read() -> None:
    features = datasets.Features({"x": datasets.Array2D((None, 3), "int32")})
    data = datasets.Dataset.from_dict({"x": [[[1, 2, 3]] * n for n in (2, 1, 4)]}, features=features)
    assert lengths(data).tolist() == [2, 1, 4]


def test_images_are_measured_by_their_headers() -> None:
    sizes = [(4, 6), (5, 2), (3, 3)]
    stored = []
    for height, width in sizes:
        file = io.BytesIO()
        image = Image.new("RGB", (width, height))
        exif = image.getexif()
        exif[0x0112] = 6 if height == 5 else 1  # the orientation: turned by a quarter
        image.save(file, "jpeg", exif=exif)
        stored.append({"bytes": file.getvalue(), "path": None})
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    data = datasets.Dataset.from_dict({"image": stored, "label": [0, 1, 2]}, features=features)
    expected = [[sample["image"].height, sample["image"].width] for sample in data]
    assert expected[1] == [2, 5]
    assert lengths(data).tolist() == expected
    table = data.with_format("arrow")[:]
    assert lengths(table, "image").tolist() == expected


def test_a_broken_image_is_named() -> None:
    table = pa.table({"image": [{"bytes": b"no image", "path": "a.png"}]})
    with pytest.raises(packload.CollateError, match="sample 0, field 'image'"):
        lengths(table)


def test_other_data_sets_are_left_to_others() -> None:
    assert arrow_lengths([[1]], None, {}) is None

"""Lengths of a data set, from wherever they cost least."""

from __future__ import annotations

import importlib
import io
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

import packload
from packload.plan.lengths import lengths

module = importlib.import_module("packload.plan.lengths")

SIZES = [3, 0, 7, 1, 1]


class Counting(Dataset):
    """Samples made by a function of the index; counts how often one is asked for."""

    def __init__(self, make: Any, count: int = len(SIZES)) -> None:
        self.make, self.count, self.asked = make, count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.count:
            raise IndexError(index)
        self.asked += 1
        return self.make(index)


class Own(Counting):
    """A data set that knows its lengths."""

    def __init__(self, known: Any, count: int = len(SIZES)) -> None:
        super().__init__(lambda i: pytest.fail("a sample was read"), count)
        self.lengths = known


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, in which every pass is worth keeping."""
    monkeypatch.setenv("PACKLOAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_WORTH_KEEPING", 0.0)
    return tmp_path / "cache" / "lengths"


# --- a pass over the samples


@pytest.mark.parametrize(
    "leaf",
    [
        lambda n: list(range(n)),
        lambda n: np.zeros(n, np.int32),
        lambda n: torch.zeros(n),
        lambda n: torch.zeros(n, 4),
        lambda n: packload.ragged(np.zeros((n, n)), "n n"),
        lambda n: packload.ragged(np.zeros((4, n)), "4 n"),
    ],
    ids=["list", "array", "tensor", "matrix", "marked pair", "marked row"],
)
def test_a_leaf_that_varies_in_one_dim_gives_one_number_a_sample(leaf: Any) -> None:
    got = lengths([leaf(n) for n in SIZES])
    assert got.dtype == np.int64
    assert got.tolist() == SIZES


@given(st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=600), st.sampled_from("dtnl"))
def test_lengths_are_those_of_the_samples(samples: list[list[int]], kind: str) -> None:
    make = {
        "d": lambda x: {"x": x, "y": 1},
        "t": lambda x: (1, np.array(x)),
        "n": lambda x: {"a": {"b": torch.tensor(x)}},
        "l": lambda x: x,
    }[kind]
    got = lengths([make(sample) for sample in samples], progress=False, cache=False)
    assert got.tolist() == [len(sample) for sample in samples]


def test_images_give_height_and_width_and_are_not_decoded() -> None:
    stored = []
    for height, width in ((4, 6), (5, 2)):
        stored.append(io.BytesIO())
        Image.new("RGB", (width, height)).save(stored[-1], "png")
    images = [Image.open(file) for file in stored]
    assert lengths([{"image": image} for image in images]).tolist() == [[4, 6], [5, 2]]
    assert all(image._im is None for image in images)  # pixels are read on first use


def test_a_grey_image_may_be_declared_without_its_channel() -> None:
    images = [Image.new("L", (6, 4)), Image.new("L", (2, 5))]
    assert lengths(images, schema={"": "h w"}).tolist() == [[4, 6], [5, 2]]


def _lists(found: Any) -> dict[str, list[Any]]:
    return {field: one.tolist() for field, one in found.items()}


def test_several_fields_give_the_lengths_of_each() -> None:
    samples = [{"src": [0] * n, "tgt": [[0, 0]] * (n + 1), "y": 1} for n in SIZES]
    more = [n + 1 for n in SIZES]
    assert _lists(lengths(samples, ["tgt", "src"])) == {"tgt": more, "src": SIZES}
    assert _lists(lengths(samples, ("tgt",))) == {"tgt": more}
    assert _lists(lengths(samples, ["tgt", "src"], schema={"tgt": "n m"}))["tgt"] == [[n, 2] for n in more]


def test_fields_may_share_an_axis() -> None:
    samples = [{"tokens": np.zeros(n), "pair": np.zeros((n, n))} for n in SIZES]
    schema = {"tokens": "n", "pair": "n n"}
    assert lengths(samples, schema=schema).tolist() == SIZES
    assert _lists(lengths(samples, ["pair", "tokens"], schema=schema)) == {"pair": SIZES, "tokens": SIZES}


def test_leaves_are_found_in_every_kind_of_container() -> None:
    @dataclass
    class Point:
        x: Any

    Named = namedtuple("Named", "inner other")
    samples = [Named({"point": (Point([0] * n), 1)}, "text") for n in SIZES]
    assert lengths(samples).tolist() == SIZES
    assert lengths(samples, "inner.point.0.x").tolist() == SIZES


def test_workers_share_a_pass_and_change_nothing() -> None:
    samples = [[0] * (i % 13) for i in range(1000)]
    assert lengths(samples, workers=2, progress=False).tolist() == [len(sample) for sample in samples]


def test_a_pass_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    lengths([[1], [2, 3]])
    assert torch.equal(torch.get_rng_state(), before)


def test_no_samples_have_no_lengths() -> None:
    assert lengths([]).shape == (0,)


# --- what does not fit


@pytest.mark.parametrize(
    ("samples", "field", "said"),
    [
        ([{"a": [1], "b": [2]}], None, r"\['a', 'b'\]"),
        ([{"a": [1], "b": 2}], "b", "no dim that varies"),
        ([{"a": [1]}], "c", "field 'c'.*not a field.*'a'"),
        ([{"a": 1, "b": "text"}], None, "no field with a dim that varies"),
        ([{"a": [1]}, {"b": [1]}], None, "sample 1: has no field 'a'"),
        ([{"a": [1]}, {"a": None}], None, "sample 1, field 'a': NoneType"),
        ([{"a": np.zeros((2, 3))}, {"a": np.zeros(2)}], None, r"sample 1, field 'a'.*\(2,\)"),
        ([packload.ragged(np.zeros((2, 3)), "n n")], None, "sample 0.*2 and 3"),
        ([object()], None, "object cannot be a field"),
    ],
)
def test_what_does_not_fit_is_named(samples: list[Any], field: str | None, said: str) -> None:
    with pytest.raises(packload.CollateError, match=said):
        lengths(samples, field)


def test_one_axis_of_two_lengths_is_named() -> None:
    samples = [{"a": [1], "b": [1]}, {"a": [1], "b": [1, 2]}]
    with pytest.raises(packload.CollateError, match="sample 1, field 'b'.*axis 'n' the length 2, which is 1"):
        lengths(samples, ["a", "b"], schema={"a": "n", "b": "n"})


def test_a_stream_is_refused() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[list[int]]:
            yield [1]

    for stream in (Stream(), iter([[1]])):
        with pytest.raises(TypeError, match="stream.*lengths"):
            lengths(stream)


# --- a data set's own lengths


@pytest.mark.parametrize(
    "known",
    [SIZES, np.array(SIZES, np.int32), torch.tensor(SIZES), lambda: SIZES, lambda field=None: SIZES],
    ids=["list", "array", "tensor", "method", "method of a field"],
)
def test_own_lengths_are_taken_without_a_look_at_samples(known: Any) -> None:
    got = lengths(Own(known))
    assert got.dtype == np.int64
    assert got.tolist() == SIZES


def test_own_lengths_are_asked_for_by_field() -> None:
    by_field = {"a": SIZES, "b": [n + 1 for n in SIZES]}
    for known in (by_field, by_field.__getitem__, lambda field: by_field[field], lambda: by_field):
        assert lengths(Own(known), "b").tolist() == by_field["b"]
        assert _lists(lengths(Own(known), ["b", "a"])) == {"b": by_field["b"], "a": SIZES}


def test_own_lengths_of_several_sizes_are_kept() -> None:
    assert lengths(Own([[1, 2]] * 5)).tolist() == [[1, 2]] * 5


def test_an_index_without_samples_is_enough() -> None:
    class Index:
        def lengths(self, field: str) -> np.ndarray:
            return {"tokens": np.array(SIZES)}[field]

    assert lengths(Index(), "tokens").tolist() == SIZES


@pytest.mark.parametrize(
    ("known", "field", "said"),
    [
        ([1, 2], None, "Own.lengths has 2 entries, the data set 5"),
        ([1.5] * 5, None, "float64"),
        ([1, 2, -3, 4, 5], None, "sample 2 has the length -3"),
        ({"a": SIZES, "b": SIZES}, None, r"None.*\['a', 'b'\]"),
        ({"a": SIZES}, "c", r"'c'.*\['a'\]"),
        (np.zeros((5, 1, 1), int), None, r"\(5, 1, 1\)"),
    ],
)
def test_own_lengths_that_cannot_be_right_are_refused(known: Any, field: str | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        lengths(Own(known), field)


def test_views_of_a_data_set_with_lengths_need_no_pass() -> None:
    own = Own(SIZES)
    joined = ConcatDataset([Subset(own, [2, 0]), own])
    assert lengths(Subset(own, [4, 2])).tolist() == [1, 7]
    assert lengths(joined).tolist() == [7, 3, *SIZES]
    assert lengths(Subset(joined, torch.arange(6, -1, -1))).tolist() == [7, 3, *SIZES][::-1]


def test_views_of_a_data_set_without_read_no_more_than_they_show() -> None:
    inner = Counting(lambda i: [0] * SIZES[i])
    assert lengths(Subset(inner, [2, 0]), cache=False).tolist() == [7, 3]
    assert inner.asked <= 3


def test_a_view_that_changes_samples_is_read_itself() -> None:
    class Cut(Subset):
        def __getitem__(self, index: int) -> Any:  # type: ignore[override]
            return super().__getitem__(index)[:2]

        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [self[index] for index in indices]

    assert lengths(Cut(Counting(lambda i: [0] * SIZES[i]), range(5))).tolist() == [2, 0, 2, 1, 1]


def test_tensors_of_one_shape_are_read_once() -> None:
    data = TensorDataset(torch.zeros(6, 3, 8), torch.zeros(6))
    assert lengths(data).tolist() == [3] * 6
    assert lengths(data, schema={"0": "n m"}).tolist() == [[3, 8]] * 6


# --- kept on disk


def test_a_pass_is_made_once(cache: Path) -> None:
    data = Counting(lambda i: [0] * (i % 7), 5000)
    first = lengths(data, progress=False)
    asked = data.asked
    assert np.array_equal(lengths(data, progress=False), first)
    assert data.asked < asked + 20
    assert len(list(cache.iterdir())) == 1


def test_a_short_pass_is_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WORTH_KEEPING", 3600.0)
    lengths([[1], [2]])
    assert not cache.exists()


@pytest.mark.parametrize(
    "other",
    [
        Counting(lambda i: [1] * (i % 7), 50),
        Counting(lambda i: [0] * (i % 5), 50),
        Counting(lambda i: [0] * (i % 7), 51),
        Subset(Counting(lambda i: [0] * (i % 7), 60), range(50)),
    ],
    ids=["contents", "lengths", "number of samples", "class"],
)
def test_other_data_are_read_anew(other: Any) -> None:
    lengths(Counting(lambda i: [0] * (i % 7), 50))
    assert lengths(other).tolist() == [len(other[i]) for i in range(len(other))]


def test_other_fields_are_read_anew() -> None:
    data = [{"a": [0] * n, "b": [[0, 0]] * n} for n in SIZES]
    assert lengths(data, "a").tolist() == SIZES
    assert lengths(data, "b", schema={"b": "n m"}).tolist() == [[n, 2 if n else 0] for n in SIZES]


def test_a_fingerprint_of_its_own_stands_for_the_data() -> None:
    one, other = (Counting(lambda i, n=n: [0] * n) for n in (1, 2))
    one.fingerprint, other.fingerprint = "a", "b"  # type: ignore[attr-defined]
    assert lengths(one).tolist() == [1] * 5
    assert lengths(other).tolist() == [2] * 5
    other.fingerprint = "a"  # type: ignore[attr-defined]
    assert lengths(other).tolist() == [1] * 5


def test_a_broken_file_is_read_anew_and_mended(cache: Path) -> None:
    data = Counting(lambda i: [0] * SIZES[i])
    lengths(data)
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    for broken in (b"", whole[:-1], b"rubbish", whole[:40]):
        file.write_bytes(broken)
        assert lengths(data).tolist() == SIZES
        assert file.read_bytes() == whole


def test_the_cache_can_be_moved_and_left_out(cache: Path, tmp_path: Path) -> None:
    data = Counting(lambda i: [0] * SIZES[i])
    lengths(data, cache=False)
    assert not cache.exists()
    lengths(data, cache=tmp_path / "here")
    assert len(list((tmp_path / "here").iterdir())) == 1


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="could not be kept"):
        assert lengths([[1], []], cache=tmp_path / "file" / "below").tolist() == [1, 0]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"PACKLOAD_CACHE": "/a/b"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/packload"),
        ({"HOME": "/h"}, "/h/.cache/packload"),
    ],
)
def test_where_the_cache_lies(variables: dict[str, str], expected: str, monkeypatch: Any) -> None:
    for name in ("PACKLOAD_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert module.cache_folder() == Path(expected)


# --- the bar


@pytest.mark.parametrize("shown", [True, False])
def test_the_bar_goes_to_the_error_stream_and_can_be_left_out(
    shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    lengths([[1]], progress=shown)
    out, err = capsys.readouterr()
    assert out == ""
    assert ("reading lengths" in err) == shown

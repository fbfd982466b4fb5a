"""What becomes of a leaf: by its type and rank, and by what was declared for it."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from packload import CollateError, ragged
from packload.schema import Field, build, leaves, parse_schema, signature, suggest

Point = namedtuple("Point", "x y")


@dataclass
class Record:
    tokens: Any
    label: int


def recipe_of(sample: Any, schema: dict[str, str | None] | None = None) -> dict[str, Field]:
    return {leaf.path: leaf for leaf in leaves(build(signature(sample), parse_schema(schema)))}


def pattern_of(leaf: Any) -> str | None:
    pattern = recipe_of(leaf)[""].pattern
    return None if pattern is None else str(pattern)


@pytest.mark.parametrize(
    ("leaf", "pattern"),
    [
        (torch.zeros(3), "n"),
        (np.zeros(3), "n"),
        ([1, 2, 3], "n"),
        ([], "n"),
        (torch.zeros(3, 4), "n _"),
        (np.zeros((0, 4)), "n _"),
        ([[1.0, 2.0], [3.0, 4.0]], "n _"),
        (torch.zeros(3, 4, 5), "_ h w"),
        (Image.new("RGB", (4, 3)), "_ h w"),
        (Image.new("L", (4, 3)), "_ h w"),
        (7, ""),
        (0.5, ""),
        (True, ""),
        (np.float32(1), ""),
        (np.int64(1), ""),
        (torch.tensor(1), ""),
        (np.array(1.0), ""),
        ("text", None),
        (b"bytes", None),
        (None, None),
        (np.str_("text"), None),
        (["a", "b"], None),
    ],
)
def test_the_default_pattern_depends_on_type_and_rank(leaf: Any, pattern: str | None) -> None:
    assert pattern_of(leaf) == pattern


def test_the_default_pattern_does_not_depend_on_sizes() -> None:
    for shape in [(0,), (1,), (5,)]:
        assert signature({"x": torch.zeros(shape)}) == signature({"x": np.ones(3)})
    assert signature({"x": torch.zeros(0, 1)}) == signature({"x": [[1, 2]]})


def test_paths_are_dotted_through_every_container() -> None:
    sample = {
        "d": {"deep": {"x": 1}},
        "t": (1, (2, 3)),
        "p": Point(1, 2),
        "r": Record([1], 0),
        "o": OrderedDict(a=1),
        5: 1,
    }
    paths = list(recipe_of(sample))
    assert paths == ["d.deep.x", "t.0", "t.1.0", "t.1.1", "p.x", "p.y", "r.tokens", "r.label", "o.a", "5"]


def test_without_a_schema_every_field_has_axes_of_its_own() -> None:
    fields = recipe_of({"src": [1], "tgt": [1], "image": torch.zeros(3, 4, 5)})
    assert len({key for field in fields.values() for key in field.axes}) == 4


def test_declared_names_are_shared_between_fields_and_with_marks() -> None:
    sample = {"a": [1], "b": [1], "c": ragged(torch.zeros(1, 1), "n n")}
    fields = recipe_of(sample, {"a": "n", "b": "n"})
    assert fields["a"].axes == fields["b"].axes == ("n",)
    assert fields["c"].axes == ("n", "n")


def test_an_undeclared_axis_is_not_a_declared_one_of_the_same_name() -> None:
    fields = recipe_of({"a": [1], "b": [1]}, {"b": "a"})
    assert fields["a"].axes != fields["b"].axes


def test_a_mark_may_repeat_what_the_schema_declares() -> None:
    assert recipe_of({"x": ragged([[1]], "n  _")}, {"x": " n _ "})["x"].axes == ("n",)


def test_a_schema_makes_a_tuple_one_leaf() -> None:
    assert list(recipe_of({"box": (1, 2, 3, 4)})) == ["box.0", "box.1", "box.2", "box.3"]
    field = recipe_of({"box": (1, 2, 3, 4)}, {"box": "4"})["box"]
    assert str(field.pattern) == "4" and field.axes == ()


def test_none_and_the_empty_pattern_declare_a_number() -> None:
    for pattern in (None, ""):
        field = recipe_of({"y": 1}, {"y": pattern})["y"]
        assert field.pattern is not None and field.pattern.rank == 0


@pytest.mark.parametrize(
    ("sample", "schema", "words"),
    [
        ({"x": torch.zeros(2, 3, 4, 5)}, None, ["'x'", "4 dims", "schema={'x': 'n _ _ _'}", "ragged"]),
        ({"x": object()}, None, ["'x'", "object"]),
        ({"x": {1, 2}}, None, ["'x'", "set"]),
        ({"x": [torch.zeros(2)]}, None, ["'x'", "list of Tensor", "tuple"]),
        ({"x": np.array(["a"])}, None, ["'x'", "array of"]),
        ({"x": [1]}, {"y": "n"}, ["'y'", "['x']"]),
        ({"x": {"y": [1]}}, {"x": "n"}, ["'x'", "x.y"]),
        ({"x": "text"}, {"x": "n"}, ["'x'", "text", "'n'"]),
        ({"x": Image.new("L", (2, 2))}, {"x": "n"}, ["'x'", "PIL", "'n'", "_ h w"]),
        ({"x": ragged([1], "n")}, {"x": "m"}, ["'x'", "'n'", "'m'"]),
        ({"x": ragged({"y": [1]}, "n")}, None, ["'x'", "marks a leaf"]),
        ({"a.b": 1, "a": {"b": 1}}, None, ["a.b", "Rename"]),
    ],
)
def test_a_structure_that_cannot_be_collated_is_an_error_that_says_why(
    sample: Any, schema: dict[str, str | None] | None, words: list[str]
) -> None:
    with pytest.raises(CollateError) as error:
        recipe_of(sample, schema)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("schema", [{"x": "n ?"}, {"x": 3}, {1: "n"}])
def test_a_schema_that_cannot_be_read_is_an_error(schema: Any) -> None:
    with pytest.raises(CollateError, match="schema"):
        parse_schema(schema)


def test_a_mark_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(ValueError, match="pattern"):
        ragged([1], "n-1")


@pytest.mark.parametrize(
    ("pattern", "declared", "shapes", "expected"),
    [
        ("n _", False, [(4, 7), (4, 5)], "_ n"),
        ("n _", False, [(4, 7), (3, 5)], "n m"),
        ("_ h w", False, [(5, 5, 8), (7, 7, 8)], "n n _"),
        ("n m 3", True, [(5, 2, 8), (7, 2, 8)], "n m 8"),
        ("n 3", True, [(5, 3), (7, 4)], "n m"),
        ("4", True, [(4,), (5,)], "n"),
    ],
)
def test_the_suggested_schema_names_the_dims_that_vary(
    pattern: str, declared: bool, shapes: list[tuple[int, ...]], expected: str
) -> None:
    parsed = parse_schema({"x": pattern})["x"]
    assert suggest("x", parsed, declared, shapes) == f"schema={{'x': '{expected}'}}"

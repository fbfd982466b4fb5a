from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ops
from ops import PackedTensor, dispatch
from ops.testing import check, pack
from tests.strategies import make


@pytest.fixture(autouse=True)
def forgotten_warnings() -> Iterator[None]:
    before = set(dispatch._WARNED)
    dispatch._WARNED.clear()
    yield
    dispatch._WARNED.update(before)


def test_an_operator_stands_once_in_the_table() -> None:
    rows = ops.coverage()
    names = [row.operator for row in rows]
    assert len(names) == len(set(names))
    assert all("." not in name for name in names)
    assert {row.mode for row in rows} == {"packed", "fallback"}
    assert not any(row.compiles for row in rows if row.mode == "fallback")


def test_there_are_as_many_operators_as_promised() -> None:
    distinct = [row for row in ops.coverage() if not row.operator.endswith("_")]
    assert len(distinct) >= 300
    assert sum(row.mode == "packed" for row in distinct) >= 280


def test_methods_of_tensors_are_methods_of_packed_ones() -> None:
    for row in ops.coverage():
        if hasattr(Tensor, row.operator):
            assert hasattr(PackedTensor, row.operator), row.operator


@pytest.mark.filterwarnings("ignore::ops.FallbackWarning")
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("pattern", ["n", "n 4", "n m 4", "4 n"])
def test_one_sample_at_a_time_is_the_same_as_dense(pattern: str, keepdim: bool) -> None:
    batch = make([3, 1, 5], pattern, dtype=torch.int64)
    for dim in range(1, len(pattern.split()) + 1):
        check(lambda x, dim=dim: torch.mode(x, dim, keepdim)[0], batch, grad=False)
        check(lambda x, dim=dim: x.double().mode(dim, keepdim).values, batch)


def test_a_fallback_warns_once() -> None:
    (x,) = pack(make([3, 1, 5]))
    with pytest.warns(ops.FallbackWarning, match="'mode' runs one sample at a time"):
        x.mode(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x.mode(1)


def test_strict_makes_a_fallback_an_error() -> None:
    (x,) = pack(make([3, 1, 5]))
    with ops.strict(), pytest.raises(NotImplementedError, match="'mode' has no packed form.*to_list"):
        x.mode(1)
    ops.strict()
    with pytest.raises(NotImplementedError):
        x.mode(1)
    ops.strict(False)
    with pytest.warns(ops.FallbackWarning):
        x.mode(1)


def test_a_graph_has_no_fallback() -> None:
    (x,) = pack(make([3, 1, 5]))
    with pytest.raises(Exception, match="no packed form"):
        torch.compile(lambda x: x.mode(1)[0], fullgraph=True, backend="eager")(x)


def test_an_operator_without_a_row_raises_and_names_itself() -> None:
    (x,) = pack(make([3, 1, 5]))
    for fn in (torch.pca_lowrank, torch.meshgrid, torch.trace):
        with pytest.raises(NotImplementedError, match=fn.__name__):
            fn(x)


def test_the_page_is_written(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "operators.md"
    run = subprocess.run(
        [sys.executable, "-m", "ops", str(page)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert "operators," in run.stdout and "in-place forms" in run.stdout
    text = page.read_text()
    for row in ops.coverage():
        assert f"| `{row.operator}` | {row.mode} |" in text

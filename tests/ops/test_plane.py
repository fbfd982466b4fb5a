from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ops.testing import Ragged, check, pack
from tests.strategies import PROFILES, laid_out, make

ERRORS = (ValueError, RuntimeError, TypeError, NotImplementedError, IndexError)
OFFSETS = pytest.mark.parametrize("offset", [-2, -1, 0, 1, 2])
PAIRS = ("n n", "n n 4", "n m", "n m 4", "4 n m", "n 4 m")


def ragged_dims(pattern: str) -> list[int]:
    return [d + 1 for d, token in enumerate(pattern.split()) if token in "nm"]


# ---------------------------------------------------------------- triangles and diagonals


@pytest.mark.parametrize("pattern", ["n 4", "n m", "n n", "3 n n", "4 n", "n 3 4"])
@pytest.mark.parametrize("diagonal", [-1, 0, 2])
def test_triangles(pattern: str, diagonal: int) -> None:
    check(lambda x: torch.tril(x, diagonal), make([3, 0, 5], pattern))
    check(lambda x: x.triu(diagonal), make([3, 0, 5], pattern))


@pytest.mark.parametrize("offset", [-2, -1, 0, 1])
def test_diagonals(offset: int) -> None:
    check(lambda x: x.diagonal(offset, 1, 2), make([3, 2, 5], "n n 4"))
    check(lambda x: torch.diagonal(x, offset, 3, 1), make([3, 2, 5], "n 4 n"))
    check(lambda x: torch.diagonal(x, offset, -1, -2), make([3, 0, 5], "n 3 4"))


@OFFSETS
@pytest.mark.parametrize("pattern", PAIRS)
def test_diagonals_of_squares_and_rectangles(pattern: str, offset: int) -> None:
    a, b = ragged_dims(pattern)
    x, y = make([3, 0, 5], pattern), make([3, 0, 5], pattern, seed=1)
    check(lambda x: x.diagonal(offset, a, b), x)
    check(lambda x: x.diagonal(offset, b, a), x)
    check(lambda x, y: x.diagonal_scatter(y.diagonal(offset, a, b), offset, a, b), x, y)


@pytest.mark.parametrize("lengths", list(PROFILES.values()), ids=list(PROFILES))
def test_diagonals_under_every_condition(lengths: list[int]) -> None:
    check(lambda x: x.diagonal(1, 1, 2), make(lengths, "n m 4"))
    check(lambda x: x.diag_embed(), make(lengths, "n"))


def test_equal_diagonals_are_one_axis() -> None:
    (x,) = pack(make({"n": [3, 0, 5], "m": [4, 2, 1]}, "n m"))
    assert x.diagonal(0, 1, 2).axes[0] is (x * 2).diagonal(0, 1, 2).axes[0]


@OFFSETS
@pytest.mark.parametrize("pattern", ["n", "n 4", "4 n", "n m", "n m 4"])
def test_a_diagonal_makes_a_matrix(pattern: str, offset: int) -> None:
    x = make([3, 0, 5], pattern)
    check(lambda x: x.diag_embed(offset), x)
    check(lambda x: x.diag_embed(offset, 1, -1), x)
    check(lambda x: x.diag_embed(offset, -1, 1), x)
    check(lambda x: torch.diag_embed(x, offset).diagonal(offset, -2, -1), x)


def test_diagonals_of_static_dims_are_written() -> None:
    check(lambda x: x.diagonal_scatter(x.diagonal(1, 2, 3) * 2, 1, 2, 3), make([3, 0, 5], "n 4 3"))
    check(lambda x, d: x.diagonal_scatter(d, 0, 2, 3), make([3, 0, 5], "n 4 3"), make([3, 0, 5], "n 3"))


def test_the_trace_of_every_sample() -> None:
    check(lambda x: x.diagonal(0, 1, 2).sum(-1), make([3, 0, 5], "n n"))


# ---------------------------------------------------------------- windows


@pytest.mark.parametrize(("size", "step"), [(1, 1), (2, 1), (2, 2), (1, 3), (2, 3)])
@pytest.mark.parametrize("pattern", ["n", "n 4", "4 n", "n m 4", "n n"])
def test_windows_along_every_dim(pattern: str, size: int, step: int) -> None:
    for dim in range(1, len(pattern.split()) + 1):
        check(lambda x, d=dim: x.unfold(d, size, step), make([3, 2, 5], pattern))


@given(laid_out(least=2), st.integers(1, 2), st.integers(1, 3), st.data())
def test_windows_on_any_layout(
    case: tuple[Ragged, tuple[int, ...]], size: int, step: int, data: st.DataObject
) -> None:
    batch, order = case
    dim = data.draw(st.sampled_from([d for d, c in enumerate(order) if c]))
    check(lambda x: x.permute(order).unfold(dim, size, step), batch, batch_dim=order.index(0))


def test_windows_and_strides_of_one_length_are_one_axis() -> None:
    (x,) = pack(make([3, 2, 5]))
    assert x.unfold(1, 2, 1).axes[0] is x[:, 1:].axes[0]


# ---------------------------------------------------------------- mistakes


MISTAKES: dict[str, tuple[Callable, str]] = {
    "a_diagonal_with_features": (lambda x: x.diagonal(0, 1, 2), "two static dims or two ragged ones"),
    "a_diagonal_with_the_batch": (lambda x: x.diagonal(), "two static dims or two ragged ones"),
    "a_diagonal_of_one_dim": (lambda x: x.diagonal(0, 1, 1), "two different dims; got 1 and 1"),
    "a_diagonal_written_with_the_batch": (
        lambda x: x.diagonal_scatter(x, 0, 0, 1),
        "diagonal_scatter needs two static dims",
    ),
    "a_diagonal_of_the_batch": (lambda x: x[..., 0].t().diag_embed(), "here it is the batch"),
    "a_triangle_of_the_batch": (lambda x: x.permute(1, 2, 0).tril(), "tril needs a static dim"),
    "a_window_too_long": (lambda x: x.unfold(1, 3, 1), "sample 1 has 2 positions, 3 are needed"),
    "a_window_of_nothing": (lambda x: x.unfold(1, 0, 1), "both must be positive"),
    "a_window_over_samples": (lambda x: x.unfold(0, 2, 1), "unfold needs a static dim; dim 0"),
    "a_trace": (lambda x: torch.trace(x), "trace.*sum the diagonal"),
    "a_matrix_of_a_vector": (lambda x: torch.diag(x), "x.diag_embed"),
    "a_matrix_of_all": (lambda x: torch.diagflat(x), "x.diag_embed"),
}


@pytest.mark.parametrize(("fn", "message"), list(MISTAKES.values()), ids=list(MISTAKES))
def test_mistakes_are_named(fn: Callable, message: str) -> None:
    with pytest.raises(ERRORS, match=message):
        fn(pack(make([3, 2, 5]))[0])

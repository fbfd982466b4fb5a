from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from ops.testing import Ragged, assert_matches, check, pack
from tests.strategies import PROFILES, laid_out, make

PATTERNS = ("n", "n 4", "4 n", "n m 4", "n 4 m", "n n")
ERRORS = (ValueError, RuntimeError, IndexError, NotImplementedError, TypeError)
EACH_PATTERN = pytest.mark.parametrize("pattern", PATTERNS)

SCANS: dict[str, Callable] = {
    "cumsum": lambda x, d: torch.cumsum(x, d),
    "cumprod": lambda x, d: x.cumprod(d),
    "logcumsumexp": lambda x, d: torch.logcumsumexp(x, d),
    "cummax": lambda x, d: torch.cummax(x, d)[0],
    "cummin": lambda x, d: x.cummin(d).values,
    "softmax": lambda x, d: x.softmax(d),
    "log_softmax": lambda x, d: F.log_softmax(x, dim=d),
    "softmin": lambda x, d: F.softmin(x, d),
    "normalize": lambda x, d: F.normalize(x, dim=d),
    "normalize_1": lambda x, d: F.normalize(x, p=1.0, dim=d),
    "sort": lambda x, d: torch.sort(x, d)[0],
    "sort_descending": lambda x, d: x.sort(d, descending=True).values,
    "flip": lambda x, d: x.flip(d),
    "roll": lambda x, d: torch.roll(x, 2, d),
    "roll_back": lambda x, d: x.roll((-1,), (d,)),
    "diff": lambda x, d: torch.diff(x, dim=d),
    "diff_twice": lambda x, d: x.diff(2, d),
}
INDICES: dict[str, Callable] = {
    "cummax": lambda x, d: torch.cummax(x, d)[1],
    "cummin": lambda x, d: torch.cummin(x, d)[1],
    "sort": lambda x, d: x.sort(d).indices,
    "argsort": lambda x, d: torch.argsort(x, d),
    "argsort_descending": lambda x, d: x.argsort(dim=d, descending=True),
}
EACH = pytest.mark.parametrize("fn", list(SCANS.values()), ids=list(SCANS))
EACH_INDEX = pytest.mark.parametrize("fn", list(INDICES.values()), ids=list(INDICES))


def dims(pattern: str) -> range:
    return range(1, len(pattern.split()) + 1)


@EACH_PATTERN
@EACH
def test_scans_along_every_dim(fn: Callable, pattern: str) -> None:
    for lengths in ([3, 0, 5], [4, 4], [6]):
        for dim in dims(pattern):
            check(lambda x, dim=dim: fn(x, dim), make(lengths, pattern))


@EACH_PATTERN
@EACH_INDEX
def test_positions_are_counted_inside_the_sample(fn: Callable, pattern: str) -> None:
    for lengths in ([3, 0, 5], [4, 4]):
        for dim in dims(pattern):
            check(lambda x, dim=dim: fn(x, dim), make(lengths, pattern), grad=False)


@pytest.mark.parametrize("lengths", list(PROFILES.values()), ids=list(PROFILES))
@EACH
def test_scans_under_every_condition(fn: Callable, lengths: list[int]) -> None:
    check(lambda x: fn(x, 1), make(lengths))


@given(laid_out(), st.data())
def test_scans_on_any_layout(case: tuple[Ragged, tuple[int, ...]], data: st.DataObject) -> None:
    batch, order = case
    fn = data.draw(st.sampled_from(list(SCANS.values())))
    dim = data.draw(st.sampled_from([i for i, d in enumerate(order) if d != 0]))
    check(lambda x: fn(x.permute(order), dim), batch, batch_dim=order.index(0))


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("pattern", ["n 4", "n m 4", "4 n"])
def test_topk_makes_the_dim_static(pattern: str, largest: bool) -> None:
    for dim in dims(pattern):
        batch = make([3, 5, 4], pattern)
        check(lambda x, dim=dim: torch.topk(x, 3, dim, largest)[0], batch)
        check(lambda x, dim=dim: x.topk(2, dim, largest).indices, batch, grad=False)


def test_topk_of_too_short_a_sample_names_it() -> None:
    (x,) = pack(make([5, 2, 4]))
    with pytest.raises(IndexError, match="topk of 3.*sample 1 has 2 positions"):
        x.topk(3, 1)


@pytest.mark.parametrize("turns", range(-3, 5))
@pytest.mark.parametrize("pattern", ["n 4", "n m", "n n 4"])
def test_planes_turn(pattern: str, turns: int) -> None:
    check(lambda x: torch.rot90(x, turns, (1, 2)), make([3, 0, 5], pattern))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite(value: float) -> None:
    batch = make([3, 4], "n 2")
    batch.samples[0][1, 0] = batch.samples[1][0, 1] = value
    for name in ("cumsum", "cummax", "cummin", "sort", "sort_descending", "softmax", "log_softmax"):
        check(lambda x, name=name: SCANS[name](x, 1), batch, grad=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_result_types_are_those_of_dense_tensors(dtype: torch.dtype) -> None:
    batch = make([3, 1, 5], dtype=dtype)
    check(lambda x: x.cumsum(1), batch, grad=False, rtol=1e-2, atol=1e-2)
    check(lambda x: x.sort(dim=1, stable=True).values, batch, grad=False)
    check(lambda x: x.flip(1), batch, grad=False)
    if dtype.is_floating_point:
        check(lambda x: x.softmax(1), batch, grad=False, rtol=1e-2, atol=1e-3)
    check(lambda x: x.softmax(1, dtype=torch.float64), batch, grad=False)
    check(lambda x: x.cumsum(1, dtype=torch.float64), batch, grad=False)


def test_softmax_of_half_precision_is_computed_in_single() -> None:
    """A sum of 70 000 powers would stop at 256 in bfloat16."""
    (x,) = pack(Ragged([torch.zeros(70_000, 1, dtype=torch.bfloat16), torch.zeros(2, 1).bfloat16()], "n 1"))
    assert x.softmax(1).values[0].item() == pytest.approx(1 / 70_000, rel=1e-2)
    assert x.log_softmax(1).values[0].item() == pytest.approx(-11.156, rel=1e-2)


def test_softmax_over_nothing_is_nothing_and_its_neighbours_are_right() -> None:
    check(lambda x: x.softmax(1), make([0, 3, 0]))
    check(lambda x: (x * 1000).softmax(1), make([2, 3]))


@pytest.mark.parametrize("logarithm", [False, True])
@pytest.mark.parametrize("pattern", ["n 2", "n m"])
def test_second_derivatives_of_softmax(pattern: str, logarithm: bool) -> None:
    (x,) = pack(make([3, 0, 2], pattern))

    def fn(values: torch.Tensor) -> torch.Tensor:
        packed = type(x)(values, x.grid, x.order)
        return (packed.log_softmax(1) if logarithm else packed.softmax(1)).values

    values = x.values.clone().requires_grad_()
    assert torch.autograd.gradcheck(fn, [values])
    assert torch.autograd.gradgradcheck(fn, [values])


def test_ties_are_sorted_stably() -> None:
    batch = Ragged([torch.tensor([1, 0, 1, 0]), torch.tensor([2, 2])], "n")
    check(lambda x: x.argsort(dim=1, stable=True), batch, grad=False)
    check(lambda x: x.sort(dim=1, descending=True, stable=True).indices, batch, grad=False)


def test_gumbel_softmax_sums_to_one_in_every_sample() -> None:
    (x,) = pack(make([3, 1, 5]))
    assert_matches(F.gumbel_softmax(x, dim=1).sum(1), torch.ones(3, 4, dtype=torch.float64))
    hard = F.gumbel_softmax(x.requires_grad_(), hard=True, dim=1)
    assert_matches(hard.sum(1).detach(), torch.ones(3, 4, dtype=torch.float64))
    hard[:, 0].sum().backward()
    assert x.grad is not None and x.grad.values.abs().sum() > 0


@pytest.mark.parametrize("name", ["trapezoid", "cumulative_trapezoid"])
@EACH_PATTERN
def test_areas_along_every_dim(pattern: str, name: str) -> None:
    fn, y, x = getattr(torch, name), make([3, 1, 5], pattern), make([3, 1, 5], pattern, seed=1)
    for dim in range(1, len(pattern.split()) + 1):
        check(lambda y, d=dim: fn(y, dim=d), y)
        check(lambda y, d=dim: fn(y, dx=0.5, dim=d), y)
        check(lambda y, x, d=dim: fn(y, x, dim=d), y, x)


def test_areas_over_given_places() -> None:
    places = torch.arange(4.0, dtype=torch.float64) ** 2
    check(lambda y, x: torch.trapezoid(y, x, dim=-1), make([3, 1, 5]), places)
    check(lambda y, x: torch.trapezoid(y, x, dim=1), make([3, 1, 5], "4 n"), places)


MISTAKES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "softmax_without_dim": (lambda x: F.softmax(x), "softmax.*explicit dim"),
    "softmax_over_the_batch": (lambda x: x.softmax(0), "softmax needs a static dim; dim 0 .* batch"),
    "cumsum_over_the_batch": (lambda x: x.cumsum(0), "cumsum needs a static dim; dim 0 .* batch"),
    "sort_of_the_batch": (lambda x: x.sort(0), "sort needs a static dim; dim 0 .* batch"),
    "flip_of_the_batch": (lambda x: x.flip(0), "flip needs a static dim; dim 0 .* batch"),
    "roll_without_dims": (lambda x: x.roll(1), "roll of a packed tensor needs dims="),
    "a_dim_too_many": (lambda x: x.cumsum(3), "dim 3 is out of range"),
    "topk_of_too_many_features": (lambda x: x.topk(5), "k"),
    "out": (lambda x: torch.cumsum(x, 1, out=torch.empty(3)), "out"),
    "diff_backwards": (lambda x: x.diff(-1), "diff: n must not be negative"),
}


@pytest.mark.parametrize(("fn", "message"), list(MISTAKES.values()), ids=list(MISTAKES))
def test_mistakes_are_named(fn: Callable, message: str) -> None:
    (x,) = pack(make([3, 0, 5]))
    with pytest.raises(ERRORS, match=message):
        fn(x)

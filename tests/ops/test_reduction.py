from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ops import is_packed
from ops.testing import Ragged, assert_matches, check, pack
from tests.strategies import NONEMPTY, PATTERNS, PROFILES, batches, laid_out, make, subsets

SUMS = {"sum": torch.sum, "mean": torch.mean}
PEAKS = {"amax": torch.amax, "amin": torch.amin}
ALL = {**SUMS, **PEAKS}
LENGTHS = pytest.mark.parametrize("lengths", list(PROFILES.values()), ids=list(PROFILES))
NONEMPTY_LENGTHS = pytest.mark.parametrize("lengths", list(NONEMPTY.values()), ids=list(NONEMPTY))
EACH_SUM = pytest.mark.parametrize("fn", list(SUMS.values()), ids=list(SUMS))
EACH = pytest.mark.parametrize("fn", list(ALL.values()), ids=list(ALL))
KEEPDIM = pytest.mark.parametrize("keepdim", [False, True], ids=["drop", "keep"])
ERRORS = (ValueError, RuntimeError, IndexError)


def batch_dim_after(order: tuple[int, ...], dims: tuple[int, ...], keepdim: bool) -> int:
    position = order.index(0)
    return position if keepdim else position - sum(d % len(order) < position for d in dims)


def subsets_of_dims(rank: int) -> list[tuple[int, ...]]:
    return [dims for size in range(1, rank + 1) for dims in combinations(range(1, rank + 1), size)]


CASES = [
    (p, dims)
    for p in ("n", "n 4", "4 n", "n n 4", "n m 4", "n 4 m")
    for dims in subsets_of_dims(len(p.split()))
]
EACH_CASE = pytest.mark.parametrize(("pattern", "dims"), CASES, ids=[f"{p} {d}" for p, d in CASES])


@KEEPDIM
@EACH_CASE
@EACH_SUM
def test_sums_over_every_set_of_dims(
    fn: Callable, pattern: str, dims: tuple[int, ...], keepdim: bool
) -> None:
    for lengths in ([3, 0, 5], [2, 2], [4]):
        check(lambda x: fn(x, dim=dims, keepdim=keepdim), make(lengths, pattern))


@KEEPDIM
@EACH_CASE
@pytest.mark.parametrize("fn", list(PEAKS.values()), ids=list(PEAKS))
def test_peaks_over_every_set_of_dims(
    fn: Callable, pattern: str, dims: tuple[int, ...], keepdim: bool
) -> None:
    for lengths in ([3, 1, 5], [2, 2], [4]):
        check(lambda x: fn(x, dim=dims, keepdim=keepdim), make(lengths, pattern))


@LENGTHS
@EACH_SUM
def test_sums_over_the_axis(fn: Callable, lengths: list[int]) -> None:
    check(lambda x: fn(x, 1), make(lengths))
    check(lambda x: fn(x, -2), make(lengths, "n n 4"))


@NONEMPTY_LENGTHS
@pytest.mark.parametrize("name", list(PEAKS))
def test_peaks_over_the_axis(name: str, lengths: list[int]) -> None:
    check(lambda x: getattr(x, name)(1), make(lengths))
    check(lambda x: getattr(x, name)((-2, -1)), make(lengths, "n n 4"))


@given(laid_out(), st.data())
def test_sums_on_any_layout(case: tuple[Ragged, tuple[int, ...]], data: st.DataObject) -> None:
    run_any_layout(case, data, list(SUMS.values()))


@given(laid_out(least=1), st.data())
def test_peaks_on_any_layout(case: tuple[Ragged, tuple[int, ...]], data: st.DataObject) -> None:
    run_any_layout(case, data, list(PEAKS.values()))


def run_any_layout(case: tuple[Ragged, tuple[int, ...]], data: st.DataObject, fns: list[Callable]) -> None:
    batch, order = case
    dims = data.draw(subsets([i for i, d in enumerate(order) if d != 0]))
    dims = tuple(d - len(order) if data.draw(st.booleans()) else d for d in dims)
    keepdim, fn = data.draw(st.booleans()), data.draw(st.sampled_from(fns))
    where = batch_dim_after(order, dims, keepdim)
    check(lambda x: fn(x.permute(order), dim=dims, keepdim=keepdim), batch, batch_dim=where)


# ---------------------------------------------------------------- the batch dim


def over_valid(fn: Callable, dims: tuple[int, ...]) -> Callable[[Ragged], Tensor]:
    """Over the batch and every axis: ``fn`` over the stacked cells, and over some static dims."""

    def reference(batch: Ragged) -> Tensor:
        tokens = batch.pattern.split()
        static = [d for d, token in enumerate(tokens) if token.isdigit()]
        ragged = [d for d, token in enumerate(tokens) if not token.isdigit()]
        sizes = [int(tokens[d]) for d in static]
        cells = torch.cat([s.permute(*ragged, *static).reshape(-1, *sizes) for s in batch.samples])
        return fn(cells, dim=(0, *(1 + static.index(d - 1) for d in dims if d - 1 in static)))

    return reference


@pytest.mark.parametrize("lengths", [[3, 1, 5], [4, 4], [6]], ids=["ragged", "equal", "one_sample"])
@pytest.mark.parametrize(
    ("pattern", "dims"),
    [
        ("n", (0, 1)),
        ("n 4", (0, 1)),
        ("n 4", (0, 1, 2)),
        ("4 n", (0, 2)),
        ("n n 4", (0, 1, 2)),
        ("n m 4", (1, 0, 2)),
        ("n 3 4", (0, 1, 3)),
    ],
)
@EACH
def test_batch_with_all_axes_reduces_valid_positions(
    fn: Callable, pattern: str, dims: tuple[int, ...], lengths: list[int]
) -> None:
    batch = make(lengths, pattern)
    result = check(lambda x: fn(x, dim=dims), batch, reference=over_valid(fn, dims))
    assert type(result) is Tensor
    (x,) = pack(batch)
    kept = fn(x, dim=dims, keepdim=True)
    assert kept.dim() == x.dim()
    torch.testing.assert_close(kept.squeeze(dims), result.detach())


@given(batches(least=1))
def test_a_full_reduction_is_over_valid_entries(batch: Ragged) -> None:
    for fn in (torch.sum, torch.mean, torch.amax, torch.amin):
        result = check(fn, batch, reference=lambda b, fn=fn: fn(torch.cat([s.flatten() for s in b.samples])))
        assert type(result) is Tensor and result.dim() == 0


def test_a_full_reduction_sees_empty_samples_as_nothing() -> None:
    (x,) = pack(make([3, 0, 5]))
    torch.testing.assert_close(x.mean(), x.values.mean())
    torch.testing.assert_close(x.amax(), x.values.amax())
    torch.testing.assert_close(x.mean((0, 1)), x.values.mean(0))
    torch.testing.assert_close(x.amax((0, 1)), x.values.amax(0))


@pytest.mark.parametrize(
    ("pattern", "dims"), [("n 4", 0), ("n 4", (0,)), ("n 4", (0, 2)), ("n m 4", (0, 1)), ("4 n", -3)]
)
@EACH
def test_the_batch_alone_cannot_be_reduced_and_the_error_says_what_to_do(
    fn: Callable, pattern: str, dims: int | tuple[int, ...]
) -> None:
    (x,) = pack(make([3, 1, 5], pattern))
    with pytest.raises(ERRORS) as error:
        fn(x, dims)
    message = str(error.value).lower()
    assert "batch" in message
    assert "ragged" in message or "axis" in message or "axes" in message


# ---------------------------------------------------------------- types of results


def test_a_result_without_a_ragged_axis_is_a_plain_tensor() -> None:
    for lengths in PROFILES.values():
        (x,) = pack(make(lengths))
        for result in (x.sum(1), x.mean((1, 2)), x.sum(1, keepdim=True), x.sum(), x.sum((0, 1))):
            assert type(result) is Tensor
        for result in (x.sum(2), x.mean(-1), x.sum(2, keepdim=True)):
            assert is_packed(result)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32]
)
def test_result_types_are_those_of_dense_tensors(dtype: torch.dtype) -> None:
    x = make([3, 1, 5], dtype=dtype)
    check(lambda a: a.sum(1), x, grad=False)
    check(lambda a: a.sum(2), x, grad=False)
    if dtype != torch.bool:
        check(lambda a: a.amax(1), x, grad=False)
    check(lambda a: a.sum(1, dtype=torch.float64), x, grad=False)
    check(lambda a: a.mean(1, dtype=torch.float32), x, grad=False, rtol=1e-6, atol=1e-6)


def test_the_mean_of_integers_raises_as_dense() -> None:
    (x,) = pack(make([3, 5], dtype=torch.int64))
    with pytest.raises(RuntimeError):
        x.mean(1)


def test_a_dim_out_of_range_or_named_twice_raises() -> None:
    (x,) = pack(make([3, 5]))
    for fn in ALL.values():
        with pytest.raises(ERRORS):
            fn(x, 3)
        with pytest.raises(ERRORS):
            fn(x, (1, 1))
        with pytest.raises(ERRORS):
            fn(x, (1, -2))


# ---------------------------------------------------------------- empty axes


def test_the_sum_of_nothing_is_zero_and_the_mean_nan() -> None:
    (x,) = pack(make([3, 0, 5]))
    assert torch.equal(x.sum(1)[1], torch.zeros(4, dtype=torch.float64))
    assert x.mean(1)[1].isnan().all()
    assert not x.mean(1)[0].isnan().any()


@pytest.mark.parametrize("name", list(PEAKS))
def test_the_peak_of_nothing_raises_and_names_the_sample(name: str) -> None:
    (x,) = pack(make([3, 0, 5]))
    with pytest.raises(ERRORS, match="sample 1"):
        getattr(x, name)(1)
    (p,) = pack(make({"n": [3, 2, 5], "m": [1, 2, 0]}, "n m 4"))
    with pytest.raises(ERRORS, match="sample 2"):
        getattr(p, name)(2)
    (nothing,) = pack(make([0, 0]))
    with pytest.raises(ERRORS):
        getattr(nothing, name)((0, 1))


def test_rows_without_columns_are_no_obstacle_to_the_peak_over_rows() -> None:
    """Sample 0 is 2 x 0: the maximum over its rows is an empty vector, as dense."""
    check(lambda p: p.amax(1), make({"n": [2, 3], "m": [0, 2]}, "n m 4"))
    check(lambda p: p.amax(3), make({"n": [2, 3], "m": [0, 2]}, "n m 4"))


def test_static_peaks_do_not_mind_empty_samples() -> None:
    check(lambda x: x.amax(2), make([3, 0, 5]))
    check(lambda x: x.amin(-1, keepdim=True), make([3, 0, 5], "n m 4"))


# ---------------------------------------------------------------- ties, precision, gradients


@pytest.mark.parametrize("dims", [(1,), (2,), (1, 2), (1, 3), (1, 2, 3)])
@pytest.mark.parametrize("fn", list(PEAKS.values()), ids=list(PEAKS))
def test_ties_share_the_gradient_as_dense(fn: Callable, dims: tuple[int, ...]) -> None:
    batch = make([3, 1, 5], "n m 4", dtype=torch.int64)
    tied = Ragged([(s % 2).double() for s in batch.samples], batch.pattern)
    check(lambda x: fn(x, dims), tied)
    check(lambda x: fn(x, dims) * 2, Ragged([torch.ones_like(s) for s in tied.samples], "n m 4"))


def test_peaks_with_nan_are_nan() -> None:
    x = make([3, 2])
    x.samples[0][1, 2] = float("nan")
    check(lambda a: a.amax(1), x, grad=False)
    check(lambda a: a.amin(1), x, grad=False)


@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
def test_infinite_values_are_ordinary(value: float) -> None:
    x = make([3, 2])
    x.samples[0][:, 2] = value
    for fn in (torch.sum, torch.mean, torch.amax, torch.amin):
        check(lambda a, fn=fn: fn(a, 1), x, grad=False)


def test_sums_of_bfloat16_accumulate_in_float32() -> None:
    ones = Ragged(
        [torch.ones(70_000, 2, dtype=torch.bfloat16), torch.ones(3, 2, dtype=torch.bfloat16)], "n 2"
    )
    (x,) = pack(ones)
    assert x.sum(1)[:, 0].tolist() == [70_144, 3]
    assert x.mean(1)[:, 0].tolist() == [1, 1]
    assert x.sum((0, 1)).tolist() == [70_144, 70_144]


def test_means_of_float16_do_not_overflow_on_the_way() -> None:
    (x,) = pack(
        Ragged([torch.ones(70_000, 2, dtype=torch.float16), torch.ones(3, 2, dtype=torch.float16)], "n 2")
    )
    assert x.mean(1).tolist() == [[1, 1], [1, 1]]
    assert x.mean((1, 2)).tolist() == [1, 1]
    assert x.mean() == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@EACH_SUM
def test_half_precision_is_off_by_one_rounding_only(fn: Callable, dtype: torch.dtype) -> None:
    batch = Ragged([torch.rand(n, 3).to(dtype) for n in (3000, 1, 777)], "n 3")
    (x,) = pack(batch)
    exact = torch.stack([fn(s.double(), 0) for s in batch.samples])
    torch.testing.assert_close(fn(x, 1).double(), exact, rtol=torch.finfo(dtype).eps, atol=0)
    (p,) = pack(Ragged([s[:, None] for s in batch.samples], "n m 3"))
    torch.testing.assert_close(fn(p, (1, 2)).double(), exact, rtol=torch.finfo(dtype).eps, atol=0)


def test_long_sums_do_not_lose_what_short_neighbours_need() -> None:
    """A running total over the batch would swallow the small sample."""
    batch = Ragged([torch.full((1000,), 1e8), torch.full((3,), 1e-3)], "n")
    (x,) = pack(batch)
    torch.testing.assert_close(x.sum(1)[1], torch.tensor(3e-3))


@pytest.mark.parametrize("pattern", ["n 4", "n m 4", "4 n"])
def test_second_derivatives(pattern: str) -> None:
    (x,) = pack(make([3, 0, 2], pattern))
    values = x.values.clone().requires_grad_()
    dims = tuple(range(1, x.dim()))

    def total(v: Tensor) -> Tensor:
        packed = type(x)(v, x.grid, x.order)
        return (packed * packed.sum(dims, keepdim=True)).sum(dims)

    assert torch.autograd.gradcheck(total, [values])
    assert torch.autograd.gradgradcheck(total, [values])


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_reduction_chain_matches(pattern: str) -> None:
    last = len(pattern.split())
    check(lambda x: x.mean(last).sum(1) if last > 1 else x.mean(1), make([3, 2, 5], pattern))


def test_a_reduced_pair_keeps_the_axis_object() -> None:
    (p,) = pack(make({"n": [3, 1], "m": [2, 4]}, "n m 4"))
    assert p.sum(2).axes[0] is p.axes[0]
    assert p.sum(1).axes[0] is p.axes[1]
    assert_matches(p.sum((1, 3)), [s.sum((0, 2)) for s in p.to_list()])


# ---------------------------------------------------------------- the rest of the family


STATISTICS: dict[str, Callable] = {
    "prod": lambda x, d, k: torch.prod(x, d, k),
    "nansum": lambda x, d, k: torch.nansum(x, d, k),
    "nanmean": lambda x, d, k: x.nanmean(d, k),
    "logsumexp": lambda x, d, k: torch.logsumexp(x, d, k),
    "var": lambda x, d, k: torch.var(x, d, keepdim=k),
    "var_biased": lambda x, d, k: x.var(d, False, k),
    "std": lambda x, d, k: torch.std(x, dim=d, correction=0, keepdim=k),
    "std_mean": lambda x, d, k: torch.std_mean(x, d, keepdim=k)[0],
    "var_mean": lambda x, d, k: torch.var_mean(x, d, keepdim=k)[1],
    "norm": lambda x, d, k: x.norm(2, d, k),
    "norm_3": lambda x, d, k: torch.norm(x, 3, d, k),
    **{
        f"vector_norm_{p}": lambda x, d, k, p=p: torch.linalg.vector_norm(x, p, d, k)
        for p in (0, 0.5, 1, 2, 3.5, float("inf"), float("-inf"), -1)
    },
    "max": lambda x, d, k: torch.max(x, d, k)[0],
    "min": lambda x, d, k: x.min(dim=d, keepdim=k).values,
    "median": lambda x, d, k: x.median(d, k).values,
    "nanmedian": lambda x, d, k: torch.nanmedian(x, d, k)[0],
    "kthvalue": lambda x, d, k: torch.kthvalue(x, 1, d, k)[0],
    **{
        f"quantile_{q}_{how}": lambda x, d, k, q=q, how=how: torch.quantile(x, q, d, k, interpolation=how)
        for q, how in ((0.3, "linear"), (0.5, "midpoint"), (0.7, "nearest"), (1.0, "lower"), (0.2, "higher"))
    },
    "nanquantile": lambda x, d, k: torch.nanquantile(x, 0.4, d, k),
}
COUNTED: dict[str, Callable] = {
    "argmax": lambda x, d, k: torch.argmax(x, d, k),
    "argmin": lambda x, d, k: x.argmin(d, k),
    "max": lambda x, d, k: x.max(d, k).indices,
    "min": lambda x, d, k: torch.min(x, d, k)[1],
    "median": lambda x, d, k: x.median(d, k).indices,
    "aminmax": lambda x, d, k: torch.aminmax(x, dim=d, keepdim=k).max,  # PyTorch 2.11 has no gradient
    "any": lambda x, d, k: (x > 0).any(d, k),
    "all": lambda x, d, k: (x > -1).all(d, k),
    "any_number": lambda x, d, k: torch.any(x.to(torch.uint8), d, k),
}


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@KEEPDIM
@pytest.mark.parametrize("pattern", ["n", "n 4", "4 n", "n m 4", "n 4 m"])
@pytest.mark.parametrize("fn", list(STATISTICS.values()), ids=list(STATISTICS))
def test_statistics_along_every_dim(fn: Callable, pattern: str, keepdim: bool) -> None:
    for lengths in ([3, 1, 5], [4, 4]):
        for dim in range(1, len(pattern.split()) + 1):
            check(lambda x, dim=dim: fn(x, dim, keepdim), make(lengths, pattern))


@KEEPDIM
@pytest.mark.parametrize("pattern", ["n", "n 4", "4 n", "n m 4"])
@pytest.mark.parametrize("fn", list(COUNTED.values()), ids=list(COUNTED))
def test_positions_and_truth_along_every_dim(fn: Callable, pattern: str, keepdim: bool) -> None:
    for lengths in ([3, 1, 5], [4, 4]):
        for dim in range(1, len(pattern.split()) + 1):
            check(lambda x, dim=dim: fn(x, dim, keepdim), make(lengths, pattern), grad=False)


@pytest.mark.parametrize("pattern", ["n 4", "n m 4", "4 n"])
def test_statistics_over_several_dims(pattern: str) -> None:
    for dims in subsets_of_dims(len(pattern.split())):
        for name in ("nansum", "nanmean", "logsumexp", "var", "std", "std_mean", "norm", "vector_norm_inf"):
            fn = STATISTICS[name]
            check(lambda x, fn=fn, dims=dims: fn(x, dims, True), make([3, 2, 5], pattern))
        check(lambda x, dims=dims: (x > 0).any(dims), make([3, 0, 5], pattern), grad=False)
        check(lambda x, dims=dims: torch.count_nonzero(x > 0, dims), make([3, 0, 5], pattern), grad=False)


def test_statistics_of_all_valid_entries() -> None:
    batch = make([3, 1, 5])
    entries = torch.cat([s.flatten() for s in batch.samples])
    for fn in (
        torch.prod,
        torch.var,
        torch.std,
        torch.max,
        torch.min,
        torch.median,
        torch.nanmean,
        torch.norm,
        lambda x: torch.quantile(x, 0.3),
        lambda x: x.logsumexp(tuple(range(x.dim()))),
        lambda x: torch.dist(x, x * 2),
    ):
        check(fn, batch, reference=lambda b, fn=fn: fn(torch.cat([s.flatten() for s in b.samples])))
    (x,) = pack(batch)
    assert bool((x > entries.min() - 1).all()) and not bool((x > entries.max()).any())
    assert int(torch.count_nonzero(x)) == len(entries)


def test_max_and_min_of_two_tensors_are_pointwise() -> None:
    x, y = make([3, 0, 5]), make([3, 0, 5], seed=1)
    check(torch.max, x, y)
    check(lambda x, y: x.min(y), x, y)


def test_a_position_gathers_its_value() -> None:
    check(lambda x: x.gather(1, x.argmax(1, keepdim=True)), make([3, 1, 5]))


def test_the_first_of_equal_values_is_taken_as_dense() -> None:
    tied = Ragged([torch.tensor([1.0, 2, 2, 0, 0]), torch.tensor([3.0, 3])], "n")
    check(lambda x: x.argmax(1), tied, grad=False)
    check(lambda x: x.max(1).values, tied)
    check(lambda x: x.min(1).values, tied)


def test_statistics_with_nan_and_infinity() -> None:
    batch = make([3, 4], "n 3")
    batch.samples[0][1, 0] = float("nan")
    batch.samples[1][0, 1] = float("inf")
    batch.samples[1][:, 2] = float("-inf")
    for name in (
        "nansum",
        "nanmean",
        "max",
        "min",
        "median",
        "nanmedian",
        "nanquantile",
        "quantile_0.3_linear",
    ):
        check(lambda x, name=name: STATISTICS[name](x, 1, False), batch, grad=False)
    for name in ("logsumexp", "argmax", "argmin"):
        fn = {**STATISTICS, **COUNTED}[name]
        check(lambda x, fn=fn: fn(x, 1, False), batch, grad=False)


def test_gradients_at_zero_are_those_of_dense_tensors() -> None:
    zeros = Ragged([torch.zeros(3, 2, dtype=torch.float64), torch.ones(2, 2, dtype=torch.float64)], "n 2")
    for name in ("std", "norm", "vector_norm_1", "vector_norm_3.5", "vector_norm_inf", "prod"):
        check(lambda x, name=name: STATISTICS[name](x, 1, False), zeros)


def test_statistics_of_nothing() -> None:
    batch = make([3, 0, 5])
    for name in ("prod", "nansum", "norm", "logsumexp"):
        check(lambda x, name=name: STATISTICS[name](x, 1, False), batch)
    (x,) = pack(batch)
    assert x.nanmean(1)[1].isnan().all()
    assert not (x > 0).any(1)[1].any() and (x > 0).all(1)[1].all()


@pytest.mark.parametrize(
    "name", ["max", "min", "median", "kthvalue", "aminmax", "quantile_0.3_linear", "vector_norm_-inf"]
)
def test_what_nothing_has_not_raises_and_names_the_sample(name: str) -> None:
    (x,) = pack(make([3, 0, 5]))
    with pytest.raises(IndexError, match="sample 1"):
        {**STATISTICS, **COUNTED}[name](x, 1, False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_spread_and_norm_of_half_precision_are_computed_in_single(dtype: torch.dtype) -> None:
    batch = Ragged([(torch.rand(n, 2) + 8).to(dtype) for n in (3000, 5)], "n 2")
    (x,) = pack(batch)
    for fn in (lambda x, d: x.var(d), lambda x, d: x.norm(2, d), lambda x, d: x.logsumexp(d)):
        exact = torch.stack([fn(s.double(), 0) for s in batch.samples])
        torch.testing.assert_close(fn(x, 1).double(), exact, rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_several_quantiles_at_once() -> None:
    q = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    check(lambda x: torch.quantile(x, q, 1), make([3, 1, 5]), batch_dim=1)
    check(lambda x: torch.quantile(x, q, 2, keepdim=True), make([3, 1, 5]), batch_dim=1)


def test_distances_along_features_and_positions() -> None:
    x, y = make([3, 1, 5]), make([3, 1, 5], seed=1)
    check(F.pairwise_distance, x, y)
    check(lambda x, y: F.cosine_similarity(x, y, dim=-1), x, y)
    check(lambda x, y: F.cosine_similarity(x, y), x, y)


@pytest.mark.parametrize("name", ["var", "std"])
@pytest.mark.parametrize("pattern", ["n 4", "n m 4", "4 n"])
def test_spread_of_complex_numbers(pattern: str, name: str) -> None:
    for dim in (*range(1, len(pattern.split()) + 1), (1, 2)):
        x = make([3, 2, 5], pattern)
        check(lambda x, d=dim: getattr(torch.complex(x, x * x), name)(d), x)


def test_a_dtype_that_is_asked_for_is_given() -> None:
    x = make([3, 0, 5], dtype=torch.int64)
    for dtype in (torch.bool, torch.int32, torch.float32):
        check(lambda x, t=dtype: x.prod(1, dtype=t), x, grad=False)
        check(lambda x, t=dtype: x.sum(1, dtype=t), x, grad=False)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x: x.argmax(), "argmax and argmin of a packed tensor need dim="),
        (lambda x: x.max(0), "max: the batch dim is reduced but the ragged axes"),
        (lambda x: x.var(0), "var: the batch dim is reduced but the ragged axes"),
        (lambda x: x.median((1, 2)), "median works along one dim"),
        (lambda x: torch.norm(x, "nuc"), "the norm 'nuc' is one of matrices"),
        (lambda x: torch.kthvalue(x, 3, 1), "kthvalue.*sample 1 has 1 positions, 3 are needed"),
        (lambda x: torch.var(x, 1, out=torch.empty(3)), "no 'out='"),
        (lambda x: x.std(3), "dim 3 is out of range"),
        (lambda x: x.sum((1, 1)), "a dim is named twice"),
        (lambda x: x.long().quantile(0.5, 1), "float"),
        (lambda x: x.long().norm(2, 1), "a norm needs a floating or complex dtype"),
    ],
)
def test_mistakes_are_named(fn: Callable, message: str) -> None:
    (x,) = pack(make([3, 1, 5]))
    with pytest.raises((*ERRORS, TypeError), match=message):
        fn(x)

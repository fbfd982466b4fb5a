"""Statistics over segments and over dims of the payload at once: what reductions compute.

Every function takes ``values`` [cells, *], ``dims`` of the payload that are reduced along (kept with
size 1) and the segments, and gives [rows, *]. Half precision accumulates in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .segments import Segments

HALF = (torch.float16, torch.bfloat16)
INF = float("inf")
Over = Callable[..., Any]


class ValuesIndices(NamedTuple):
    """Values and where they stand: positions inside the sample along the dim."""

    values: Any
    indices: Any


class MinMax(NamedTuple):
    """The smallest and the largest value."""

    min: Any
    max: Any


def wide_of(values: Tensor) -> Tensor:
    """Half precision as float32."""
    return values.float() if values.dtype in HALF else values


def sum_over(values: Tensor, dims: list[int], segments: Segments) -> Tensor:
    """Sums; 0 over nothing."""
    return segments.sum(values.sum(dims, keepdim=True) if dims else values)


def _counts(like: Tensor, values: Tensor, dims: list[int], segments: Segments) -> Tensor:
    """How many entries of ``values`` went into each entry of ``like``."""
    counts = segments.counts().to(like.real.dtype).view(-1, *[1] * (like.dim() - 1))
    for d in dims:
        counts = counts * values.shape[d]
    return counts


def mean_over(values: Tensor, dims: list[int], segments: Segments) -> Tensor:
    """Means; nan over nothing. Raises RuntimeError for integers."""
    if not (values.is_floating_point() or values.is_complex()):
        raise RuntimeError(f"mean needs a floating or complex dtype; got {values.dtype}")
    wide = wide_of(values)
    total = segments.sum(wide.mean(dims, keepdim=True) if dims else wide)
    mean = total / segments.counts().view(-1, *[1] * (total.dim() - 1))
    return mean if mean.dtype == values.dtype else mean.to(values.dtype)


def var_mean_over(
    values: Tensor, dims: list[int], segments: Segments, correction: float
) -> tuple[Tensor, Tensor]:
    """Variances with ``correction``, and means."""
    wide = wide_of(values)
    total = sum_over(wide, dims, segments)
    counts = _counts(total, values, dims, segments)
    mean = total / counts
    centred = wide - segments.expand(mean)
    square = centred.abs().square() if values.is_complex() else centred.square()
    var = sum_over(square, dims, segments) / (counts - correction).clamp_min(0)
    return var.to(values.real.dtype), mean.to(values.dtype)


def var_over(values: Tensor, dims: list[int], segments: Segments, correction: float) -> Tensor:
    """Variances."""
    return var_mean_over(values, dims, segments, correction)[0]


def std_over(values: Tensor, dims: list[int], segments: Segments, correction: float) -> Tensor:
    """Standard deviations; the gradient at 0 is 0."""
    return _root(var_mean_over(wide_of(values), dims, segments, correction)[0]).to(values.real.dtype)


def std_mean_over(
    values: Tensor, dims: list[int], segments: Segments, correction: float
) -> tuple[Tensor, Tensor]:
    """Standard deviations and means."""
    var, mean = var_mean_over(wide_of(values), dims, segments, correction)
    return _root(var).to(values.real.dtype), mean.to(values.dtype)


def _root(values: Tensor, power: float = 0.5) -> Tensor:
    """``values ** power`` whose gradient at 0 is 0."""
    zero = values == 0
    return values.masked_fill(zero, 1).pow(power).masked_fill(zero, 0)


def norm_over(values: Tensor, dims: list[int], segments: Segments, ord: float) -> Tensor:
    """Vector norms of any order."""
    if not (values.is_floating_point() or values.is_complex()):
        raise RuntimeError(f"a norm needs a floating or complex dtype; got {values.dtype}")
    size = values.abs() if ord != 2 or values.is_complex() else values
    if abs(ord) == INF:
        if ord < 0:
            segments.require_filled("the norm of order -inf")
        return segments.peak(size, dims, ord > 0)
    wide = wide_of(size)
    powers = wide if ord == 1 else wide.square() if ord == 2 else _root(wide, ord)
    total = sum_over(powers if ord >= 0 else wide.pow(ord), dims, segments)
    if ord not in (0, 1):
        total = _root(total, 1 / ord) if ord > 0 else total.pow(1 / ord)
    return total.to(size.dtype)


def logsumexp_over(values: Tensor, dims: list[int], segments: Segments) -> Tensor:
    """Logarithms of sums of exponentials, stable for large values."""
    wide = wide_of(values if values.is_floating_point() else values.float())
    top = segments.peak(wide.detach(), dims, True)
    top = top.masked_fill(top.abs() == INF, 0)
    total = sum_over((wide - segments.expand(top)).exp(), dims, segments)
    return (total.log() + top).to(values.dtype if values.is_floating_point() else wide.dtype)


def nansum_over(values: Tensor, dims: list[int], segments: Segments) -> Tensor:
    """Sums of what is not nan."""
    return sum_over(values.masked_fill(values.isnan(), 0), dims, segments)


def nanmean_over(values: Tensor, dims: list[int], segments: Segments) -> Tensor:
    """Means of what is not nan."""
    wide, missing = wide_of(values), values.isnan()
    total = sum_over(wide.masked_fill(missing, 0), dims, segments)
    return (total / sum_over(~missing, dims, segments)).to(values.dtype)


def count_over(values: Tensor, dims: list[int], segments: Segments) -> Tensor:
    """How many entries are not 0."""
    return sum_over(values != 0, dims, segments)


def any_over(values: Tensor, dims: list[int], segments: Segments) -> Tensor:
    """Whether any entry is not 0."""
    found = sum_over(values != 0, dims, segments) > 0
    return found.to(torch.uint8) if values.dtype == torch.uint8 else found


def all_over(values: Tensor, dims: list[int], segments: Segments) -> Tensor:
    """Whether all entries are not 0."""
    found = sum_over(values == 0, dims, segments) == 0
    return found.to(torch.uint8) if values.dtype == torch.uint8 else found


def prod_over(values: Tensor, dims: list[int], segments: Segments) -> Tensor:
    """Along the padded axis: the gradient of a product needs all its factors."""
    return prod_of(segments.padded(values, 1).prod(1), dims)


def prod_of(values: Tensor, dims: list[int]) -> Tensor:
    """Products over dims of the payload alone."""
    for d in dims:
        values = values.prod(d, keepdim=True)
    return values


def peak_over(largest: bool) -> Over:
    """Largest or smallest values; ties share the gradient."""
    name = "amax" if largest else "amin"

    def ragged(values: Tensor, dims: list[int], segments: Segments) -> Tensor:
        segments.require_filled(name)
        return segments.peak(values, dims, largest)

    return ragged


def aminmax_over(values: Tensor, dims: list[int], segments: Segments) -> MinMax:
    """Smallest and largest values."""
    segments.require_filled("aminmax")
    return MinMax(segments.peak(values, dims, False), segments.peak(values, dims, True))


# ------------------------------------------------------------------ one position of each segment


def argpeak_over(name: str, largest: bool) -> Over:
    """Where the first largest or smallest value stands."""

    def ragged(values: Tensor, dims: list[int], segments: Segments) -> Tensor:
        segments.require_filled(name)
        return segments.argpeak(values, largest)

    return ragged


def first_peak_over(name: str, largest: bool) -> Over:
    """Largest or smallest values with the position of the first."""

    def ragged(values: Tensor, dims: list[int], segments: Segments) -> ValuesIndices:
        segments.require_filled(name)
        where = segments.argpeak(values, largest)
        return ValuesIndices(values.gather(0, segments.cells(where)), where)

    return ragged


def rank_over(values: Tensor, segments: Segments, rank: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Values of a rank in each segment, with their positions.

    ``rank(counts, valid)`` -> int [rows, *]: from the cells of each segment and those that are not nan.
    """
    counts = segments.counts().long().view(-1, *[1] * (values.dim() - 1))
    valid = segments.sum(~values.isnan()) if values.is_floating_point() else counts
    chosen = rank(counts, valid).expand(segments.rows, *values.shape[1:])
    cells = segments.sorted(values).gather(0, segments.slots(chosen))
    return ValuesIndices(values.gather(0, cells), segments.positions_at(cells))


def median_over(values: Tensor, dims: list[int], segments: Segments) -> ValuesIndices:
    """Lower medians with their positions; nan where one is."""
    segments.require_filled("median")
    return rank_over(values, segments, lambda n, valid: torch.where(valid < n, n - 1, (n - 1) // 2))


def nanmedian_over(values: Tensor, dims: list[int], segments: Segments) -> ValuesIndices:
    """Lower medians of what is not nan, with their positions."""
    segments.require_filled("nanmedian")
    return rank_over(values, segments, lambda n, valid: ((valid - 1) // 2).clamp_min(0))


def quantile_over(
    values: Tensor, segments: Segments, q: float, ignore_nan: bool, interpolation: str
) -> Tensor:
    """Quantiles, with each of PyTorch's interpolations."""
    valid = segments.sum(~values.isnan())
    counts = segments.counts().view(-1, *[1] * (values.dim() - 1)).expand_as(valid)
    rank = q * ((valid if ignore_nan else counts) - 1).clamp_min(0).to(values.dtype)
    if not ignore_nan:
        rank = torch.where(valid < counts, (counts - 1).to(values.dtype), rank)
    if interpolation in ("lower", "higher", "nearest"):
        rank = {"lower": torch.floor, "higher": torch.ceil, "nearest": torch.round}[interpolation](rank)
    order, low = segments.sorted(values), rank.floor()
    below, above = (
        values.gather(0, order.gather(0, segments.slots(place.long()))) for place in (low, rank.ceil())
    )
    weight = torch.full_like(rank, 0.5) if interpolation == "midpoint" else rank - low
    return below.lerp(above, weight)


# ------------------------------------------------------------------ over dims of the payload alone


def along(function: Any) -> Over:
    """A dense operator along one dim, whose pairs are taken over."""

    def dense(values: Tensor, dims: list[int]) -> Any:
        out = function(values, dims[0], keepdim=True)
        return out if isinstance(out, Tensor) else ValuesIndices(out[0], out[1])

    return dense


def logsumexp_of(values: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    """``torch.logsumexp``, which in a graph for any lengths asks whether there is an entry."""
    if not torch.compiler.is_compiling():
        return torch.logsumexp(values, dims, keepdim=keepdim)
    peak = values.detach().amax(dims, keepdim=True)
    peak = peak.masked_fill(peak.isinf(), 0)
    return (values - peak).exp().sum(dims, keepdim=True).log() + peak


def dense_form(function: Any) -> Over:
    """A reduction of PyTorch over dims of the payload."""

    def dense(values: Tensor, dims: list[int]) -> Tensor:
        return function(values, dims, keepdim=True)

    return dense


def dense_spread(function: Any) -> Over:
    """A variance or deviation of PyTorch over dims of the payload."""

    def dense(values: Tensor, dims: list[int], correction: float) -> Any:
        return function(values, dims, correction=correction, keepdim=True)

    return dense


def norm_of(values: Tensor, dims: list[int], ord: float) -> Tensor:
    """Vector norms over dims of the payload."""
    return torch.linalg.vector_norm(values, ord, dims, keepdim=True)


def count_of(values: Tensor, dims: list[int]) -> Tensor:
    """How many entries are not 0, over dims of the payload."""
    return (values != 0).sum(dims, keepdim=True)


def aminmax_of(values: Tensor, dims: list[int]) -> MinMax:
    """Smallest and largest values over dims of the payload."""
    return MinMax(values.amin(dims, keepdim=True), values.amax(dims, keepdim=True))

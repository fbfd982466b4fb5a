"""Reductions over any set of logical dims.

A ragged axis is consumed: what is left of the grid is the structure of the result, and a result
without a ragged axis is a plain tensor. Reducing the batch needs all axes reduced too.

An operator is a row: how its arguments read, the dense operator for dims of the payload, and its form
over segments of rows. Results may be pairs: values with their positions inside the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import dispatch
from ..segments import Segments
from ..tensor import ROWS, PackedTensor, like
from .pointwise import pointwise
from .shape import drop_static, on_tensor

HALF = (torch.float16, torch.bfloat16)
INF = float("inf")

#: dense(values, dims, *extra): over dims of the payload, kept with size 1.
Dense = Callable[..., Any]
#: ragged(values, dims, segments, *extra): over dims of the payload, kept with size 1, and over segments.
Ragged = Callable[..., Any]
#: signature(*args, **kwargs) -> x, dim, keepdim, dtype, extra.
Arguments = tuple[PackedTensor, Any, bool, Any, tuple[Any, ...]]


class ValuesIndices(NamedTuple):
    """Values and where they stand: positions inside the sample along the dim."""

    values: Any
    indices: Any


class MinMax(NamedTuple):
    """The smallest and the largest value."""

    min: Any
    max: Any


# ------------------------------------------------------------------ the engine


def reduction(
    name: str,
    dense: Dense,
    ragged: Ragged,
    signature: Callable[..., Arguments],
    whole: Callable[[PackedTensor], Tensor] | None = None,
) -> dispatch.Handler:
    """The handler of one operator.

    Args:
        whole: for an operator along one dim, what it does where no dim is given.
    """

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dispatch.refuse_out(name, kwargs)
        x, dim, keepdim, dtype, extra = signature(*args, **kwargs)
        if dtype is not None:
            x = like(x, x.values.to(dtype))
        if whole is not None:
            if dim is None:
                return whole(x)
            if not isinstance(dim, int):
                raise TypeError(f"{name} works along one dim; got {dim}")
        return _reduce(name, x, _places(x, dim), keepdim, dense, ragged, extra)

    return handler


def _reduce(
    name: str,
    x: PackedTensor,
    places: set[int],
    keepdim: bool,
    dense: Dense,
    ragged: Ragged,
    extra: tuple[Any, ...],
) -> Any:
    k = len(x.grid.axes)
    entries = {x.order[d] for d in places}
    dims = [c - k for c in sorted(entries) if c > k]
    reduced = [c - 1 for c in entries if 1 <= c <= k]
    if ROWS in entries or (0 in entries and len(reduced) == k):
        out = dense(x.values, [0, *dims], *extra)
        return _each(lambda values: _without_rows(values, x, places, keepdim), out)
    if 0 in entries:
        left = [x.grid.axes[j].label for j in range(k) if j not in reduced]
        raise ValueError(
            f"{name}: the batch dim is reduced but the ragged axes {left} are not; samples do not line up. "
            "Reduce those dims too, or reduce x.to_padded()"
        )
    if not reduced:
        out = dense(x.values, dims, *extra) if dims else x.values
        return _each(lambda values: _static(values, x, places, keepdim), out)
    kept = tuple(j for j in range(k) if j not in reduced)
    out = ragged(x.values, dims, Segments(x.grid, kept), *extra)
    return _each(lambda values: _rebuild(x, values, kept, places, keepdim), out)


def _each(build: Callable[[Tensor], Any], out: Any) -> Any:
    """Build a result from one payload, or a pair from a pair."""
    if isinstance(out, Tensor):
        return build(out)
    if isinstance(out, (ValuesIndices, MinMax)):
        return type(out)(build(out[0]), build(out[1]))
    return tuple(build(part) for part in out)


def _places(x: PackedTensor, dim: Any) -> set[int]:
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return set(range(len(x.order)))
    places = [x.dim_index(d) for d in ([dim] if isinstance(dim, int) else dim)]
    if len(set(places)) != len(places):
        raise ValueError(f"a dim is named twice in {tuple(dim)}")
    return set(places)


def _static(values: Tensor, x: PackedTensor, places: set[int], keepdim: bool) -> PackedTensor:
    out = like(x, values)
    return out if keepdim else drop_static(out, places)


def _without_rows(values: Tensor, x: PackedTensor, places: set[int], keepdim: bool) -> Tensor:
    """A result over all rows [1, *static with 1s] as a dense tensor in logical order."""
    k = len(x.grid.axes)
    static = [c - k for c in x.order if c > k]
    values = values.permute(0, *static).squeeze(0)
    for d, c in enumerate(x.order):
        if c <= k:
            values = values.unsqueeze(d)
    return values if keepdim else values.squeeze(tuple(places))


def _rebuild(x: PackedTensor, values: Tensor, kept: tuple[int, ...], places: set[int], keepdim: bool) -> Any:
    """The result [rows, *static with 1s] as a packed tensor, or as a dense one if no axis is left."""
    k, order, extra = len(x.grid.axes), [], 0
    for d, c in enumerate(x.order):
        if c == 0:
            order.append(0)
        elif c > k:
            order.append(c - k + len(kept))
        elif d in places:
            extra += 1
            order.append(values.dim() - 1 + len(kept) + extra)
        else:
            order.append(kept.index(c - 1) + 1)
    values = values.view(*values.shape, *[1] * extra)
    if not kept:
        dense = values.permute(order)
        return dense if keepdim else dense.squeeze(tuple(places))
    out = PackedTensor(values, x.grid.sub(kept), tuple(order))
    return out if keepdim else drop_static(out, places)


# ------------------------------------------------------------------ how arguments read


def _plain(
    x: Any = None,
    dim: Any = None,
    keepdim: bool = False,
    *,
    input: Any = None,
    axis: Any = None,
    dtype: Any = None,
) -> Arguments:
    return (input if x is None else x), (axis if dim is None else dim), keepdim, dtype, ()


def _spread(
    x: Any = None,
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    input: Any = None,
    correction: float | None = None,
) -> Arguments:
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    correction = int(unbiased) if correction is None else correction
    return (input if x is None else x), dim, keepdim, None, (correction,)


def _vector_norm(
    x: Any = None,
    ord: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    input: Any = None,
    dtype: Any = None,
) -> Arguments:
    if isinstance(ord, str) and ord != "fro":
        raise ValueError(f"the norm '{ord}' is one of matrices; a packed tensor takes the number of a norm")
    ord = 2.0 if ord in (None, "fro") else float(ord)
    return (input if x is None else x), dim, keepdim, dtype, (ord,)


def _norm(
    input: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, out: Any = None, dtype: Any = None
) -> Arguments:
    return _vector_norm(input, p, dim, keepdim, dtype=dtype)


# ------------------------------------------------------------------ forms over segments


def _wide(values: Tensor) -> Tensor:
    return values.float() if values.dtype in HALF else values


def _sum_over(values: Tensor, dims: list[int], segments: Segments) -> Tensor:
    return segments.sum(values.sum(dims, keepdim=True) if dims else values)


def _counts(like: Tensor, values: Tensor, dims: list[int], segments: Segments) -> Tensor:
    """How many entries of ``values`` went into each entry of ``like``."""
    counts = segments.counts().to(like.real.dtype).view(-1, *[1] * (like.dim() - 1))
    for d in dims:
        counts = counts * values.shape[d]
    return counts


def _mean(values: Tensor, dims: list[int], segments: Segments) -> Tensor:
    if not (values.is_floating_point() or values.is_complex()):
        raise RuntimeError(f"mean needs a floating or complex dtype; got {values.dtype}")
    wide = _wide(values)
    total = segments.sum(wide.mean(dims, keepdim=True) if dims else wide)
    return (total / _counts(total, values, [], segments)).to(values.dtype)


def _var_mean(
    values: Tensor, dims: list[int], segments: Segments, correction: float
) -> tuple[Tensor, Tensor]:
    wide = _wide(values)
    total = _sum_over(wide, dims, segments)
    counts = _counts(total, values, dims, segments)
    mean = total / counts
    centred = wide - segments.expand(mean)
    square = centred.abs().square() if values.is_complex() else centred.square()
    var = _sum_over(square, dims, segments) / (counts - correction).clamp_min(0)
    return var.to(values.real.dtype), mean.to(values.dtype)


def _var(values: Tensor, dims: list[int], segments: Segments, correction: float) -> Tensor:
    return _var_mean(values, dims, segments, correction)[0]


def _std(values: Tensor, dims: list[int], segments: Segments, correction: float) -> Tensor:
    return _root(_var_mean(_wide(values), dims, segments, correction)[0]).to(values.real.dtype)


def _std_mean(
    values: Tensor, dims: list[int], segments: Segments, correction: float
) -> tuple[Tensor, Tensor]:
    var, mean = _var_mean(_wide(values), dims, segments, correction)
    return _root(var).to(values.real.dtype), mean.to(values.dtype)


def _root(values: Tensor, power: float = 0.5) -> Tensor:
    """``values ** power`` whose gradient at 0 is 0."""
    zero = values == 0
    return values.masked_fill(zero, 1).pow(power).masked_fill(zero, 0)


def _norm_over(values: Tensor, dims: list[int], segments: Segments, ord: float) -> Tensor:
    if not (values.is_floating_point() or values.is_complex()):
        raise RuntimeError(f"a norm needs a floating or complex dtype; got {values.dtype}")
    size = values.abs() if ord != 2 or values.is_complex() else values
    if abs(ord) == INF:
        if ord < 0:
            segments.require_filled("the norm of order -inf")
        return segments.peak(size, dims, ord > 0)
    wide = _wide(size)
    powers = wide if ord == 1 else wide.square() if ord == 2 else _root(wide, ord)
    total = _sum_over(powers if ord >= 0 else wide.pow(ord), dims, segments)
    if ord not in (0, 1):
        total = _root(total, 1 / ord) if ord > 0 else total.pow(1 / ord)
    return total.to(size.dtype)


def _logsumexp(values: Tensor, dims: list[int], segments: Segments) -> Tensor:
    wide = _wide(values if values.is_floating_point() else values.float())
    top = segments.peak(wide.detach(), dims, True)
    top = top.masked_fill(top.abs() == INF, 0)
    total = _sum_over((wide - segments.expand(top)).exp(), dims, segments)
    return (total.log() + top).to(values.dtype if values.is_floating_point() else wide.dtype)


def _nansum(values: Tensor, dims: list[int], segments: Segments) -> Tensor:
    return _sum_over(values.masked_fill(values.isnan(), 0), dims, segments)


def _nanmean(values: Tensor, dims: list[int], segments: Segments) -> Tensor:
    wide, missing = _wide(values), values.isnan()
    total = _sum_over(wide.masked_fill(missing, 0), dims, segments)
    return (total / _sum_over(~missing, dims, segments)).to(values.dtype)


def _count_nonzero(values: Tensor, dims: list[int], segments: Segments) -> Tensor:
    return _sum_over(values != 0, dims, segments)


def _any(values: Tensor, dims: list[int], segments: Segments) -> Tensor:
    found = _sum_over(values != 0, dims, segments) > 0
    return found.to(torch.uint8) if values.dtype == torch.uint8 else found


def _all(values: Tensor, dims: list[int], segments: Segments) -> Tensor:
    found = _sum_over(values == 0, dims, segments) == 0
    return found.to(torch.uint8) if values.dtype == torch.uint8 else found


def _prod(values: Tensor, dims: list[int], segments: Segments) -> Tensor:
    """Along the padded axis: the gradient of a product needs all its factors."""
    return _prod_dense(segments.padded(values, 1).prod(1), dims)


def _prod_dense(values: Tensor, dims: list[int]) -> Tensor:
    for d in dims:
        values = values.prod(d, keepdim=True)
    return values


def _peak(largest: bool) -> Ragged:
    name = "amax" if largest else "amin"

    def ragged(values: Tensor, dims: list[int], segments: Segments) -> Tensor:
        segments.require_filled(name)
        return segments.peak(values, dims, largest)

    return ragged


def _aminmax(values: Tensor, dims: list[int], segments: Segments) -> MinMax:
    segments.require_filled("aminmax")
    return MinMax(segments.peak(values, dims, False), segments.peak(values, dims, True))


# ------------------------------------------------------------------ one position of each segment


def _argpeak(name: str, largest: bool) -> Ragged:
    def ragged(values: Tensor, dims: list[int], segments: Segments) -> Tensor:
        segments.require_filled(name)
        return segments.argpeak(values, largest)

    return ragged


def _first_peak(name: str, largest: bool) -> Ragged:
    def ragged(values: Tensor, dims: list[int], segments: Segments) -> ValuesIndices:
        segments.require_filled(name)
        where = segments.argpeak(values, largest)
        return ValuesIndices(values.gather(0, segments.cells(where)), where)

    return ragged


def _sorted_rank(values: Tensor, segments: Segments, rank: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Values of a rank in each segment, with their positions.

    ``rank(counts, valid)`` -> int [rows, *]: from the cells of each segment and those that are not nan.
    """
    counts = segments.counts().long().view(-1, *[1] * (values.dim() - 1))
    valid = segments.sum(~values.isnan()) if values.is_floating_point() else counts
    chosen = rank(counts, valid).expand(segments.rows, *values.shape[1:])
    cells = segments.sorted(values).gather(0, segments.slots(chosen))
    return ValuesIndices(values.gather(0, cells), segments.positions_at(cells))


def _median(values: Tensor, dims: list[int], segments: Segments) -> ValuesIndices:
    segments.require_filled("median")
    return _sorted_rank(values, segments, lambda n, valid: torch.where(valid < n, n - 1, (n - 1) // 2))


def _nanmedian(values: Tensor, dims: list[int], segments: Segments) -> ValuesIndices:
    segments.require_filled("nanmedian")
    return _sorted_rank(values, segments, lambda n, valid: ((valid - 1) // 2).clamp_min(0))


def _along(function: Any) -> Dense:
    """A dense operator along one dim, whose pairs are taken over."""

    def dense(values: Tensor, dims: list[int]) -> Any:
        out = function(values, dims[0], keepdim=True)
        return out if isinstance(out, Tensor) else ValuesIndices(out[0], out[1])

    return dense


def kthvalue(x: PackedTensor, k: int, dim: int = -1, keepdim: bool = False) -> ValuesIndices:
    """The ``k``-th smallest value along one dim, and its position."""

    def ragged(values: Tensor, dims: list[int], segments: Segments) -> ValuesIndices:
        segments.require_filled("kthvalue", k)
        return _sorted_rank(values, segments, lambda n, valid: torch.full_like(n, k - 1))

    def dense(values: Tensor, dims: list[int]) -> ValuesIndices:
        return ValuesIndices(*torch.kthvalue(values, k, dims[0], keepdim=True))

    return _reduce("kthvalue", x, _places(x, dim), keepdim, dense, ragged, ())


# ------------------------------------------------------------------ quantiles


def _quantile(ignore_nan: bool) -> Any:
    function = torch.nanquantile if ignore_nan else torch.quantile

    def rule(
        x: PackedTensor, q: Any, dim: int | None = None, keepdim: bool = False, interpolation: str = "linear"
    ) -> Any:
        if isinstance(q, Tensor) and q.dim():
            return torch.stack([rule(x, float(each), dim, keepdim, interpolation) for each in q])

        def dense(values: Tensor, dims: list[int]) -> Tensor:
            if len(dims) > 1:
                values = values.flatten()
                return function(values, q, interpolation=interpolation).view([1] * x.values.dim())
            return function(values, q, dims[0], True, interpolation=interpolation)

        def ragged(values: Tensor, dims: list[int], segments: Segments) -> Tensor:
            segments.require_filled("quantile")
            return _segment_quantile(values, segments, float(q), ignore_nan, interpolation)

        return _reduce("quantile", x, _places(x, dim), keepdim, dense, ragged, ())

    return rule


def _segment_quantile(
    values: Tensor, segments: Segments, q: float, ignore_nan: bool, interpolation: str
) -> Tensor:
    valid = segments.sum(~values.isnan())
    counts = segments.counts().view(-1, *[1] * (values.dim() - 1)).expand_as(valid)
    rank = q * ((valid if ignore_nan else counts) - 1).clamp_min(0).to(values.dtype)
    if not ignore_nan:
        rank = torch.where(valid < counts, (counts - 1).to(values.dtype), rank)
    if interpolation in ("lower", "higher", "nearest"):
        rank = {"lower": torch.floor, "higher": torch.ceil, "nearest": torch.round}[interpolation](rank)
    order, low = segments.sorted(values), rank.floor()
    below, above = (
        values.gather(0, order.gather(0, segments.slots(place.long())))
        for place in (low, rank.ceil())
    )
    weight = torch.full_like(rank, 0.5) if interpolation == "midpoint" else rank - low
    return below.lerp(above, weight)


# ------------------------------------------------------------------ rows


def _dense(function: Any) -> Dense:
    def dense(values: Tensor, dims: list[int]) -> Tensor:
        return function(values, dims, keepdim=True)

    return dense


def _dense_spread(function: Any) -> Dense:
    def dense(values: Tensor, dims: list[int], correction: float) -> Any:
        return function(values, dims, correction=correction, keepdim=True)

    return dense


def _dense_norm(values: Tensor, dims: list[int], ord: float) -> Tensor:
    return torch.linalg.vector_norm(values, ord, dims, keepdim=True)


def _dense_count(values: Tensor, dims: list[int]) -> Tensor:
    return (values != 0).sum(dims, keepdim=True)


def _dense_aminmax(values: Tensor, dims: list[int]) -> MinMax:
    return MinMax(values.amin(dims, keepdim=True), values.amax(dims, keepdim=True))


def _needs_dim(x: PackedTensor) -> Tensor:
    raise ValueError(
        "argmax and argmin of a packed tensor need dim=: a position among all entries names no sample; "
        "x.to_padded(fill).argmax() counts in the padded shape"
    )


def _of_entries(function: Any) -> Any:
    def whole(x: PackedTensor) -> Tensor:
        return function(x.values)

    return whole


ROWS_OF_DATA: Sequence[tuple[str, Dense, Ragged, Any]] = (
    ("sum", _dense(torch.sum), _sum_over, _plain),
    ("mean", _dense(torch.mean), _mean, _plain),
    ("amax", _dense(torch.amax), _peak(largest=True), _plain),
    ("amin", _dense(torch.amin), _peak(largest=False), _plain),
    ("aminmax", _dense_aminmax, _aminmax, _plain),
    ("prod", _prod_dense, _prod, _plain),
    ("nansum", _dense(torch.nansum), _nansum, _plain),
    ("nanmean", _dense(torch.nanmean), _nanmean, _plain),
    ("any", _dense(torch.any), _any, _plain),
    ("all", _dense(torch.all), _all, _plain),
    ("count_nonzero", _dense_count, _count_nonzero, _plain),
    ("logsumexp", _dense(torch.logsumexp), _logsumexp, _plain),
    ("var", _dense_spread(torch.var), _var, _spread),
    ("std", _dense_spread(torch.std), _std, _spread),
    ("var_mean", _dense_spread(torch.var_mean), _var_mean, _spread),
    ("std_mean", _dense_spread(torch.std_mean), _std_mean, _spread),
    ("norm", _dense_norm, _norm_over, _norm),
)
SELECTIONS: Sequence[tuple[str, Dense, Ragged, Any]] = (
    ("argmax", _along(torch.argmax), _argpeak("argmax", True), _needs_dim),
    ("argmin", _along(torch.argmin), _argpeak("argmin", False), _needs_dim),
    ("max", _along(torch.max), _first_peak("max", True), _of_entries(torch.max)),
    ("min", _along(torch.min), _first_peak("min", False), _of_entries(torch.min)),
    ("median", _along(torch.median), _median, _of_entries(torch.median)),
    ("nanmedian", _along(torch.nanmedian), _nanmedian, _of_entries(torch.nanmedian)),
)


def maximum_or(binary: Any, handler: dispatch.Handler) -> dispatch.Handler:
    """``max`` and ``min``: of two tensors, or along a dim."""

    def either(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        other = args[1] if len(args) == 2 else kwargs.get("other")
        if isinstance(other, (PackedTensor, Tensor)):
            return pointwise(binary, (args[0], other), {})
        return handler(func, args, kwargs)

    return either


def dist(input: Any, other: Any, p: float = 2) -> Tensor:
    """The norm of the difference, over all valid entries."""
    return torch.norm(input - other, p)


for _name, _over_dims, _ragged, _signature in ROWS_OF_DATA:
    dispatch.register("reduction", reduction(_name, _over_dims, _ragged, _signature), _name)
for _name, _over_dims, _ragged, _whole in SELECTIONS:
    _handler = reduction(_name, _over_dims, _ragged, _plain, _whole)
    if _name in ("max", "min"):
        _handler = maximum_or(getattr(torch, f"{_name}imum"), _handler)
    dispatch.register("reduction", _handler, _name)
dispatch.register_function(
    "reduction",
    reduction("vector_norm", _dense_norm, _norm_over, _vector_norm),
    "linalg_vector_norm",
    torch.linalg.vector_norm,
)
dispatch.register("reduction", on_tensor(kthvalue), "kthvalue")
dispatch.register("reduction", on_tensor(_quantile(ignore_nan=False)), "quantile")
dispatch.register("reduction", on_tensor(_quantile(ignore_nan=True)), "nanquantile")
dispatch.register("reduction", on_tensor(dist), "dist")

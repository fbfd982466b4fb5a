"""Reductions over any set of logical dims.

A ragged axis is consumed: what is left of the grid is the structure of the result, and a result
without a ragged axis is a plain tensor. Reducing the batch needs all axes reduced too.

An operator is a row: how its arguments read, the dense operator for dims of the payload, and its form
over segments of rows. Results may be pairs: values with their positions inside the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from .. import statistics as over
from ..segments import Segments
from ..statistics import MinMax, ValuesIndices
from ..tensor import ROWS, PackedTensor, like
from .pointwise import pointwise
from .shape import drop_static, on_operands, on_tensor

#: dense(values, dims, *extra): over dims of the payload, kept with size 1.
Dense = Callable[..., Any]
#: ragged(values, dims, segments, *extra): over dims of the payload, kept with size 1, and over segments.
Ragged = Callable[..., Any]
#: signature(*args, **kwargs) -> x, dim, keepdim, dtype, extra.
Arguments = tuple[PackedTensor, Any, bool, Any, tuple[Any, ...]]


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
        out = _reduce(name, x, _places(x, dim), keepdim, dense, ragged, extra)
        return out if dtype is None or out.dtype == dtype else out.to(dtype)

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
    if isinstance(dim, int):
        return {x.dim_index(dim)}
    places = [x.dim_index(d) for d in dim]
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
    k, order, single, last = len(x.grid.axes), [], set(), values.dim() - 1 + len(kept)
    for d, c in enumerate(x.order):
        if 1 <= c <= k and d in places:
            if keepdim:
                values = values.unsqueeze(-1)
                order.append(last := last + 1)
            continue
        if c > k and d in places:
            single.add(len(order))
        order.append(0 if c == 0 else c - k + len(kept) if c > k else kept.index(c - 1) + 1)
    if kept:
        out = PackedTensor(values, x.grid.sub(kept), tuple(order))
        return drop_static(out, single) if single and not keepdim else out
    if order != list(range(len(order))):
        values = values.permute(order)
    return values.squeeze(tuple(single)) if single and not keepdim else values


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
        raise ValueError(f"the norm '{ord}' is one of matrices: torch.linalg.matrix_norm(x, '{ord}', dims)")
    ord = 2.0 if ord in (None, "fro") else float(ord)
    return (input if x is None else x), dim, keepdim, dtype, (ord,)


def _norm(
    input: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, out: Any = None, dtype: Any = None
) -> Arguments:
    return _vector_norm(input, p, dim, keepdim, dtype=dtype)


# ------------------------------------------------------------------ one position of each segment


def kthvalue(x: PackedTensor, k: int, dim: int = -1, keepdim: bool = False) -> ValuesIndices:
    """The ``k``-th smallest value along one dim, and its position."""

    def ragged(values: Tensor, dims: list[int], segments: Segments) -> ValuesIndices:
        segments.require_filled("kthvalue", k)
        return over.rank_over(values, segments, lambda n, valid: torch.full_like(n, k - 1))

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
            return over.quantile_over(values, segments, float(q), ignore_nan, interpolation)

        return _reduce("quantile", x, _places(x, dim), keepdim, dense, ragged, ())

    return rule


# ------------------------------------------------------------------ rows


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
    ("sum", over.dense_form(torch.sum), over.sum_over, _plain),
    ("mean", over.dense_form(torch.mean), over.mean_over, _plain),
    ("amax", over.dense_form(torch.amax), over.peak_over(largest=True), _plain),
    ("amin", over.dense_form(torch.amin), over.peak_over(largest=False), _plain),
    ("aminmax", over.aminmax_of, over.aminmax_over, _plain),
    ("prod", over.prod_of, over.prod_over, _plain),
    ("nansum", over.dense_form(torch.nansum), over.nansum_over, _plain),
    ("nanmean", over.dense_form(torch.nanmean), over.nanmean_over, _plain),
    ("any", over.dense_form(torch.any), over.any_over, _plain),
    ("all", over.dense_form(torch.all), over.all_over, _plain),
    ("count_nonzero", over.count_of, over.count_over, _plain),
    ("logsumexp", over.dense_form(over.logsumexp_of), over.logsumexp_over, _plain),
    ("var", over.dense_spread(torch.var), over.var_over, _spread),
    ("std", over.dense_spread(torch.std), over.std_over, _spread),
    ("var_mean", over.dense_spread(torch.var_mean), over.var_mean_over, _spread),
    ("std_mean", over.dense_spread(torch.std_mean), over.std_mean_over, _spread),
    ("norm", over.norm_of, over.norm_over, _norm),
)
SELECTIONS: Sequence[tuple[str, Dense, Ragged, Any]] = (
    ("argmax", over.along(torch.argmax), over.argpeak_over("argmax", True), _needs_dim),
    ("argmin", over.along(torch.argmin), over.argpeak_over("argmin", False), _needs_dim),
    ("max", over.along(torch.max), over.first_peak_over("max", True), _of_entries(torch.max)),
    ("min", over.along(torch.min), over.first_peak_over("min", False), _of_entries(torch.min)),
    ("median", over.along(torch.median), over.median_over, _of_entries(torch.median)),
    ("nanmedian", over.along(torch.nanmedian), over.nanmedian_over, _of_entries(torch.nanmedian)),
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


def pairwise_distance(x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Any:
    """The norm of the difference over the last dim."""
    return torch.norm(x1 - x2 + eps, p, -1, keepdim)


def cosine_similarity(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """The cosine of the angle between vectors along one dim."""
    first, second = (x / torch.norm(x, 2, dim, True).clamp_min(eps) for x in (x1, x2))
    return torch.sum(first * second, dim)


for _name, _over_dims, _ragged, _signature in ROWS_OF_DATA:
    dispatch.register("reduction", reduction(_name, _over_dims, _ragged, _signature), _name)
for _name, _over_dims, _ragged, _whole in SELECTIONS:
    _handler = reduction(_name, _over_dims, _ragged, _plain, _whole)
    if _name in ("max", "min"):
        _handler = maximum_or(getattr(torch, f"{_name}imum"), _handler)
    dispatch.register("reduction", _handler, _name)
dispatch.register_function(
    "reduction",
    reduction("vector_norm", over.norm_of, over.norm_over, _vector_norm),
    "linalg_vector_norm",
    torch.linalg.vector_norm,
)
dispatch.register("reduction", on_tensor(kthvalue), "kthvalue")
dispatch.register("reduction", on_tensor(_quantile(ignore_nan=False)), "quantile")
dispatch.register("reduction", on_tensor(_quantile(ignore_nan=True)), "nanquantile")
for _rule in (dist, pairwise_distance, cosine_similarity):
    dispatch.register("reduction", on_operands(_rule), _rule.__name__)

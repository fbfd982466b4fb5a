"""Operators along one dim whose result has a value for every position: scans, sorting, moving, softmax.

On a static dim they are the dense operator on the payload. Along a ragged axis scans run on the axis'
padded envelope, behind whose valid positions nothing is read back; sorting and softmax are work on
segments; flips and rolls are maps of cells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import dispatch
from ..axis import Grid
from ..cells import segments_along, static_dim, unstack
from ..kernels import segment
from ..layout import cells_at, lengths_of, positions_of
from ..statistics import ValuesIndices
from ..tensor import PackedTensor, like
from .shape import dims_of, on_tensor

# ------------------------------------------------------------------ scans


def scan(name: str, fill: float) -> Callable[..., PackedTensor]:
    """A scan along one dim; ``fill`` stands behind the valid positions of a ragged one."""
    function = getattr(torch, name)

    def rule(x: PackedTensor, dim: int, *, dtype: Any = None) -> PackedTensor:
        if dtype is not None:
            x = like(x, x.values.to(dtype))
        segments = segments_along(x, dim)
        if segments is None:
            return like(x, function(x.values, static_dim(x, dim, name)))
        return like(x, segments.unpadded(function(segments.padded(x.values, fill), 1)))

    return rule


def running_peak(largest: bool) -> Callable[..., ValuesIndices]:
    """``cummax`` and ``cummin``: the largest or smallest so far, and where it stands."""
    name = "cummax" if largest else "cummin"

    def rule(x: PackedTensor, dim: int) -> ValuesIndices:
        segments = segments_along(x, dim)
        if segments is None:
            place = static_dim(x, dim, name)
            where = segment.running_peak(x.values.detach(), place, largest)
            return _wrap(x, (x.values.gather(place, where), where))
        padded = segments.padded(x.values, 0)
        where = segment.running_peak(padded.detach(), 1, largest)
        return _wrap(x, [segments.unpadded(part) for part in (padded.gather(1, where), where)])

    return rule


def _wrap(x: PackedTensor, pair: Any) -> ValuesIndices:
    return ValuesIndices(like(x, pair[0]), like(x, pair[1]))


# ------------------------------------------------------------------ sorting


def sort(x: PackedTensor, dim: int = -1, descending: bool = False, stable: bool = False) -> ValuesIndices:
    """Values in order along one dim, and the positions inside the sample that they came from."""
    segments = segments_along(x, dim)
    if segments is None:
        place = static_dim(x, dim, "sort")
        return _wrap(x, torch.sort(x.values, dim=place, descending=descending, stable=stable))
    cells = segments.in_place_of(segments.sorted(x.values, descending))
    return _wrap(x, (x.values.gather(0, cells), segments.positions_at(cells)))


def argsort(x: PackedTensor, dim: int = -1, descending: bool = False, stable: bool = False) -> PackedTensor:
    """The positions of :func:`sort`."""
    return sort(x, dim, descending, stable).indices


def topk(x: PackedTensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> ValuesIndices:
    """The ``k`` largest or smallest values along one dim, which becomes static.

    Raises:
        IndexError: a sample has fewer than ``k`` positions; names it.
    """
    segments = segments_along(x, dim)
    if segments is None:
        return _wrap(x, torch.topk(x.values, k, static_dim(x, dim, "topk"), largest, sorted))
    segments.require_filled(f"topk of {k}", k)
    picks = torch.arange(k, device=x.device).expand(segments.rows, k)
    tail = x.values.shape[1:]
    slots = segments.slots(picks).flatten()
    cells = segments.sorted(x.values, largest).index_select(0, slots)
    parts = [
        unstack(x, x.dim_index(dim), part.view(segments.rows, k, *tail))
        for part in (x.values.gather(0, cells), segments.positions_at(cells))
    ]
    return ValuesIndices(*parts)


# ------------------------------------------------------------------ moving


def flip(x: PackedTensor, *places: Any, dims: Any = None) -> PackedTensor:
    """Dims in reverse, each sample's ragged dim by itself."""
    for dim in dims_of(places if dims is None else (dims,)):
        segments = segments_along(x, dim)
        if segments is None:
            x = like(x, x.values.flip(static_dim(x, dim, "flip")))
        else:
            index = _turned(x.grid, segments.axis)
            x = like(x, segment.reorder_rows(x.values, index, index))
    return x


def fliplr(x: PackedTensor) -> PackedTensor:
    """Dim 1 in reverse."""
    return flip(x, 1)


def flipud(x: PackedTensor) -> PackedTensor:
    """Dim 0 in reverse, which then is no batch."""
    return flip(x, 0)


def _turned(grid: Grid, k: int) -> Tensor:
    def build() -> Tensor:
        last = lengths_of(grid.axes[k]).index_select(0, grid.sample_ids) - 1
        return cells_at(grid, grid, k, last - positions_of(grid, k)).to(torch.int32)

    return grid.part.map(f"flip {k}", build)


def roll(x: PackedTensor, shifts: Any, dims: Any = None) -> PackedTensor:
    """Dims rolled round; each sample's ragged dim within its own length."""
    if dims is None or (isinstance(dims, (tuple, list)) and not dims):
        raise NotImplementedError("roll of a packed tensor needs dims=: samples do not roll into each other")
    for shift, dim in zip(*([n] if isinstance(n, int) else n for n in (shifts, dims)), strict=True):
        segments = segments_along(x, dim)
        if segments is None:
            x = like(x, x.values.roll(shift, static_dim(x, dim, "roll")))
        else:
            maps = _rolled(x.grid, segments.axis, shift), _rolled(x.grid, segments.axis, -shift)
            x = like(x, segment.reorder_rows(x.values, *maps))
    return x


def _rolled(grid: Grid, k: int, shift: int) -> Tensor:
    def build() -> Tensor:
        lengths = lengths_of(grid.axes[k]).index_select(0, grid.sample_ids)
        return cells_at(grid, grid, k, (positions_of(grid, k) - shift) % lengths).to(torch.int32)

    return grid.part.map(f"roll {k} {shift}", build)


def rot90(x: PackedTensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> PackedTensor:
    """A plane of dims turned by ``k`` quarters."""
    a, b = dims
    if k % 4 == 2:
        return flip(x, (a, b))
    if k % 4 == 1:
        return flip(x, b).transpose(a, b)
    return flip(x.transpose(a, b), b) if k % 4 else x


def diff(x: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Any:
    """Differences of neighbours along one dim, ``n`` times."""
    if n < 0:
        raise ValueError(f"diff: n must not be negative; got {n}")
    joined: list[Any] = [part for part in (prepend, x, append) if part is not None]
    x = torch.cat(joined, dim) if len(joined) > 1 else x
    before = (slice(None),) * x.dim_index(dim)
    for _ in range(n):
        after, start = x[(*before, slice(1, None))], x[(*before, slice(None, -1))]
        x = after ^ start if x.dtype == torch.bool else after - start
    return x


def trapezoid(total: str) -> Callable[..., Any]:
    """``trapezoid`` and its running form: areas between neighbours along one dim, added by ``total``."""

    def rule(y: Any, x: Any = None, *, dx: float = 1, dim: int = -1) -> Any:
        if torch.bool in (y.dtype, getattr(x, "dtype", None)):
            raise RuntimeError("trapezoid: areas are of numbers, not of truth values; convert with .float()")
        before = (slice(None),) * y.dim_index(dim)
        areas = (y[(*before, slice(1, None))] + y[(*before, slice(None, -1))]) / 2
        if x is None:
            return getattr(areas * dx, total)(dim)
        if x.dim() == 1:
            x = x.view(-1, *[1] * (len(y.order) - 1 - len(before)))
        return getattr(areas * torch.diff(x, dim=len(before) - len(y.order)), total)(dim)

    return rule


# ------------------------------------------------------------------ softmax


def softmax(name: str, logarithm: bool, sign: int = 1) -> Callable[..., Any]:
    """Softmax along one dim, or its logarithm, or that of the negative."""
    function = torch.log_softmax if logarithm else torch.softmax

    def rule(
        x: PackedTensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
    ) -> PackedTensor:
        if dim is None:
            raise ValueError(f"{name} on a packed tensor needs an explicit dim=")
        values = x.values if sign > 0 else -x.values
        segments = segments_along(x, dim)
        if segments is None:
            return like(x, function(values, static_dim(x, dim, name), dtype=dtype))
        return like(x, segments.softmax(values if dtype is None else values.to(dtype), logarithm))

    return rule


def normalize(
    x: PackedTensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None
) -> PackedTensor:
    """``x`` over its norm along one dim."""
    if segments_along(x, dim) is None:
        return like(x, F.normalize(x.values, p, static_dim(x, dim, "normalize"), eps))
    return x / torch.linalg.vector_norm(x, p, dim, keepdim=True).clamp_min(eps)


def gumbel_softmax(logits: Any, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1) -> Any:
    """Softmax of logits with Gumbel noise; ``hard`` gives one-hot values with the soft gradient."""
    noise = -torch.empty_like(logits.values).exponential_().log()
    soft = ((logits + like(logits, noise)) / tau).softmax(dim)
    if not hard:
        return soft
    positions = like(soft, torch.ones_like(soft.values, dtype=torch.int64)).cumsum(dim) - 1
    chosen = (positions == soft.argmax(dim, keepdim=True)).to(soft.dtype)
    return chosen - soft.detach() + soft


for _name, _fill in {"cumsum": 0, "cumprod": 1, "logcumsumexp": 0}.items():
    dispatch.register("scan", on_tensor(scan(_name, _fill)), _name)
for _rule, _names in {
    running_peak(largest=True): "cummax",
    running_peak(largest=False): "cummin",
    sort: "sort",
    argsort: "argsort",
    topk: "topk",
    flip: "flip",
    fliplr: "fliplr",
    flipud: "flipud",
    roll: "roll",
    rot90: "rot90",
    diff: "diff",
    trapezoid("sum"): "trapezoid trapz",
    trapezoid("cumsum"): "cumulative_trapezoid",
    softmax("softmax", logarithm=False): "softmax",
    softmax("log_softmax", logarithm=True): "log_softmax",
    softmax("softmin", logarithm=False, sign=-1): "softmin",
    normalize: "normalize",
    gumbel_softmax: "gumbel_softmax",
}.items():
    dispatch.register("scan", on_tensor(_rule), _names)

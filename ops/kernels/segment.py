"""Segment kernels: many rows to one and back.

``sum_rows`` and ``expand_rows`` are each other's gradient. A reduction reads the rows of a grid in an
order in which the rows of one result are adjacent: ``order`` (None where they already are), cut by
``splits`` [rows + 1]; ``index`` [cells] names the result row of every cell.

Floating sums run through ``embedding_bag``, whose forward was the fastest of five ways measured on a
CPU (0.10 ms for 20 000 x 128, index_add 0.19, padded 3.2), is deterministic, and accumulates half
precision in float32. ``torch.segment_reduce`` is never used: it accumulates bfloat16 in bfloat16.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import structure
from .define import define, recorded

#: Softmax over segments on a CPU: padded, a batch of so many entries is small; a segment of so many is long.
_SMALL, _LONG = 8192, 2048
_SUM, _ACCUMULATED_AS_IS = 0, (torch.float32, torch.float64)
Order = Tensor | None


def _sum_rows(values: Tensor, index: Order, order: Order, splits: Tensor, rows: int) -> Tensor:
    tail = values.shape[1:]
    flat = values.reshape(values.shape[0], tail.numel()) if len(tail) != 1 else values
    if index is not None and not values.is_floating_point():
        dtype = values.dtype if values.is_complex() else torch.int64
        out = values.new_zeros((rows, flat.shape[1]), dtype=dtype)
        return out.index_add_(0, index, flat.to(dtype)).view(rows, *tail)
    if flat.shape[1] == 0 or flat.shape[0] == 0:
        return values.new_zeros((rows, *tail))
    if order is None:
        order = torch.arange(flat.shape[0], dtype=splits.dtype, device=splits.device)
    wide = flat if flat.dtype in _ACCUMULATED_AS_IS else flat.float()
    out = torch.embedding_bag(wide, order, splits, False, _SUM, False, None, True)[0]
    out = out if wide is flat else out.to(flat.dtype)
    return out if len(tail) == 1 else out.view(rows, *tail)


def _sum_rows_fake(values: Tensor, index: Order, order: Order, splits: Tensor, rows: int) -> Tensor:
    inexact = values.dtype.is_floating_point or values.dtype.is_complex
    return values.new_empty((rows, *values.shape[1:]), dtype=values.dtype if inexact else torch.int64)


def _sum_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, index, order, splits, _ = inputs
    ctx.save_for_backward(index, order, splits)


def _sum_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    index, order, splits = ctx.saved_tensors
    return expand_rows(grad, index, order, splits), None, None, None, None


def _expand_rows(values: Tensor, index: Tensor, order: Tensor | None, splits: Tensor) -> Tensor:
    return values.index_select(0, index)


def _expand_rows_fake(values: Tensor, index: Tensor, order: Tensor | None, splits: Tensor) -> Tensor:
    return values.new_empty((index.shape[0], *values.shape[1:]))


def _expand_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, index, order, splits = inputs
    ctx.save_for_backward(index, order, splits)
    ctx.rows = values.shape[0]


def _expand_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    index, order, splits = ctx.saved_tensors
    return sum_rows(grad, index, order, splits, ctx.rows), None, None, None


_sum_operator = define(
    "sum_rows(Tensor values, Tensor? index, Tensor? order, Tensor splits, SymInt rows) -> Tensor",
    _sum_rows,
    _sum_rows_fake,
    setup=_sum_setup,
    backward=_sum_backward,
)


def reads_index(values: Tensor) -> bool:
    """Whether a statistic of these values, or its gradient, needs the row of every cell at hand."""
    return recorded(values) or not values.is_floating_point() or torch.compiler.is_compiling()


def sum_rows(values: Tensor, index: Order, order: Order, splits: Tensor, rows: int) -> Tensor:
    """Sums of segments.

    Args:
        values: [cells, *].
        index: int32 [cells], the row of every cell; may be None unless :func:`reads_index`.
        order, splits: int32 [cells] or None, [rows + 1].

    Returns:
        [rows, *]; 0 for an empty segment; integers become int64.
    """
    if (
        torch.compiler.is_compiling()
        and index is not None
        and values.is_floating_point()
        and _scatters_in_order(values.device.type)
    ):
        wide = values if values.dtype in _ACCUMULATED_AS_IS else values.float()
        return wide.new_zeros((rows, *values.shape[1:])).index_add(0, index, wide).to(values.dtype)
    return _sum_operator(values, index, order, splits, rows)


@torch.compiler.assume_constant_result
def _scatters_in_order(device: str) -> bool:
    """Whether a compiler's ``index_add`` is a plain loop, which fuses with what makes the values.

    With several threads it adds atomically: several times slower than the operator, in any order.
    """
    return device == "cpu" and torch.get_num_threads() == 1


#: values [rows, *], index [cells] -> [cells, *]: every cell gets the row that ``index`` names.
expand_rows = define(
    "expand_rows(Tensor values, Tensor index, Tensor? order, Tensor splits) -> Tensor",
    _expand_rows,
    _expand_rows_fake,
    setup=_expand_setup,
    backward=_expand_backward,
    transparent=True,
)


def _row_of_cells(splits: Tensor, cells: int) -> Tensor:
    """The row of every cell where rows are adjacent: int64 [cells]."""
    if splits.device.type != "cpu":
        return structure.sample_ids(splits, cells).long()
    ends = splits.numpy()
    return torch.from_numpy(np.arange(len(ends) - 1).repeat(ends[1:] - ends[:-1]))


def _peak_rows(
    values: Tensor,
    index: Order,
    order: Tensor | None,
    splits: Tensor,
    rows: int,
    dims: list[int],
    largest: bool,
) -> Tensor:
    name = "amax" if largest else "amin"
    if dims:
        values = getattr(values, name)(dims, keepdim=True)
    if values.dtype == torch.bool:
        return _peak_rows(values.to(torch.uint8), index, order, splits, rows, [], largest).to(torch.bool)
    rows_of = _row_of_cells(splits, values.shape[0]) if index is None else index.long()
    where = rows_of.view(-1, *[1] * (values.dim() - 1)).expand_as(values)
    out = values.new_zeros((rows, *values.shape[1:]))
    return out.scatter_reduce_(0, where, values, name, include_self=False)


def _peak_rows_fake(values: Tensor, *rest: Any) -> Tensor:
    tail = [1 if d in rest[4] else size for d, size in enumerate(values.shape)][1:]
    return values.new_empty((rest[3], *tail))


def _peak_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, index, order, splits, _, dims, _ = inputs
    ctx.save_for_backward(values, index, order, splits, output)
    ctx.rows, ctx.dims = output.shape[0], list(dims)


def _peak_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    values, index, order, splits, output = ctx.saved_tensors
    hit = (values == expand_rows(output, index, order, splits)).to(grad.dtype)
    ties = sum_rows(hit.sum(ctx.dims, keepdim=True) if ctx.dims else hit, index, order, splits, ctx.rows)
    share = expand_rows(grad / ties, index, order, splits) * hit
    return share, None, None, None, None, None, None


#: Largest (or smallest) value of each segment and over ``dims`` (kept with size 1): [cells, *] ->
#: [rows, *]; ties share the gradient, as in dense ``amax``. The caller makes sure no segment is empty.
peak_rows = define(
    "peak_rows(Tensor values, Tensor? index, Tensor? order, Tensor splits, SymInt rows, int[] dims, "
    "bool largest) -> Tensor",
    _peak_rows,
    _peak_rows_fake,
    setup=_peak_setup,
    backward=_peak_backward,
)


def _reorder_rows(values: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    return values.index_select(0, index)


def _reorder_rows_fake(values: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    return values.new_empty((index.shape[0], *values.shape[1:]))


def _reorder_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _reorder_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    index, inverse = ctx.saved_tensors
    return reorder_rows(grad, inverse, index), None, None


#: Rows in another order: values [n, *], a permutation int32 [n] and its inverse, by which the gradient
#: is read back instead of added up.
reorder_rows = define(
    "reorder_rows(Tensor values, Tensor index, Tensor inverse) -> Tensor",
    _reorder_rows,
    _reorder_rows_fake,
    setup=_reorder_setup,
    backward=_reorder_backward,
    transparent=True,
)


def _softmax_rows(
    values: Tensor, index: Order, order: Order, splits: Tensor, rows: int, logarithm: bool
) -> Tensor:
    if order is None and values.device.type == "cpu":
        size, ends = values.numel(), splits.numpy()
        if size >= _LONG * rows:
            return _softmax_each(values, ends, logarithm)
        longest = max((ends[1:] - ends[:-1]).tolist(), default=0) if size <= _SMALL else size
        if rows * longest * values.shape[1:].numel() <= _SMALL:
            return _softmax_padded(values, ends, longest, logarithm)
    if index is None:
        index = _row_of_cells(splits, values.shape[0])
    wide = values if values.dtype in _ACCUMULATED_AS_IS else values.float()
    shifted = wide - _peak_rows(wide, index, order, splits, rows, [], True).index_select(0, index)
    powers = shifted.exp() if logarithm else shifted.exp_()
    total = _sum_rows(powers, index, order, splits, rows)
    if logarithm:
        out = shifted.sub_(total.log_().index_select(0, index))
    else:
        out = powers.div_(total.index_select(0, index))
    return out if wide is values else out.to(values.dtype)


def _softmax_padded(values: Tensor, splits: np.ndarray, longest: int, logarithm: bool) -> Tensor:
    """Few entries: three calls, on segments padded with -inf."""
    rows, tail, begin = len(splits) - 1, values.shape[1:], splits[:-1]
    padding = np.arange(rows) * longest - begin  # that stands before each segment
    index = torch.from_numpy(np.arange(len(values)) + padding.repeat(splits[1:] - begin))
    padded = values.new_full((rows * longest, *tail), -math.inf).index_copy_(0, index, values)
    function = torch.log_softmax if logarithm else torch.softmax
    return function(padded.view(rows, longest, *tail), 1).view(-1, *tail).index_select(0, index)


def _softmax_each(values: Tensor, splits: np.ndarray, logarithm: bool) -> Tensor:
    """Long segments: one after the other, each in the cache (2.2 ms against 18 for 15 000 x 256)."""
    function = torch.log_softmax if logarithm else torch.softmax
    out, sizes = torch.empty_like(values), (splits[1:] - splits[:-1]).tolist()
    for part, result in zip(values.split(sizes), out.split(sizes)):
        function(part, 0, out=result)
    return out


def _softmax_rows_fake(
    values: Tensor, index: Order, order: Order, splits: Tensor, rows: int, logarithm: bool
) -> Tensor:
    return values.new_empty(values.shape)


def _softmax_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, index, order, splits, ctx.rows, ctx.logarithm = inputs
    ctx.save_for_backward(output, index, order, splits)


def _softmax_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    output, index, order, splits = ctx.saved_tensors
    wide = grad if grad.dtype in _ACCUMULATED_AS_IS else grad.float()
    weights = output.to(wide.dtype).exp() if ctx.logarithm else output.to(wide.dtype)
    weighed = wide if ctx.logarithm else wide * weights
    total = expand_rows(sum_rows(weighed, index, order, splits, ctx.rows), index, order, splits)
    share = wide - weights * total if ctx.logarithm else weights * (wide - total)
    return share.to(grad.dtype), None, None, None, None, None


#: Softmax, or its logarithm, of the cells of each segment: [cells, *] -> [cells, *]; half precision is
#: computed in float32.
softmax_rows = define(
    "softmax_rows(Tensor values, Tensor? index, Tensor? order, Tensor splits, SymInt rows, bool logarithm)"
    " -> Tensor",
    _softmax_rows,
    _softmax_rows_fake,
    setup=_softmax_setup,
    backward=_softmax_backward,
)


def _argpeak_rows(
    values: Tensor, index: Tensor, order: Order, splits: Tensor, positions: Tensor, rows: int, largest: bool
) -> Tensor:
    hit = values == _peak_rows(values, index, order, splits, rows, [], largest).index_select(0, index)
    if values.is_floating_point():
        hit |= values.isnan()
    far = torch.iinfo(torch.int64).max
    where = positions.long().view(-1, *[1] * (values.dim() - 1)).expand_as(values).masked_fill(~hit, far)
    return _peak_rows(where, index, order, splits, rows, [], False)


def _argpeak_rows_fake(values: Tensor, *rest: Any) -> Tensor:
    return values.new_empty((rest[4], *values.shape[1:]), dtype=torch.int64)


#: Where the first largest (or smallest) value of each segment is, in terms of ``positions`` [cells]:
#: [cells, *] -> int64 [rows, *]. The caller makes sure no segment is empty.
argpeak_rows = define(
    "argpeak_rows(Tensor values, Tensor index, Tensor? order, Tensor splits, Tensor positions, "
    "SymInt rows, bool largest) -> Tensor",
    _argpeak_rows,
    _argpeak_rows_fake,
)


def _sort_rows(values: Tensor, index: Tensor, descending: bool) -> Tensor:
    by_value = values.sort(dim=0, stable=True, descending=descending).indices
    segments = index.index_select(0, by_value.flatten()).view_as(by_value)
    return by_value.gather(0, segments.sort(dim=0, stable=True).indices)


def _sort_rows_fake(values: Tensor, index: Tensor, descending: bool) -> Tensor:
    return values.new_empty(values.shape, dtype=torch.int64)


#: The cells of each segment by value, stable, segment after segment: [cells, *] -> int64 [cells, *].
sort_rows = define(
    "sort_rows(Tensor values, Tensor index, bool descending) -> Tensor", _sort_rows, _sort_rows_fake
)


def _running_peak(values: Tensor, dim: int, largest: bool) -> Tensor:
    return (torch.cummax if largest else torch.cummin)(values, dim).indices


def _running_peak_fake(values: Tensor, dim: int, largest: bool) -> Tensor:
    return values.new_empty(values.shape, dtype=torch.int64)


#: Where the largest (or smallest) value so far along a dim stands: [*] -> int64 [*].
running_peak = define(
    "running_peak(Tensor values, int dim, bool largest) -> Tensor", _running_peak, _running_peak_fake
)

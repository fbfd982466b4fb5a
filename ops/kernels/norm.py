"""Normalisation of segments: zero mean and unit variance over the cells of each sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .define import define
from .segment import Order, expand_rows, sum_rows
from .structure import counts

_ACCUMULATED_AS_IS = (torch.float32, torch.float64)


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype in _ACCUMULATED_AS_IS else values.float()


def entries(splits: Tensor, rows: int, values: Tensor) -> Tensor:
    """Entries of each segment of ``values`` [cells, groups, width] in one group, at least 1: [rows, 1]."""
    dtype = values.dtype if values.dtype in _ACCUMULATED_AS_IS else torch.float32
    return (counts(splits, rows).to(dtype) * values.shape[2]).clamp_min(1).view(-1, 1)


def _total(values: Tensor, maps: tuple[Tensor, Order, Tensor], rows: int) -> Tensor:
    """Sums over each segment's groups: [cells, groups, width] -> [rows, groups]. Whole rows first: a sum over
    the few features of a group is slow."""
    return sum_rows(values, *maps, rows).sum(2)


def _spread(statistic: Tensor, maps: tuple[Tensor, Order, Tensor], values: Tensor) -> Tensor:
    """A statistic [rows, groups] for each entry of ``values``, written out: arithmetic then is vectorised."""
    wide = statistic.unsqueeze(2).expand(-1, -1, values.shape[2]).flatten(1)
    return expand_rows(wide, *maps).view(values.shape)


def _normalize_rows(
    values: Tensor, index: Tensor, order: Order, splits: Tensor, rows: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    wide, number, maps = _wide(values), entries(splits, rows, values), (index, order, splits)
    mean = _total(wide, maps, rows) / number
    centred = _spread(mean, maps, values)
    torch.sub(wide, centred, out=centred)
    var = _total(centred.square(), maps, rows) / number
    return centred.mul_(_spread((var + eps).rsqrt_(), maps, values)), mean, var


def _normalize_rows_fake(
    values: Tensor, index: Tensor, order: Order, splits: Tensor, rows: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = values.dtype if values.dtype in _ACCUMULATED_AS_IS else torch.float32
    statistics = [values.new_empty((rows, values.shape[1]), dtype=dtype) for _ in range(2)]
    return values.new_empty(values.shape, dtype=dtype), statistics[0], statistics[1]


def _normalize_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    values, index, order, splits, ctx.rows, ctx.eps = inputs
    ctx.save_for_backward(values, index, order, splits, output[1], output[2])


def _normalize_backward(
    ctx: Any, grad: Tensor, grad_mean: Tensor | None, grad_var: Tensor | None
) -> tuple[Tensor | None, ...]:
    """``rstd * (g - mean(g) - y * mean(g * y))``, and what the statistics themselves pass on: a line in the
    gradient and in the values, whose coefficients each group has. It is added up in one buffer, since fresh
    memory costs more than the arithmetic."""
    values, index, order, splits, mean, var = ctx.saved_tensors
    maps, wide = (index, order, splits), _wide(values)
    number, rstd = entries(splits, ctx.rows, values), (var + ctx.eps).rsqrt()
    plain = _total(grad, maps, ctx.rows)
    slope = rstd.pow(3) * (mean * plain - _total(grad * wide, maps, ctx.rows))
    if grad_var is not None:
        slope = slope + 2 * grad_var
    shift = -rstd * plain - mean * slope
    if grad_mean is not None:
        shift = shift + grad_mean
    scale, shift, slope = (_spread(part, maps, values) for part in (rstd, shift / number, slope / number))
    return shift.addcmul_(grad, scale).addcmul_(wide, slope).to(values.dtype), None, None, None, None, None


#: Each group of each segment normalised: values [cells, groups, width] -> the same, with its mean and its
#: (biased) variance [rows, groups]. Half precision is computed, and returned, in float32.
normalize_rows = define(
    "normalize_rows(Tensor values, Tensor index, Tensor? order, Tensor splits, SymInt rows, float eps)"
    " -> (Tensor, Tensor, Tensor)",
    _normalize_rows,
    _normalize_rows_fake,
    setup=_normalize_setup,
    backward=_normalize_backward,
)

"""What normalisation computes on payloads [cells, C, *]: formulas, running statistics, scale and shift."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .kernels import norm
from .segments import Segments
from .statistics import wide_of


def entries_of_channel(values: Tensor) -> int:
    """Entries of one channel in one cell of [cells, C, *]."""
    return values.shape[2:].numel()


def batch_norm_of(
    values: Tensor,
    running: tuple[Any, Any],
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    """``F.batch_norm`` for a graph, in which PyTorch's kernels fail where there are no rows."""
    wide = wide_of(values)
    shape = (-1, *[1] * (values.dim() - 2))
    mean, var = running
    if training:
        number, dims = (
            wide.new_full((), values.shape[0] * entries_of_channel(values)),
            [0, *range(2, values.dim())],
        )
        mean = wide.sum(dims) / number.clamp_min(1)
        var = (wide - mean.view(shape)).square().sum(dims) / number.clamp_min(1)
        move(running, (mean, var * (number / (number - 1).clamp_min(1))), number > 0, momentum)
    out = (wide - mean.view(shape)) * (var + eps).rsqrt().view(shape)
    return affine("batch_norm", out, weight, bias).to(values.dtype)


@torch.no_grad()
def move(running: Any, found: Any, some: Tensor, momentum: float) -> None:
    """Move running statistics towards those found, where there were ``some`` entries."""
    for target, statistic in zip(running, found):
        if target is not None:
            target.copy_(torch.where(some, target + momentum * (statistic - target), target))


def affine(name: str, values: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Each channel scaled and shifted; raises ValueError where a parameter has another size."""
    for what, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.shape != values.shape[1:2]:
            raise ValueError(
                f"{name}: a {what} of shape {tuple(parameter.shape)} for {values.shape[1]} channels"
            )
    shape = (-1, *[1] * (values.dim() - 2))
    if weight is not None and bias is not None:
        return torch.addcmul(bias.view(shape), values, weight.view(shape))
    values = values if weight is None else values * weight.view(shape)
    return values if bias is None else values + bias.view(shape)


@torch.no_grad()
def over_samples(segments: Segments, values: Tensor, mean: Tensor, var: Tensor) -> tuple[Any, Tensor]:
    """The samples' mean and unbiased variance, averaged over those that are not empty; are there any."""
    number = norm.entries(segments.maps[2], segments.rows, values)
    filled = (segments.counts() > 0).view(-1, 1).to(number.dtype)
    each = mean, var * number / (number - 1).clamp_min(1)
    return [(statistic * filled).sum(0) / filled.sum() for statistic in each], filled.sum() > 0

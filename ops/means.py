"""The mean in which every sample counts alike."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import statistics as over
from .align import align
from .segments import Segments
from .tensor import is_packed


def per_sample_mean(values: Any, mask: Any = None, *, empty: float | None = math.nan) -> Tensor:
    """The mean over samples of each sample's own mean; ``values.mean()`` is the mean over positions.

    Every sample counts alike, however long: ``per_sample_mean(F.cross_entropy(x, y, reduction="none"))``.

    Args:
        values: packed, e.g. an unreduced loss; rows flattened from samples, too.
        mask: bool, of a shape that broadcasts: which entries count, e.g. ``y != ignore_index``.
        empty: what the mean of a sample is in which no entry counts; None leaves such samples out.

    Returns:
        A number.

    Raises:
        TypeError: ``values`` is not packed, or ``mask`` is not bool.
    """
    if not is_packed(values):
        raise TypeError("per_sample_mean: values must be packed; a dense loss has equal samples: loss.mean()")
    if mask is not None and getattr(mask, "dtype", None) != torch.bool:
        raise TypeError(f"per_sample_mean: the mask must be a bool tensor; got {mask!r:.60}")
    (entries, counted), layout = align("per_sample_mean", [values, mask])
    segments, dims = Segments(layout.grid, ()), list(range(1, entries.dim()))
    wide = over.wide_of(entries)
    if mask is None:
        counted = torch.ones_like(wide, dtype=torch.bool)
    wide, counted = torch.broadcast_tensors(wide, counted)
    total = over.sum_over(wide.masked_fill(~counted, 0), dims, segments).flatten()
    number = over.sum_over(counted, dims, segments).flatten()
    means = total / number.clamp_min(1)
    if empty is None:
        return (means.sum() / (number > 0).sum()).to(entries.dtype)
    return means.masked_fill(number == 0, empty).mean().to(entries.dtype)

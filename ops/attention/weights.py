"""Softmax weights themselves, for those who want to look at them."""

from __future__ import annotations

from torch import Tensor

from ..axis import Grid
from ..kernels import attention as kernels
from .call import Call


def attention_weights(call: Call, grid: Grid) -> Tensor:
    """The weights of a settled call, after dropout: [cells of ``grid`` (q, k), H], with gradients."""
    lengths = (call.q.lengths, call.k.lengths)
    return kernels.attention_weights(call.query, call.key, call.bias, grid.cells, *lengths, *call.options)

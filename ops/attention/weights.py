"""Softmax weights themselves, for those who want to look at them."""

from __future__ import annotations

from torch import Tensor

from ..axis import Grid
from ..kernels import attention as kernels
from ..tensor import PackedTensor
from .call import Call


def attention_weights(call: Call, grid: Grid) -> Tensor:
    """The weights of a settled call, after dropout: [cells of ``grid`` (q, k), H], with gradients."""
    lengths = (call.q.lengths, call.k.lengths)
    return kernels.attention_weights(call.query, call.key, call.bias, grid.cells, *lengths, *call.options)


def packed_weights(call: Call, average: bool) -> PackedTensor:
    """The weights (B, n, m) averaged over heads, or (B, H, n, m)."""
    grid = Grid([call.q, call.k])
    weights = attention_weights(call, grid)
    if average:
        return PackedTensor(weights.mean(1), grid, (0, 1, 2))
    return PackedTensor(weights, grid, (0, 3, 1, 2))

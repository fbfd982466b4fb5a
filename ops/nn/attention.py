"""Attention with what PyTorch's function lacks: windows, biases by position, pair bias, gates.

Everything here takes packed tensors and dense ones (B, ...) without padding, and means the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import UNLIMITED
from ..rules.attention import packed_attention
from ..tensor import is_packed
from .rotary import RotaryEmbedding

PositionBias = Callable[[Tensor, Tensor], Tensor]


def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Any = None,
    bias: Any = None,
    position_bias: PositionBias | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    scale: float | None = None,
    dropout: float = 0.0,
    grouped: bool = False,
) -> Any:
    """Attention of each sample by itself.

    Args:
        query: (..., n, D), packed with ``n`` ragged, or dense.
        key, value: (..., m, D) and (..., m, Dv).
        mask: boolean, True where a key is seen; packed or dense, broadcastable to (..., n, m).
        bias: added to the scores; likewise.
        position_bias: a function of the positions of queries (n, 1) and keys (1, m), int64, that gives a
            bias (n, m) or (H, n, m); it is called once for the batch, with the largest lengths.
        causal: query i sees keys up to i.
        window: query i sees keys from i - window[0] to i + window[1]; None is no limit.
        scale: of the scores, by default 1 / sqrt(D).
        dropout: share of the weights that are dropped; always, so pass 0.0 outside of training.
        grouped: key and value have fewer heads, each for several of the query's.

    Returns:
        (..., n, Dv); 0 where a query sees no key.

    Raises:
        ValueError: operands that do not fit, or a window's side below 0.
    """
    if any(side is not None and side < 0 for side in window):
        raise ValueError(f"attention: window {window}; its sides are counts of positions, or None")
    left, right = (UNLIMITED if side is None else side for side in window)
    sides = (left, right)
    if position_bias is not None:
        i = torch.arange(query.shape[-2], device=query.device)[:, None]
        j = torch.arange(key.shape[-2], device=query.device)[None]
        matrix = position_bias(i, j).to(query.dtype)
        bias = matrix if bias is None else bias + matrix
    added = _combined(mask, bias)
    options: dict[str, Any] = {"scale": scale, "grouped": grouped, "dropout": dropout}
    if is_packed(query):
        return packed_attention(query, key, value, added, causal=causal, window=sides, **options)
    return _dense_attention(query, key, value, added, causal, sides, **options)


def _combined(mask: Any, bias: Any) -> Any:
    if mask is None or bias is None:
        return bias if mask is None else mask
    if is_packed(mask) and not is_packed(bias):
        bias = bias + torch.zeros_like(mask, dtype=bias.dtype)
    return bias.masked_fill(~mask, -math.inf)


def _dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    added: Tensor | None,
    causal: bool,
    window: tuple[int, int],
    scale: float | None,
    grouped: bool,
    dropout: float,
) -> Tensor:
    ahead = torch.arange(key.shape[-2], device=query.device)
    ahead = ahead - torch.arange(query.shape[-2], device=query.device)[:, None]
    left, right = window
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if left != UNLIMITED:
        seen = seen & (ahead >= -left)
    if causal or right != UNLIMITED:
        seen = seen & (ahead <= (0 if causal else right))
    added = seen if added is None else _combined(seen, added) if added.dtype != torch.bool else added & seen
    return F.scaled_dot_product_attention(query, key, value, added, dropout, scale=scale, enable_gqa=grouped)


def alibi(heads: int) -> PositionBias:
    """Attention with linear biases: ``-slope * |i - j|``, a slope for each head.

    Slopes are ``2 ** (-8 h / heads)`` for h = 1 ... heads (Press et al., Train Short, Test Long, 2022).
    """

    def bias(i: Tensor, j: Tensor) -> Tensor:
        slopes = 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1, device=i.device))
        return -slopes[:, None, None] * (i - j).abs()

    return bias


class RelativeBias(nn.Module):
    """A learned bias for each head and each distance j - i, up to ``reach`` either way; farther as ``reach``.

    A ``position_bias``: (n, 1), (1, m) -> (H, n, m). Zero at first.
    """

    def __init__(self, heads: int, reach: int) -> None:
        super().__init__()
        self.reach = reach
        self.table = nn.Parameter(torch.zeros(2 * reach + 1, heads))

    def forward(self, i: Tensor, j: Tensor) -> Tensor:
        """Biases for positions of queries and keys."""
        distance = (j - i).clamp(-self.reach, self.reach) + self.reach
        return F.embedding(distance, self.table).movedim(-1, 0)


class Attention(nn.Module):
    """Multi-head attention with a bias from pairs and gates, as structure models have it.

    Jumper et al., Highly accurate protein structure prediction with AlphaFold, 2021, supplement, algorithms
    7 and 24: the bias is a linear map of the normalised pair features, and each head's output is multiplied
    with a sigmoid of a linear map of the queries' input.

    Args:
        dim: features of the input and the output.
        heads: number of heads.
        head_dim: features of a head, by default ``dim // heads``.
        context_dim: features of what is attended to, by default ``dim``.
        pair_dim: features of pairs; None for no pair bias.
        gated: whether outputs are gated.
        rotary: whether queries and keys are turned by their positions.
        dropout: of the weights, in training.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        head_dim: int | None = None,
        context_dim: int | None = None,
        pair_dim: int | None = None,
        gated: bool = True,
        rotary: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        head_dim = dim // heads if head_dim is None else head_dim
        width, context_dim = heads * head_dim, dim if context_dim is None else context_dim
        self.heads, self.dropout = heads, dropout
        self.query = nn.Linear(dim, width, bias=False)
        self.key, self.value = (nn.Linear(context_dim, width, bias=False) for _ in range(2))
        self.gate = nn.Linear(dim, width) if gated else None
        self.out = nn.Linear(width, dim)
        self.pair_norm = None if pair_dim is None else nn.LayerNorm(pair_dim)
        self.pair_bias = None if pair_dim is None else nn.Linear(pair_dim, heads, bias=False)
        self.rotary = RotaryEmbedding() if rotary else None

    def forward(
        self,
        x: Any,
        context: Any = None,
        pair: Any = None,
        *,
        mask: Any = None,
        positions: Any = None,
        causal: bool = False,
        window: tuple[int | None, int | None] = (None, None),
        position_bias: PositionBias | None = None,
    ) -> Any:
        """Attend from ``x`` (B, n, C) to ``context`` (B, m, C'), by default to itself.

        Args:
            pair: (B, n, m, P), packed over the axes of ``x`` and ``context``.
            mask: see :func:`attention`.
            positions: of ``x``, for the rotary embedding; see :func:`ops.nn.rotary`.

        Returns:
            (B, n, C).

        Raises:
            ValueError: ``pair`` for a module without ``pair_dim``, or positions where there is a context.
        """
        if pair is not None and self.pair_bias is None:
            raise ValueError("Attention: pair features for a module without pair_dim")
        if positions is not None and (context is not None or self.rotary is None):
            raise ValueError("Attention: positions are for the rotary embedding of a module without context")
        source = x if context is None else context
        q = self._by_head(self.query(x))
        k, v = (self._by_head(linear(source)) for linear in (self.key, self.value))
        if self.rotary is not None:
            q, k = self.rotary(q, positions), self.rotary(k, positions)
        bias = None
        if pair is not None:
            bias = self.pair_bias(self.pair_norm(pair)).movedim(-1, 1)  # type: ignore[misc]
        out = attention(
            q,
            k,
            v,
            mask=mask,
            bias=bias,
            position_bias=position_bias,
            causal=causal,
            window=window,
            dropout=self.dropout if self.training else 0.0,
        )
        out = out.transpose(1, 2).flatten(2)
        return self.out(out if self.gate is None else out * torch.sigmoid(self.gate(x)))

    def _by_head(self, x: Any) -> Any:
        """(B, n, H d) -> (B, H, n, d)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

"""Attention of one sample at a time, below autograd: the fused CPU kernel, or the formula.

A sample's operands are views of packed rows, without a copy: queries (G, h, n, D), keys (G, h, m, D) and
values (G, h, m, Dv), where G groups of h query heads share one head of keys; without groups G is 1. What is
added to the scores is (1 or G, 1 or h, n, m).

The fused kernel must never be handed an empty sequence, which ends the process: :func:`samples` leaves
those out. It gives no gradient of what is added; the formula does, from the same log-sum-exp:

    P = exp(S - lse),  dP = dO V^T,  dS = P (dP - rowsum(P dP)),  dQ = s dS K,  dK = s dS^T Q,  dV = P^T dO

(Dao, FlashAttention-2, 2023, section 3.1.2). A row whose keys are all masked has the weights 0.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_forward_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

#: No limit of a window's side.
UNLIMITED = -1


class Options(NamedTuple):
    """What is alike for all samples.

    Attributes:
        causal: query i sees keys up to i.
        left, right: query i sees keys from i - left to i + right; -1 is no limit.
        dropout, seed: share of the weights that are dropped, and what decides which.
    """

    causal: bool
    left: int
    right: int
    scale: float
    dropout: float
    seed: int


class Sample(NamedTuple):
    """Where a sample lies: its number, first row and rows of queries and keys, and its first pair cell."""

    number: int
    q: int
    n: int
    k: int
    m: int
    cell: int


def samples(q_lengths: Tensor, k_lengths: Tensor) -> tuple[list[Sample], bool]:
    """The samples that have both queries and keys, and whether that is all of them."""
    found = []
    q = k = cell = 0
    for number, (n, m) in enumerate(zip(q_lengths.tolist(), k_lengths.tolist())):
        if n and m:
            found.append(Sample(number, q, n, k, m, cell))
        q, k, cell = q + n, k + m, cell + n * m
    return found, len(found) == len(q_lengths)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What half precision is accumulated in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Operands(NamedTuple):
    """Packed rows [Tq, H, D], [Tk, Hk, D], [Tk, Hk, Dv], and what is added to scores.

    ``bias`` is [cells, 1 or H], one row for each pair of query and key, or [1 or H, N, M] for all samples;
    booleans say which keys are seen.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None

    @property
    def groups(self) -> int:
        """Heads of keys that are shared, 1 where each query head has its own."""
        heads, shared = self.query.shape[1], self.key.shape[1]
        return shared if shared != heads else 1

    def fused(self, options: Options) -> bool:
        """Whether the fused CPU kernel takes them."""
        query, value = self.query, self.value
        fits = query.shape[2] == value.shape[2] and query.shape[1] > 0 and query.shape[2] > 0
        return fits and query.device.type == "cpu" and options.dropout == 0.0

    def of(self, s: Sample) -> tuple[Tensor, Tensor, Tensor]:
        """One sample's queries, keys and values."""
        groups, heads = self.groups, self.query.shape[1]
        q = view(self.query, s.q, s.n, groups)
        k, v = view(self.key, s.k, s.m, groups), view(self.value, s.k, s.m, groups)
        if self.key.shape[1] != heads:
            k, v = (t.expand(-1, q.shape[1], -1, -1) for t in (k, v))
        return q, k, v

    def added(self, s: Sample, options: Options) -> Tensor | None:
        """What is added to one sample's scores beyond plain causality, in the queries' dtype."""
        bias, dtype = self.bias, self.query.dtype
        found = None
        if bias is not None:
            if bias.dim() == 2:
                part = bias.narrow(0, s.cell, s.n * s.m).view(s.n, s.m, -1).permute(2, 0, 1)
            else:
                part = bias[:, : s.n, : s.m]
            part = _additive(part, dtype) if part.dtype == torch.bool else part.to(dtype)
            part = part.contiguous()
            grouped = self.groups > 1 and part.shape[0] > 1
            found = part.unflatten(0, (self.groups, -1)) if grouped else part.unsqueeze(0)
        if options.left != UNLIMITED or options.right != UNLIMITED:
            band = _additive(_band(s.n, s.m, options, self.query.device), dtype)
            found = band[None, None] if found is None else found + band
        return found


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -math.inf)


def _band(n: int, m: int, options: Options, device: torch.device) -> Tensor:
    ahead = torch.arange(m, device=device) - torch.arange(n, device=device)[:, None]
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if options.left != UNLIMITED:
        seen &= ahead >= -options.left
    if options.right != UNLIMITED:
        seen &= ahead <= options.right
    return seen


def view(x: Tensor, start: int, rows: int, groups: int) -> Tensor:
    """[T, H, D] -> a view (G, H / G, rows, D) of some rows."""
    part = x.narrow(0, start, rows)
    if groups == 1:
        return part.transpose(0, 1).unsqueeze(0)
    return part.unflatten(1, (groups, -1)).permute(1, 2, 0, 3)


def rows_of(x: Tensor, heads: int) -> Tensor:
    """(G, h, n, D) -> [n, heads, D]; heads that were shared are summed."""
    if x.shape[0] * x.shape[1] != heads:
        x = x.sum(1, keepdim=True)
    return x.flatten(0, 1).transpose(0, 1)


def forward(operands: Operands, s: Sample, options: Options) -> tuple[Tensor, Tensor]:
    """One sample's output (G, h, n, Dv) and log-sum-exp (G, h, n); the latter 0 where no key is seen."""
    q, k, v = operands.of(s)
    added = operands.added(s, options)
    if operands.fused(options):
        out, lse = _forward_cpu(q, k, v, 0.0, options.causal, attn_mask=added, scale=options.scale)
        return out, lse if added is None else _finite(lse)
    dtype = wide(q.dtype)
    scores = _scores(q.to(dtype), k.to(dtype), added, options)
    lse = _finite(torch.logsumexp(scores, -1))
    weights = scores.sub_(lse.unsqueeze(-1)).exp_()
    keep = dropout_mask(scores, s, options)
    out = (weights if keep is None else weights * keep) @ v.to(dtype)
    return out.to(q.dtype), lse


def _finite(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == -math.inf, 0.0)


def weights(operands: Operands, s: Sample, options: Options) -> tuple[Tensor, Tensor | None]:
    """One sample's softmax (G, h, n, m), and what dropout multiplies it with, or None."""
    q, k, _ = operands.of(s)
    dtype = wide(q.dtype)
    scores = _scores(q.to(dtype), k.to(dtype), operands.added(s, options), options)
    scores = scores.sub_(_finite(torch.logsumexp(scores, -1, keepdim=True))).exp_()
    return scores, dropout_mask(scores, s, options)


def backward(
    operands: Operands, s: Sample, options: Options, grad: Tensor, out: Tensor, lse: Tensor, of_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of one sample's queries, keys, values and, if wanted, of what was added."""
    q, k, v = operands.of(s)
    added = operands.added(s, options)
    if operands.fused(options) and not of_bias:
        causal, scale = options.causal, options.scale
        parts = _backward_cpu(grad, q, k, v, out, lse, 0.0, causal, attn_mask=added, scale=scale)
        return (*parts, None)
    dtype = wide(q.dtype)
    grad, q, k, v = (t.to(dtype) for t in (grad, q, k, v))
    soft = _scores(q, k, added, options).sub_(lse.unsqueeze(-1)).exp_()
    keep = dropout_mask(soft, s, options)
    kept = soft if keep is None else soft * keep
    grad_weights = grad @ v.transpose(-1, -2)
    grad_value = kept.transpose(-1, -2) @ grad
    if keep is not None:
        grad_weights.mul_(keep)
    grad_scores = softmax_backward(grad_weights, soft, (grad * out).sum(-1, keepdim=True))
    grad_query, grad_key = scores_backward(grad_scores, q, k, options)
    return grad_query, grad_key, grad_value, grad_scores if of_bias else None


def softmax_backward(grad: Tensor, soft: Tensor, total: Tensor) -> Tensor:
    """Gradient of scores; ``total`` is the sum of ``grad * soft`` along keys. Overwrites ``grad``."""
    return grad.sub_(total).mul_(soft)


def scores_backward(grad: Tensor, q: Tensor, k: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Gradients of queries and keys from that of scores."""
    return (grad @ k).mul_(options.scale), (grad.transpose(-1, -2) @ q).mul_(options.scale)


def _scores(q: Tensor, k: Tensor, added: Tensor | None, options: Options) -> Tensor:
    scores = (q @ k.transpose(-1, -2)).mul_(options.scale)
    if added is not None:
        scores.add_(added)
    if options.causal:
        below = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores.masked_fill_(~below, -math.inf)
    return scores


def dropout_mask(like: Tensor, s: Sample, options: Options) -> Tensor | None:
    """What weights are multiplied with: 0 or 1 / (1 - p); the same for the same seed and sample."""
    if options.dropout == 0.0:
        return None
    generator = torch.Generator(like.device).manual_seed(options.seed + s.number)
    keep = torch.rand(like.shape, generator=generator, device=like.device) >= options.dropout
    return keep.to(like.dtype) / (1.0 - options.dropout) if options.dropout < 1.0 else keep.to(like.dtype)

"""Attention of one sample at a time, below autograd: the fused CPU kernel, or the formula.

A sample's operands are views of packed rows, without a copy: queries (G, h, n, D), keys (G, h, m, D) and
values (G, h, m, Dv), where G groups of h query heads share one head of keys; without groups G is 1. What is
added to the scores is (1 or G, 1 or h, n, m).

With a window, the fused kernel gets blocks of a sample's queries with the keys that they can see, so that
work grows with the window and not with the sample (:class:`Block`).

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
#: Queries of a block; 32 to 128 are as fast for windows of 32 to 256 keys, more are slower.
_BLOCK = 64


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

    @property
    def windowed(self) -> bool:
        """Whether a side of the window has a limit."""
        return self.left != UNLIMITED or self.right != UNLIMITED


class Sample(NamedTuple):
    """A sample that has queries and keys: its number, how many of each, and its first pair cell."""

    number: int
    n: int
    m: int
    cell: int


def samples(q_lengths: list[int], k_lengths: list[int]) -> tuple[list[Sample], bool]:
    """The samples that have both queries and keys, and whether that is all of them."""
    found = []
    cell = 0
    for number, (n, m) in enumerate(zip(q_lengths, k_lengths)):
        if n and m:
            found.append(Sample(number, n, m, cell))
        cell += n * m
    return found, len(found) == len(q_lengths)


class Block(NamedTuple):
    """Queries of a sample, ``n`` from ``q`` on, and ``m`` keys from ``k`` on that hold all they can see."""

    q: int
    n: int
    k: int
    m: int


def blocks(s: Sample, options: Options) -> list[Block]:
    """A sample's blocks; itself alone where they would save little."""
    if not options.windowed:
        return [Block(0, s.n, 0, s.m)]
    left, right = (s.n + s.m if side == UNLIMITED else side for side in (options.left, options.right))
    found = []
    for q in range(0, s.n, _BLOCK):
        n, first = min(_BLOCK, s.n - q), max(q - left, 0)
        found.append(Block(q, n, first, max(min(q + n + right, s.m) - first, 0)))
    gains = 4 * sum(b.n * b.m for b in found) < 3 * s.n * s.m
    return found if gains else [Block(0, s.n, 0, s.m)]


def wide(dtype: torch.dtype) -> torch.dtype:
    """What half precision is accumulated in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def cut(x: Tensor, lengths: list[int], groups: int) -> tuple[Tensor, ...]:
    """[T, H, ...] -> for every sample a view (G, H / G, rows, ...)."""
    if groups == 1:
        return x.transpose(0, 1).unsqueeze(0).split(lengths, 2)
    return x.unflatten(1, (groups, -1)).movedim(0, 2).split(lengths, 2)


class Operands:
    """Packed rows [Tq, H, D], [Tk, Hk, D], [Tk, Hk, Dv], and what is added to scores.

    ``bias`` is [cells, 1 or H], one row for each pair of query and key, or [1 or H, N, M] for all samples;
    booleans say which keys are seen.

    Attributes:
        groups: heads of keys that are shared, 1 where each query head has its own.
        parts: queries (G, h, n, D), keys (G, h, m, D) and values (G, h, m, Dv) of every sample.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        lengths: tuple[list[int], list[int]],
    ) -> None:
        self.query, self.key, self.value, self.bias = query, key, value, bias
        heads, shared = query.shape[1], key.shape[1]
        self.groups = shared if shared != heads else 1
        pair = (cut(x, lengths[1], self.groups) for x in (key, value))
        if shared != heads:
            pair = (tuple(t.expand(-1, heads // shared, -1, -1) for t in x) for x in pair)
        self.bands: dict[tuple[int, int, int], Tensor] = {}
        self.parts = list(zip(cut(query, lengths[0], self.groups), *pair))

    def fused(self, options: Options) -> bool:
        """Whether the fused CPU kernel takes them."""
        query, value = self.query, self.value
        fits = query.shape[2] == value.shape[2] and query.shape[1] > 0 and query.shape[2] > 0
        return fits and query.device.type == "cpu" and options.dropout == 0.0

    def added(self, s: Sample, options: Options, block: Block | None = None) -> Tensor | None:
        """What is added to a sample's or a block's scores beyond plain causality, in the queries' dtype."""
        bias, dtype = self.bias, self.query.dtype
        q, n, k, m = block or (0, s.n, 0, s.m)
        found = None
        if bias is not None:
            if bias.dim() == 2:
                bias = bias.narrow(0, s.cell, s.n * s.m).view(s.n, s.m, -1).permute(2, 0, 1)
            part = bias[:, q : q + n, k : k + m]
            part = _additive(part, dtype) if part.dtype == torch.bool else part.to(dtype)
            part = part.contiguous()
            grouped = self.groups > 1 and part.shape[0] > 1
            found = part.unflatten(0, (self.groups, -1)) if grouped else part.unsqueeze(0)
        if options.windowed:
            band = self._band(n, m, k - q, options)
            found = band if found is None else found + band
        return found

    def _band(self, n: int, m: int, shift: int, options: Options) -> Tensor:
        """The window as what is added: (1, 1, n, m); one for all whole blocks that lie alike."""
        found = self.bands.get((n, m, shift))
        if found is None:
            seen = _seen(n, m, shift, options, self.query.device)
            found = _additive(seen, self.query.dtype)[None, None]
            if n == _BLOCK and UNLIMITED not in (options.left, options.right):
                self.bands[n, m, shift] = found
        return found


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -math.inf)


def _seen(n: int, m: int, shift: int, options: Options, device: torch.device) -> Tensor:
    """Which keys are in which query's window, [n, m]; the first key is ``shift`` after the first query."""
    ahead = torch.arange(shift, shift + m, device=device) - torch.arange(n, device=device)[:, None]
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if options.left != UNLIMITED:
        seen &= ahead >= -options.left
    if options.right != UNLIMITED:
        seen &= ahead <= options.right
    return seen


def put(target: Tensor, part: Tensor) -> None:
    """Write one sample's part (G, h, rows, D); heads that ``target`` shares are summed."""
    target.copy_(part if part.shape[1] == target.shape[1] else part.sum(1, keepdim=True))


def forward(operands: Operands, s: Sample, options: Options, out: Tensor, lse: Tensor) -> None:
    """Write a sample's output (G, h, n, Dv) and log-sum-exp (G, h, n); the latter 0 where no key is seen."""
    if not operands.fused(options):
        _forward_formula(operands, s, options, out, lse)
        return
    q, k, v = operands.parts[s.number]
    for b in blocks(s, options):
        o, total = _rows(b.q, b.n, out, lse)
        if b.m == 0:
            o.zero_()
            total.zero_()
            continue
        (queries,), (keys, values) = _rows(b.q, b.n, q), _rows(b.k, b.m, k, v)
        added = operands.added(s, options, b)
        found = _forward_cpu(queries, keys, values, 0.0, options.causal, attn_mask=added, scale=options.scale)
        o.copy_(found[0])
        total.copy_(found[1] if added is None else _finite(found[1]))


def _rows(start: int, count: int, *parts: Tensor) -> tuple[Tensor, ...]:
    """Some rows of every part (G, h, rows, ...)."""
    return tuple(x if count == x.shape[2] else x.narrow(2, start, count) for x in parts)


def _forward_formula(operands: Operands, s: Sample, options: Options, out: Tensor, lse: Tensor) -> None:
    q, k, v = operands.parts[s.number]
    dtype = wide(q.dtype)
    scores = _scores(q.to(dtype), k.to(dtype), operands.added(s, options), options)
    lse.copy_(_finite(torch.logsumexp(scores, -1)))
    weights = scores.sub_(lse.unsqueeze(-1)).exp_()
    keep = dropout_mask(scores, s, options)
    out.copy_((weights if keep is None else weights * keep) @ v.to(dtype))


def _finite(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == -math.inf, 0.0)


def weights(operands: Operands, s: Sample, options: Options) -> tuple[Tensor, Tensor | None]:
    """One sample's softmax (G, h, n, m), and what dropout multiplies it with, or None."""
    q, k, _ = operands.parts[s.number]
    dtype = wide(q.dtype)
    scores = _scores(q.to(dtype), k.to(dtype), operands.added(s, options), options)
    scores = scores.sub_(_finite(torch.logsumexp(scores, -1, keepdim=True))).exp_()
    return scores, dropout_mask(scores, s, options)


class Result(NamedTuple):
    """A sample's output and its gradient (G, h, n, Dv), and its log-sum-exp (G, h, n)."""

    grad: Tensor
    out: Tensor
    lse: Tensor


def backward(
    operands: Operands,
    s: Sample,
    options: Options,
    result: Result,
    targets: tuple[Tensor, Tensor, Tensor],
    of_bias: bool,
) -> Tensor | None:
    """Write a sample's gradients of queries, keys and values; return that of what was added, if wanted."""
    if of_bias or not operands.fused(options):
        return _backward_formula(operands, s, options, result, targets, of_bias)
    spans = blocks(s, options)
    if spans[0] == (0, s.n, 0, s.m):
        for target, part in zip(targets, _backward_block(operands, s, options, result, spans[0])):
            put(target, part)
        return None
    sums = [torch.zeros(x.shape, dtype=wide(x.dtype), device=x.device) for x in operands.parts[s.number][1:]]
    for b in spans:
        (rows,) = _rows(b.q, b.n, targets[0])
        if b.m == 0:
            rows.zero_()
            continue
        of_query, *others = _backward_block(operands, s, options, result, b)
        rows.copy_(of_query)
        for total, part in zip(sums, others):
            total.narrow(2, b.k, b.m).add_(part)
    for target, total in zip(targets[1:], sums):
        put(target, total)
    return None


def _backward_block(
    operands: Operands, s: Sample, options: Options, result: Result, b: Block
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = operands.parts[s.number]
    (queries, grad, out, lse), (keys, values) = _rows(b.q, b.n, q, *result), _rows(b.k, b.m, k, v)
    operand = (grad, queries, keys, values, out, lse, 0.0, options.causal)
    return _backward_cpu(*operand, attn_mask=operands.added(s, options, b), scale=options.scale)


def _backward_formula(
    operands: Operands,
    s: Sample,
    options: Options,
    result: Result,
    targets: tuple[Tensor, Tensor, Tensor],
    of_bias: bool,
) -> Tensor | None:
    dtype = wide(operands.query.dtype)
    grad, q, k, v = (t.to(dtype) for t in (result.grad, *operands.parts[s.number]))
    soft = _scores(q, k, operands.added(s, options), options).sub_(result.lse.unsqueeze(-1)).exp_()
    keep = dropout_mask(soft, s, options)
    kept = soft if keep is None else soft * keep
    grad_weights = grad @ v.transpose(-1, -2)
    grad_value = kept.transpose(-1, -2) @ grad
    if keep is not None:
        grad_weights.mul_(keep)
    grad_scores = softmax_backward(grad_weights, soft, (grad * result.out).sum(-1, keepdim=True))
    for target, part in zip(targets, (*scores_backward(grad_scores, q, k, options), grad_value)):
        put(target, part)
    return grad_scores if of_bias else None


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

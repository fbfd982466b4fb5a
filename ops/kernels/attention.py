"""Attention over packed rows: one operator for the batch, samples kept apart.

Layout: query [Tq, H, D], key [Tk, H, D], value [Tk, H, Dv], sample after sample; the lengths of
the samples lie on the host. The result is [Tq, H, Dv] with the log-sum-exp [Tq, H] that backward
needs. A query of a sample without keys gets exactly 0.

On the CPU each sample goes through PyTorch's fused kernel, below autograd and without a copy of the
inputs; that kernel is never handed an empty sequence, which would end the process. With dropout, and
on other devices, each sample is computed by formula; the dropout mask is drawn again in backward from
the same seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .define import define

_forward_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class _Sample(NamedTuple):
    """Rows of one sample: slices of the queries and of the keys, and its number."""

    q: slice
    k: slice
    number: int


def _samples(q_lengths: Tensor, k_lengths: Tensor) -> Iterator[_Sample]:
    """The samples that have both queries and keys."""
    q = k = 0
    for number, (nq, nk) in enumerate(zip(q_lengths.tolist(), k_lengths.tolist())):
        if nq and nk:
            yield _Sample(slice(q, q + nq), slice(k, k + nk), number)
        q, k = q + nq, k + nk


def _lined_up(*tensors: Tensor) -> tuple[Tensor, ...]:
    """With adjacent features, which the fused kernel takes for granted."""
    return tuple(t if t.stride(-1) == 1 else t.contiguous() for t in tensors)


def _heads_first(x: Tensor, rows: slice) -> Tensor:
    """[T, H, D] -> a view (1, H, n, D) of some rows."""
    return x[rows].transpose(0, 1).unsqueeze(0)


def _fused(query: Tensor, value: Tensor, dropout: float) -> bool:
    fits = query.shape[2] == value.shape[2] and query.shape[1] > 0 and query.shape[2] > 0
    return fits and query.device.type == "cpu" and dropout == 0.0


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_lengths: Tensor,
    k_lengths: Tensor,
    causal: bool,
    scale: float,
    dropout: float,
    seed: Tensor,
) -> tuple[Tensor, Tensor]:
    query, key, value = _lined_up(query, key, value)
    rows, heads = query.shape[:2]
    out = query.new_zeros((rows, heads, value.shape[2]))
    lse = query.new_zeros((rows, heads), dtype=_wide(query.dtype))
    fused = _fused(query, value, dropout)
    for sample in _samples(q_lengths, k_lengths):
        q, k, v = _heads_first(query, sample.q), _heads_first(key, sample.k), _heads_first(value, sample.k)
        if fused:
            o, s = _forward_cpu(q, k, v, 0.0, causal, attn_mask=None, scale=scale)
        else:
            o, s = _forward_formula(q, k, v, causal, scale, _dropout_mask(q, k, dropout, seed, sample.number))
        out[sample.q] = o[0].transpose(0, 1)
        lse[sample.q] = s[0].transpose(0, 1)
    return out, lse


def _attention_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    rows, heads = query.shape[:2]
    out = query.new_empty((rows, heads, value.shape[2]))
    return out, query.new_empty((rows, heads), dtype=_wide(query.dtype))


def _attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    q_lengths: Tensor,
    k_lengths: Tensor,
    causal: bool,
    scale: float,
    dropout: float,
    seed: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    grad, query, key, value = _lined_up(grad, query, key, value)
    grads = tuple(torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (query, key, value))
    fused = _fused(query, value, dropout)
    for sample in _samples(q_lengths, k_lengths):
        q, k, v = _heads_first(query, sample.q), _heads_first(key, sample.k), _heads_first(value, sample.k)
        g, s = _heads_first(grad, sample.q), lse[sample.q].transpose(0, 1).unsqueeze(0)
        if fused:
            o = _heads_first(out, sample.q)
            parts = _backward_cpu(g, q, k, v, o, s, 0.0, causal, attn_mask=None, scale=scale)
        else:
            keep = _dropout_mask(q, k, dropout, seed, sample.number)
            parts = _backward_formula(g, q, k, v, s, causal, scale, keep)
        for target, part, rows in zip(grads, parts, (sample.q, sample.k, sample.k)):
            target[rows] = part[0].transpose(0, 1)
    return grads  # type: ignore[return-value]


def _attention_backward_fake(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in (query, key, value))


# ------------------------------------------------------------------ one sample, by formula


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = (q @ k.transpose(-1, -2)) * scale
    if causal:
        below = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~below, float("-inf"))
    return scores


def _dropout_mask(q: Tensor, k: Tensor, dropout: float, seed: Tensor, number: int) -> Tensor | None:
    """What weights are multiplied with: 0 or 1 / (1 - p); the same for the same seed and sample."""
    if dropout == 0.0:
        return None
    generator = torch.Generator(q.device).manual_seed(int(seed) + number)
    keep = torch.rand((*q.shape[:3], k.shape[2]), generator=generator, device=q.device) >= dropout
    return keep.to(_wide(q.dtype)) / (1.0 - dropout) if dropout < 1.0 else keep.to(_wide(q.dtype))


def _forward_formula(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, keep: Tensor | None
) -> tuple[Tensor, Tensor]:
    wide = _wide(q.dtype)
    scores = _scores(q.to(wide), k.to(wide), causal, scale)
    lse = torch.logsumexp(scores, -1)
    weights = (scores - lse.unsqueeze(-1)).exp()
    out = (weights if keep is None else weights * keep) @ v.to(wide)
    return out.to(q.dtype), lse


def _backward_formula(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    keep: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = _wide(q.dtype)
    grad, q, k, v = (t.to(wide) for t in (grad, q, k, v))
    weights = (_scores(q, k, causal, scale) - lse.unsqueeze(-1)).exp()
    kept = weights if keep is None else weights * keep
    grad_weights = grad @ v.transpose(-1, -2)
    if keep is not None:
        grad_weights = grad_weights * keep
    grad_scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True)) * scale
    return grad_scores @ k, grad_scores.transpose(-1, -2) @ q, kept.transpose(-1, -2) @ grad


# ------------------------------------------------------------------ registration

_ARGUMENTS = "Tensor q_lengths, Tensor k_lengths, bool causal, float scale, float dropout, Tensor seed"

_backward = define(
    "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
    + _ARGUMENTS
    + ") -> (Tensor, Tensor, Tensor)",
    _attention_backward,
    _attention_backward_fake,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, q_lengths, k_lengths, causal, scale, dropout, seed = inputs
    out, lse = output
    ctx.save_for_backward(query, key, value, out, lse, q_lengths, k_lengths, seed)
    ctx.options = (causal, scale, dropout)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _formula(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 9
    query, key, value, out, lse, q_lengths, k_lengths, seed = ctx.saved_tensors
    grads = _backward(grad, query, key, value, out, lse, q_lengths, k_lengths, *ctx.options, seed)
    return (*grads, *(None,) * 6)


#: Attention of each sample's queries over its keys -> (out [Tq, H, Dv], log-sum-exp [Tq, H]).
attention = define(
    f"attention(Tensor query, Tensor key, Tensor value, {_ARGUMENTS}) -> (Tensor, Tensor)",
    _attention,
    _attention_fake,
    setup=_setup,
    backward=_formula,
    differentiable=3,
)

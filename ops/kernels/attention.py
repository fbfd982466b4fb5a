"""Attention over packed rows: one operator for the batch, samples kept apart.

Layout: query [Tq, H, D], key [Tk, Hk, D], value [Tk, Hk, Dv], sample after sample, H a multiple of Hk; the
lengths of the samples lie on the host. What is added to the scores is ``bias``: [cells, 1 or H], a row for
each pair of query and key of a sample, or [1 or H, N, M], read by position and shared by all samples;
booleans say which keys are seen. The result is [Tq, H, Dv] with the log-sum-exp [Tq, H] that backward needs.
A query that sees no key gets exactly 0.

Each sample is computed by itself (:mod:`ops.kernels.sample_attention`), on the CPU several at a time
(:mod:`ops.kernels.threads`), and written to its rows. With dropout, and on other devices, it is the formula;
the dropout mask is drawn again in backward from the same seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .define import define
from .sample_attention import (
    UNLIMITED,
    Operands,
    Options,
    Result,
    Sample,
    backward,
    blocks,
    cut,
    forward,
    put,
    samples,
    scores_backward,
    softmax_backward,
    weights,
    wide,
)
from .threads import for_each

#: Multiplications below which a batch is not worth a second thread: about 0.3 ms.
_SMALL = 2.0e6
_ARGUMENTS = (
    "Tensor q_lengths, Tensor k_lengths, bool causal, int left, int right, float scale, float dropout, "
    "Tensor seed"
)
_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? bias, "


def _run(
    operands: Operands,
    found: list[Sample],
    work: Callable[[Sample], None],
    options: Options,
    apart: bool = True,
) -> None:
    """``work`` on each sample, which writes to places of its own if they are ``apart``."""
    width = operands.query.shape[1] * operands.query.shape[2]
    if options.windowed:
        costs = [float(width * sum(b.n * b.m for b in blocks(s, options))) for s in found]
    else:
        costs = [float(s.n * s.m * width) for s in found]
    parallel = apart and operands.query.device.type == "cpu"
    for_each(work, found, costs, _SMALL if parallel else float("inf"))


def _lined_up(*tensors: Tensor) -> tuple[Tensor, ...]:
    """With adjacent features, which the fused kernel takes for granted."""
    return tuple(t if t.stride(-1) == 1 else t.contiguous() for t in tensors)


def _options(
    causal: bool, left: int, right: int, scale: float, dropout: float, seed: Tensor, *rest: Any
) -> Options:
    if causal and (left, right) != (UNLIMITED, UNLIMITED):
        causal, right = False, 0  # one band says both
    if (left, right) == (UNLIMITED, 0):
        causal, right = True, UNLIMITED
    return Options(causal, left, right, scale, dropout, int(seed) if dropout else 0)


def _new(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype, filled: bool) -> Tensor:
    """Room for results that are written for every sample (``filled``), else zeros."""
    make = torch.empty if filled else torch.zeros
    return make(shape, dtype=dtype, device=like.device)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    q_lengths: Tensor,
    k_lengths: Tensor,
    *given: Any,
) -> tuple[Tensor, Tensor]:
    query, key, value = _lined_up(query, key, value)
    lengths, options = (q_lengths.tolist(), k_lengths.tolist()), _options(*given)
    operands = Operands(query, key, value, bias, lengths)
    rows, heads = query.shape[:2]
    found, whole = samples(*lengths)
    out = _new((rows, heads, value.shape[2]), query, query.dtype, whole)
    lse = _new((rows, heads), query, wide(query.dtype), whole)
    targets = list(zip(*(cut(x, lengths[0], operands.groups) for x in (out, lse))))

    def work(s: Sample) -> None:
        forward(operands, s, options, *targets[s.number])

    _run(operands, found, work, options)
    return out, lse


def _attention_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    rows, heads = query.shape[:2]
    out = query.new_empty((rows, heads, value.shape[2]))
    return out, query.new_empty((rows, heads), dtype=wide(query.dtype))


def _attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    of_bias: bool,
    q_lengths: Tensor,
    k_lengths: Tensor,
    *given: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad, query, key, value = _lined_up(grad, query, key, value)
    lengths, options = (q_lengths.tolist(), k_lengths.tolist()), _options(*given)
    operands = Operands(query, key, value, bias, lengths)
    found, whole = samples(*lengths)
    grads = [_new(t.shape, t, t.dtype, whole) for t in (query, key, value)]
    targets = _targets(operands, grads, lengths)
    grad_bias = _room_for(bias, of_bias)
    results = list(zip(*(cut(x, lengths[0], operands.groups) for x in (grad, out, lse))))

    def work(s: Sample) -> None:
        result = Result(*results[s.number])
        added = backward(operands, s, options, result, targets[s.number], of_bias)
        if added is not None:
            _put_bias(grad_bias, added, s)

    _run(operands, found, work, options, apart=not of_bias or grad_bias.dim() == 2)
    return (*grads, grad_bias)  # type: ignore[return-value]


def _targets(operands: Operands, grads: list[Tensor], lengths: tuple[list[int], list[int]]) -> list[Any]:
    """For every sample the places of its gradients of queries, keys and perhaps values."""
    cuts = (cut(x, lengths[min(i, 1)], operands.groups) for i, x in enumerate(grads))
    return list(zip(*cuts))


def _room_for(bias: Tensor | None, wanted: bool) -> Tensor:
    """Zeros for the gradient of ``bias``, in at least float32; nothing where it is not wanted."""
    if bias is None or not wanted:
        return torch.empty(0)
    return torch.zeros(bias.shape, dtype=wide(bias.dtype), device=bias.device)


def _put_bias(target: Tensor, added: Tensor, s: Sample) -> None:
    """Write, or for a bias shared by samples add, the gradient (G, h, n, m) of one sample's scores."""
    added = added.flatten(0, 1)
    packed = target.dim() == 2
    if target.shape[1 if packed else 0] == 1:
        added = added.sum(0, keepdim=True)
    if packed:
        target.narrow(0, s.cell, s.n * s.m).view(s.n, s.m, -1).copy_(added.permute(1, 2, 0))
    else:
        target[:, : s.n, : s.m] += added


def _attention_backward_fake(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    of_bias: bool,
    *rest: Any,
) -> tuple[Tensor, ...]:
    grad_bias = query.new_empty(0, dtype=torch.float32, device="cpu")
    if bias is not None and of_bias:
        grad_bias = bias.new_empty(bias.shape, dtype=wide(bias.dtype))
    return (*(t.new_empty(t.shape) for t in (query, key, value)), grad_bias)


_backward = define(
    f"attention_backward(Tensor grad, {_INPUTS}Tensor out, Tensor lse, bool of_bias, {_ARGUMENTS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _attention_backward,
    _attention_backward_fake,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, causal, left, right, scale, dropout, seed = inputs
    out, lse = output
    ctx.save_for_backward(*tensors, seed, out, lse)
    ctx.options = (causal, left, right, scale, dropout)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


class _First(torch.autograd.Function):
    """Gradients as they are; to differentiate them again raises, where it would be lost silently."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad.view_as(grad) for grad in grads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(
            "attention has no second derivative; written out as (q @ k.mT * scale).softmax(-1) @ v it has"
        )


def _first(grads: tuple[Tensor, ...], sources: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """``grads`` that raise if autograd is to record how they depend on ``sources``, which it cannot."""
    if not torch.is_grad_enabled():
        return grads
    anchor = next((t for t in sources if t is not None and t.requires_grad), None)
    return grads if anchor is None else _First.apply(anchor, *grads)


def _formula(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 12
    query, key, value, bias, q_lengths, k_lengths, seed, out, lse = ctx.saved_tensors
    of_bias = bias is not None and bias.is_floating_point() and ctx.needs_input_grad[3]
    tensors = (grad, query, key, value, bias)
    given = (out, lse, of_bias, q_lengths, k_lengths, *ctx.options, seed)
    *grads, of = _first(_backward(*tensors, *given), tensors)
    return (*grads, of.to(bias.dtype) if of_bias else None, *(None,) * 8)


#: Attention of each sample's queries over its keys -> (out [Tq, H, Dv], log-sum-exp [Tq, H]). Query i sees
#: key j if ``causal`` allows j <= i, and ``left`` and ``right`` i - left <= j <= i + right (-1: no limit).
attention = define(
    f"attention({_INPUTS}{_ARGUMENTS}) -> (Tensor, Tensor)",
    _attention,
    _attention_fake,
    setup=_setup,
    backward=_formula,
    differentiable=4,
)


# ------------------------------------------------------------------ weights


def _attention_weights(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    cells: int,
    q_lengths: Tensor,
    k_lengths: Tensor,
    *given: Any,
) -> Tensor:
    lengths, options = (q_lengths.tolist(), k_lengths.tolist()), _options(*given)
    operands = Operands(query, key, key, bias, lengths)
    out = query.new_zeros((cells, query.shape[1]))

    def work(s: Sample) -> None:
        soft, keep = weights(operands, s, options)
        soft = soft if keep is None else soft * keep
        out.narrow(0, s.cell, s.n * s.m).view(s.n, s.m, -1).copy_(soft.flatten(0, 1).permute(1, 2, 0))

    _run(operands, samples(*lengths)[0], work, options)
    return out


def _attention_weights_fake(
    query: Tensor, key: Tensor, bias: Tensor | None, cells: int, *rest: Any
) -> Tensor:
    return query.new_empty((cells, query.shape[1]))


def _weights_backward(
    grad: Tensor, query: Tensor, key: Tensor, bias: Tensor | None, of_bias: bool, *given: Any
) -> tuple[Tensor, Tensor, Tensor]:
    lengths, options = (given[0].tolist(), given[1].tolist()), _options(*given[2:])
    operands = Operands(query, key, key, bias, lengths)
    found, whole = samples(*lengths)
    grads = [_new(t.shape, t, t.dtype, whole) for t in (query, key)]
    targets = _targets(operands, grads, lengths)
    grad_bias = _room_for(bias, of_bias)

    def work(s: Sample) -> None:
        soft, keep = weights(operands, s, options)
        part = grad.narrow(0, s.cell, s.n * s.m).view(s.n, s.m, -1).permute(2, 0, 1).to(soft.dtype)
        part = part.reshape(soft.shape) if keep is None else part.reshape(soft.shape) * keep
        of = softmax_backward(part.clone(), soft, (part * soft).sum(-1, keepdim=True))
        q, k = (t.to(soft.dtype) for t in operands.parts[s.number][:2])
        for target, one in zip(targets[s.number], scores_backward(of, q, k, options)):
            put(target, one)
        if of_bias:
            _put_bias(grad_bias, of, s)

    _run(operands, found, work, options, apart=not of_bias or grad_bias.dim() == 2)
    return (*grads, grad_bias)  # type: ignore[return-value]


def _weights_backward_fake(
    grad: Tensor, query: Tensor, key: Tensor, bias: Tensor | None, of_bias: bool, *rest: Any
) -> tuple[Tensor, ...]:
    fake = _attention_backward_fake(grad, query, key, key, bias, grad, grad, of_bias)
    return fake[0], fake[1], fake[3]


_weights_gradient = define(
    "attention_weights_backward(Tensor grad, Tensor query, Tensor key, Tensor? bias, bool of_bias, "
    f"{_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    _weights_backward,
    _weights_backward_fake,
)


def _weights_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, bias, _, q_lengths, k_lengths, *options, seed = inputs
    ctx.save_for_backward(query, key, bias, q_lengths, k_lengths, seed)
    ctx.options = tuple(options)


def _weights_formula(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    query, key, bias, q_lengths, k_lengths, seed = ctx.saved_tensors
    of_bias = bias is not None and bias.is_floating_point() and ctx.needs_input_grad[2]
    tensors = (grad, query, key, bias)
    given = (of_bias, q_lengths, k_lengths, *ctx.options, seed)
    *grads, of = _first(_weights_gradient(*tensors, *given), tensors)
    return (*grads, of.to(bias.dtype) if of_bias else None, *(None,) * 9)


#: The weights of :data:`attention` (after dropout, of the same seed) for each pair -> [cells, H].
attention_weights = define(
    f"attention_weights(Tensor query, Tensor key, Tensor? bias, SymInt cells, {_ARGUMENTS}) -> Tensor",
    _attention_weights,
    _attention_weights_fake,
    setup=_weights_setup,
    backward=_weights_formula,
    differentiable=3,
)

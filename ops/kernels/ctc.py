"""Connectionist temporal classification as one node of a graph.

PyTorch's own reads lengths from the host, which a compiler cannot trace. Backward runs the forward pass
again, whose table of partial sums has a size that a graph does not know.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .define import define


def _ctc_losses(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    lengths = input_lengths.tolist(), target_lengths.tolist()
    return torch._ctc_loss(log_probs, targets, *lengths, blank, zero_infinity)[0]


def _ctc_gradient(grad: Tensor, log_probs: Tensor, targets: Tensor, *rest: Any) -> Tensor:
    input_lengths, target_lengths, blank, zero_infinity = rest
    lengths = input_lengths.tolist(), target_lengths.tolist()
    losses, partial = torch._ctc_loss(log_probs, targets, *lengths, blank, zero_infinity)
    return torch.ops.aten._ctc_loss_backward(
        grad, log_probs, targets, *lengths, losses, partial, blank, zero_infinity
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _gradient(grad, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity), *[None] * 5


_ARGUMENTS = (
    "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, "
    "bool zero_infinity"
)
_gradient = define(
    f"ctc_gradient(Tensor grad, {_ARGUMENTS}) -> Tensor",
    _ctc_gradient,
    lambda grad, log_probs, *rest: log_probs.new_empty(log_probs.shape),
)
#: The loss of each sample: log_probs [T, B, C], targets [B, S] or one after the other, lengths int64 [B] on
#: the host -> [B].
ctc_losses = define(
    f"ctc_losses({_ARGUMENTS}) -> Tensor",
    _ctc_losses,
    lambda log_probs, *rest: log_probs.new_empty((log_probs.shape[1],)),
    setup=_setup,
    backward=_backward,
)

"""``torch.nn.attention.flex_attention``: the batch as one long sequence whose samples do not see each other.

A query and a key meet where their samples agree; causality and windows compare positions inside samples, and
a bias is read at the pair's cell. Fast only where it is compiled, which it is on CUDA devices; on a CPU it
has no backward, and in eager makes all scores of all samples at once.

A key that is not seen still takes part with the weight 0, and 0 times nan is nan: values that are not finite
are taken out before, and the samples they belong to are set to nan after.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from ..axis import Grid
from .call import UNLIMITED, Call


def refuses(call: Call) -> str | None:
    """Why it cannot do this, or None."""
    device = call.query.device.type
    if device not in ("cpu", "cuda"):
        return f"it runs on CPUs and CUDA devices, the tensors are on '{device}'"
    if device == "cpu" and call.recorded:
        return "it has no backward on a CPU"
    if device == "cpu" and torch.compiler.is_compiling():
        return "on a CPU it runs in eager only"
    if call.dropout:
        return "it has no dropout"
    return None


def run(call: Call) -> Tensor:
    """[Tq, H, Dv]."""
    if call.q.total == 0 or call.k.total == 0:
        return call.query.new_zeros((*call.query.shape[:2], call.value.shape[2]))
    mask = create_block_mask(
        _seen(call), None, None, call.q.total, call.k.total, device=call.query.device.type
    )
    values, spoilt = _finite(call)
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (call.query, call.key, values))
    attend = _compiled() if q.is_cuda and not torch.compiler.is_compiling() else flex_attention
    grouped = call.query.shape[1] != call.key.shape[1]
    out = attend(q, k, v, score_mod=_added(call), block_mask=mask, scale=call.scale, enable_gqa=grouped)
    return out.squeeze(0).transpose(0, 1).masked_fill(spoilt, torch.nan)


def _finite(call: Call) -> tuple[Tensor, Tensor]:
    """The values without what is not finite, and the queries of samples that had such: [Tq, 1, 1]."""
    bad = ~call.value.isfinite()
    rows = bad.flatten(1).any(1).to(torch.float32)
    samples = rows.new_zeros(call.k.batch_size).index_add(0, call.k.sample_ids, rows)
    return call.value.masked_fill(bad, 0.0), (samples > 0)[call.q.sample_ids][:, None, None]


@functools.cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)


def _seen(call: Call) -> Callable[..., Tensor]:
    """Whether a query sees a key, by their rows."""
    q_samples, k_samples = call.q.sample_ids, call.k.sample_ids
    q_positions, k_positions = call.q.positions, call.k.positions

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        ahead = k_positions[j] - q_positions[i]
        found = q_samples[i] == k_samples[j]
        if call.causal:
            found = found & (ahead <= 0)
        if call.left != UNLIMITED:
            found = found & (ahead >= -call.left)
        if call.right != UNLIMITED:
            found = found & (ahead <= call.right)
        return found

    return seen


def _added(call: Call) -> Callable[..., Tensor] | None:
    """A score with its bias; between samples any number, which the mask drops."""
    if call.bias is None:
        return None
    bias, q_positions, k_positions = call.bias, call.q.positions, call.k.positions
    shared = bias.dim() == 3
    starts = None if shared else Grid([call.q, call.k]).row_splits(1)
    heads = bias.shape[0] if shared else bias.shape[1]

    def added(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        head = h if heads > 1 else torch.zeros_like(h)
        if starts is None:
            value = bias[head, q_positions[i], k_positions[j]]
        else:
            value = bias[(starts[i] + k_positions[j]).clamp(max=max(bias.shape[0] - 1, 0)), head]
        if bias.dtype == torch.bool:
            return torch.where(value, score, -float("inf"))
        return score + value

    return added

"""What one call of attention asks for, in terms of payloads and axes."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..axis import Axis
from ..kernels.sample_attention import UNLIMITED

AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")


class Call(NamedTuple):
    """Attention of each sample's queries over its keys.

    Attributes:
        query, key, value: [Tq, H, D], [Tk, Hk, D], [Tk, Hk, Dv]; H is a multiple of Hk.
        q, k: the axes of queries and keys.
        bias: what is added to scores: [cells, 1 or H] over the grid (q, k), or [1 or H, N, M] by position,
            shared by all samples; booleans say which keys are seen.
        causal: query i sees keys up to i, both counted from the sample's first.
        left, right: a window: query i sees keys from i - left to i + right; -1 is no limit.
        scale: of scores; by default 1 / sqrt(D).
        dropout: share of the weights that are dropped.
        seed: int64 [], decides which weights are dropped.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    q: Axis
    k: Axis
    bias: Tensor | None = None
    causal: bool = False
    left: int = UNLIMITED
    right: int = UNLIMITED
    scale: float | None = None
    dropout: float = 0.0
    seed: Tensor | None = None

    def settled(self) -> Call:
        """With everything that has a default filled in, and cast as autocast asks."""
        query, key, value, device = self.query, self.key, self.value, self.query.device.type
        if device in AUTOCAST_DEVICES and torch.is_autocast_enabled(device):
            query, key, value = (t.to(torch.get_autocast_dtype(device)) for t in (query, key, value))
        return self._replace(
            query=query,
            key=key,
            value=value,
            scale=1.0 / math.sqrt(max(query.shape[-1], 1)) if self.scale is None else self.scale,
            seed=_seed(self.dropout) if self.seed is None else self.seed,
        )

    @property
    def options(self) -> tuple[bool, int, int, float, float, Tensor]:
        """The kernels' last arguments, of a settled call."""
        assert self.scale is not None and self.seed is not None
        return self.causal, self.left, self.right, self.scale, self.dropout, self.seed

    @property
    def windowed(self) -> bool:
        """Whether a side of the window has a limit."""
        return self.left != UNLIMITED or self.right != UNLIMITED

    @property
    def recorded(self) -> bool:
        """Whether autograd records the call."""
        tensors = (self.query, self.key, self.value, self.bias)
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _seed(dropout: float) -> Tensor:
    return torch.randint(0, 2**62, (), dtype=torch.int64) if dropout else torch.zeros((), dtype=torch.int64)

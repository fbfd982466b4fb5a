"""Lengths of samples, and the length functions of derived axes in normal form.

A step is a length function ``max((min(n, cap) + shift) // stride, 0)``; a derived axis is known by the steps
that lead to it. Composing brings them to normal form, so that two ways to the same function are one axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .kernels import structure

Lengths = Tensor | np.ndarray | Sequence[int]
Step = tuple[int, int, int]


def compose(steps: tuple[Step, ...], step: Step) -> tuple[Step, ...]:
    """Compose length functions and bring them to normal form.

    ``(n + a) // s`` then ``(m + b) // t`` is ``(n + a + s * b) // (s * t)``, exactly, unless a negative
    intermediate length that was clamped to 0 would become positive again.
    """
    if not steps or step[0] != structure.NO_CAP:
        return steps + (step,)
    (cap, a, s), (_, b, t) = steps[-1], step
    if b >= t and a < 0:
        return steps + (step,)
    merged = (cap, a + s * b, s * t)
    return steps[:-1] if merged == (structure.NO_CAP, 0, 1) else steps[:-1] + (merged,)


def derived_maximum(longest: Any, step: Step) -> Any:
    """The largest length of a derived axis; an expression in the parent's, in a graph."""
    cap, shift, stride = step
    if cap != structure.NO_CAP and not statically_known_true(longest <= cap):
        longest = cap if statically_known_true(longest >= cap) else torch.sym_min(longest, cap)
    longest = (longest + shift) // stride
    if statically_known_true(longest >= 0):
        return longest
    return 0 if statically_known_true(longest < 0) else torch.sym_max(longest, 0)


def host_lengths(lengths: Lengths) -> np.ndarray:
    """Lengths [B] as a new host array; raises ValueError where one is negative."""
    if isinstance(lengths, Tensor):
        lengths = lengths.detach().cpu().numpy()
    host = np.array(lengths, dtype=np.int64)
    if host.ndim != 1:
        raise ValueError(f"lengths must be one number a sample; got shape {host.shape}")
    if host.size and host.min() < 0:
        sample = int(np.argmin(host))
        raise ValueError(f"sample {sample} has the negative length {int(host[sample])}")
    return host


def brief(numbers: list[int], most: int = 8) -> str:
    """The first few of many numbers, for prints."""
    shown = ", ".join(str(n) for n in numbers[:most])
    return f"[{shown}, ... {len(numbers)} samples]" if len(numbers) > most else f"[{shown}]"

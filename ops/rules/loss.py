"""Losses: means and sums run over valid positions only."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .. import dispatch
from ..align import Layout, align, packed_payload
from ..tensor import PackedTensor, is_packed

ELEMENTWISE = """
    mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits
    kl_div poisson_nll_loss soft_margin_loss
""".split()


def elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Losses of one value per entry: operands are aligned, the reduction sees valid entries only."""
    payloads, layout = align(dispatch.name_of(func), [*args, *kwargs.values()])
    values = func(*payloads[: len(args)], **dict(zip(kwargs, payloads[len(args) :])))
    return layout.wrap(values) if values.dim() else values


def cross_entropy(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """``F.cross_entropy`` over valid positions.

    The class dim is dim 1 where it is static, as in PyTorch: (B, V, n) with targets (B, n), or rows
    (T, V) with (T,); else it is the last dim: (B, n, V) with (B, n). Targets are class indices, or
    probabilities of the input's shape.

    Raises:
        TypeError: only one of the two is packed.
        ValueError: their structures differ, or no dim can hold the classes.
    """
    if not (is_packed(input) and is_packed(target)):
        raise TypeError("cross_entropy: input and target must both be packed, over the same samples")
    place = _class_dim(input)
    c, k = input.order[place], len(input.axes)
    with_classes = Layout(input.grid, input.order)
    without = Layout(input.grid, tuple(e - (e > c) for d, e in enumerate(input.order) if d != place))
    expected = with_classes if len(target.order) == len(input.order) else without
    if len(target.order) != len(expected.order) or len(target.axes) != k:
        raise ValueError(
            f"cross_entropy: a target of shape {tuple(target.shape)} does not fit an input of shape "
            f"{tuple(input.shape)} whose class dim is {place}"
        )
    labels = packed_payload("cross_entropy", target, expected)
    if expected is with_classes:
        labels = labels.movedim(c - k, 1)
    values = F.cross_entropy(
        input.values.movedim(c - k, 1),
        labels,
        weight,
        size_average,
        ignore_index,
        reduce,
        reduction,
        label_smoothing,
    )
    return without.wrap(values) if values.dim() else values


def _class_dim(x: PackedTensor) -> int:
    k = len(x.axes)
    place = 1 if len(x.order) > 1 and x.order[1] > k else len(x.order) - 1
    if x.order[place] <= k:
        raise ValueError(f"cross_entropy: no static dim holds the classes in the input {x!r:.60}")
    return place


def _cross_entropy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return cross_entropy(*args, **kwargs)


for _name in ELEMENTWISE:
    dispatch.register_function("loss", elementwise, _name, getattr(F, _name))
dispatch.register_function("loss", _cross_entropy, "cross_entropy", F.cross_entropy)

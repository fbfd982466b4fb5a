"""Creation and randomness: new tensors of a structure, whole channels dropped, samples drawn.

Everything random is drawn by PyTorch's generators, so ``torch.manual_seed`` makes it reproducible. (The
``*_like`` functions, dropout and Bernoulli draws entry by entry are pointwise.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .. import dispatch
from ..axis import Axis, Extent, Grid
from ..cells import segments_along, static_dim, unstack
from ..tensor import PackedTensor, like
from .shape import dims_of, on_tensor

ALPHA = 1.7580993408473766


def new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``new_zeros`` and its kin: sizes taken from ``x.shape`` mean its axes; without one it is dense."""
    x = args[0]
    single = dispatch.name_of(func) == "new_full" or isinstance(args[1], (tuple, list))
    sizes, rest = (list(args[1]), args[2:]) if single else (dims_of(args[1:]), ())
    axes: dict[int, Axis] = {}
    for d, size in enumerate(sizes):
        axis = _axis_of(x, size)
        if axis is not None:
            axes[d] = axis
    if not axes:
        return func(x.values, sizes, *rest, **kwargs)
    batch = [d for d, n in enumerate(sizes) if d not in axes and statically_known_true(n == x.batch_size)]
    if not batch:
        raise ValueError(f"{dispatch.name_of(func)}: the sizes {sizes} name a ragged axis, but not the batch")
    static = [d for d in range(len(sizes)) if d not in axes and d != batch[0]]
    places = [batch[0], *axes, *static]
    same = len(axes) == len(x.grid.axes) and all(a is b for a, b in zip(axes.values(), x.grid.axes))
    grid = x.grid if same else Grid(axes.values())
    values = func(x.values, [grid.cells, *(sizes[d] for d in static)], *rest, **kwargs)
    return PackedTensor(values, grid, tuple(places.index(d) for d in range(len(sizes))))


def _axis_of(x: PackedTensor, size: Any) -> Axis | None:
    """The axis that a size stands for: in a graph sizes are symbols, and only equal ones agree."""
    if isinstance(size, Extent):
        return size.axis
    if torch.compiler.is_compiling():
        for axis in x.grid.axes:
            if statically_known_true(size == axis.max_length):
                return axis
    return None


def new_strided(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """``new_empty_strided``: dense; storage of a packed tensor has an order of its own."""
    x, sizes, *rest = args
    if any(_axis_of(x, size) is not None for size in sizes):
        raise ValueError("new_empty_strided: a packed tensor takes no strides; use x.new_empty(x.shape)")
    return func(x.values, sizes, *rest, **kwargs)


def new_tensor(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """``new_tensor``: data of its own, dense."""
    return func(args[0].values, *args[1:], **kwargs)


def channels(x: PackedTensor, p: float, training: bool, what: str) -> PackedTensor:
    """1 / (1 - p) or 0 for every sample and channel (dim 1), over the structure of ``x``."""
    if x.order[0] != 0 or len(x.order) < 3:
        raise ValueError(f"{what} needs the batch in dim 0 and channels in dim 1; got the order {x.order}")
    place = static_dim(x, 1, what)
    count = x.values.shape[place]
    kept = F.dropout(x.values.new_ones(x.batch_size, count), p, training)
    shape = [count if d == place else 1 for d in range(1, x.values.dim())]
    return like(x, kept.index_select(0, x.grid.sample_ids).view(-1, *shape).expand_as(x.values))


def feature_dropout(name: str) -> Callable[..., PackedTensor]:
    """Whole channels of samples set to 0, the others scaled."""

    def rule(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> PackedTensor:
        factor = channels(x, p, training, name)
        return x.mul_(factor) if inplace else x * factor

    return rule


def feature_alpha_dropout(
    x: Any, p: float = 0.5, training: bool = False, inplace: bool = False
) -> PackedTensor:
    """Whole channels of samples set to SELU's negative limit, mean and variance kept."""
    if not training or p == 0:
        return x
    factor: Any = channels(x, p, True, "feature_alpha_dropout")
    kept = (factor != 0).to(x.dtype)
    scale = 1 / math.sqrt((1 - p) * (1 + p * ALPHA**2)) if p < 1 else 0.0
    out = (x * kept - ALPHA * (1 - kept)) * scale + ALPHA * p * scale
    return x.copy_(out) if inplace else out


def inplace(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The form of a feature dropout that writes into its operand."""

    def rule_(x: Any, p: float, train: bool) -> Any:
        return rule(x, p, train, True)

    return rule_


def multinomial(
    x: PackedTensor, num_samples: int, replacement: bool = False, *, generator: Any = None
) -> Any:
    """Positions drawn with the weights of the last dim, which then is static."""
    segments, last = segments_along(x, -1), len(x.order) - 1
    if segments is None:
        values = x.values.movedim(static_dim(x, -1, "multinomial"), -1)
        flat = values.reshape(-1, values.shape[-1])
        drawn = torch.multinomial(flat, num_samples, replacement, generator=generator)
        drawn = drawn.view(*values.shape[:-1], num_samples)
        return like(x, drawn.movedim(-1, static_dim(x, -1, "multinomial")))
    if x.values.dim() > 1:
        raise ValueError("multinomial along a ragged dim needs the others to be the batch or ragged")
    segments.require_filled("multinomial", 1 if replacement else num_samples)
    drawn = torch.multinomial(segments.padded(x.values, 0), num_samples, replacement, generator=generator)
    return unstack(x, last, drawn)


dispatch.register("creation", new, "new_zeros new_ones new_full new_empty")
dispatch.register("creation", new_strided, "new_empty_strided")
dispatch.register("creation", new_tensor, "new_tensor")
for _name in "dropout1d dropout2d dropout3d feature_dropout".split():
    dispatch.register("creation", on_tensor(feature_dropout(_name)), _name)
dispatch.register("creation", on_tensor(feature_alpha_dropout), "feature_alpha_dropout")
dispatch.register("creation", on_tensor(inplace(feature_alpha_dropout)), "feature_alpha_dropout_")
dispatch.register("creation", on_tensor(inplace(feature_dropout("feature_dropout"))), "feature_dropout_")
dispatch.register("creation", on_tensor(multinomial), "multinomial")

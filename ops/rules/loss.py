"""Losses: means and sums run over valid positions only.

A loss is a row of a table that says what the dims of its operands are:

* ``ELEMENTWISE``: one value per entry; operands broadcast, weights too.
* ``OVER_CLASSES``: one static dim holds the classes and is consumed: dim 1 where it is static, as in
  PyTorch, (B, V, n) with targets (B, n), or rows (T, V) with (T,); else the last dim, (B, n, V) with (B, n).
* ``OVER_FEATURES``: the last dim is consumed, which is static.

The others are formulas of these and of pointwise operators.

``reduction="none"`` gives a packed tensor. The mean is over positions; of samples it is
:func:`ops.per_sample_mean`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import _reduction

from .. import dispatch
from ..align import Layout, align, over_cells
from ..kernels import ctc
from ..segments import Segments
from ..sequences import agreed_lengths, on_host, require_one_axis
from ..tensor import PackedTensor, is_packed
from .shape import on_operands

ELEMENTWISE = """
    mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits
    kl_div poisson_nll_loss soft_margin_loss hinge_embedding_loss margin_ranking_loss
""".split()
OVER_CLASSES = "cross_entropy nll_loss multi_margin_loss multilabel_margin_loss".split()
OVER_FEATURES = "cosine_embedding_loss triplet_margin_loss linear_cross_entropy".split()
#: Arguments that have the dim that is consumed; a target has it where it has as many dims as they.
WITH_FEATURES = ("input", "input1", "input2", "anchor", "positive", "negative")
REDUCTIONS = ("none", "mean", "sum")


def _is_tensor(x: Any) -> bool:
    return is_packed(x) or (isinstance(x, Tensor) and x.dim() > 0)


def _on_cells(name: str, operands: list[Any]) -> tuple[list[Any], Layout]:
    """Operands aligned, each with a row for every cell."""
    payloads, layout = align(name, operands)
    return [over_cells(p, x, layout) if _is_tensor(x) else p for p, x in zip(payloads, operands)], layout


def _wrap(layout: Layout, values: Tensor) -> Any:
    """Unreduced values as a packed tensor."""
    return layout.wrap(values) if values.dim() else values


# ------------------------------------------------------------------ one value per entry


def elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Losses of one value per entry: operands are aligned, the reduction sees valid entries only."""
    operands = [*args, *kwargs.values()]
    by_batch = any(isinstance(x, str) and x == "batchmean" for x in operands)
    if by_batch:
        operands = ["sum" if isinstance(x, str) else x for x in operands]
    if dispatch.name_of(func) == "margin_ranking_loss":
        _require_equal_dims("margin_ranking_loss", operands)
    payloads, layout = align(dispatch.name_of(func), operands)
    values = func(*payloads[: len(args)], **dict(zip(kwargs, payloads[len(args) :])))
    return values / _batch_size(layout) if by_batch else _wrap(layout, values)


def _require_equal_dims(name: str, operands: Any) -> None:
    dims = [x.dim() for x in operands if isinstance(x, (Tensor, PackedTensor))]
    if len(set(dims)) > 1:
        raise ValueError(f"{name}: operands of {dims} dims; give all as many dims, e.g. x[None]")


def _batch_size(layout: Layout) -> int:
    """What "batchmean" divides by: samples, or rows."""
    if layout.order[0] > 0:
        raise ValueError('reduction "batchmean" needs the batch in dim 0: transpose it there')
    return layout.grid.batch_size if layout.order[0] == 0 else layout.grid.cells


def gaussian_nll_loss(
    input: Any, target: Any, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Any:
    """``F.gaussian_nll_loss``; a variance without the last dim is that of all its entries.

    Raises:
        ValueError: a negative variance (in a graph a RuntimeError).
    """
    if _is_tensor(var) and var.dim() == input.dim() - 1:
        var = var.unsqueeze(-1)
    if not isinstance(var, float):
        _require_equal_dims("gaussian_nll_loss", [input, var])
    payloads, layout = _on_cells("gaussian_nll_loss", [input, target, var])
    if isinstance(var, float):
        payloads[2] = torch.full_like(payloads[0], var)
    x, y, spread = torch.broadcast_tensors(*payloads)
    if not torch.compiler.is_compiling():
        return _wrap(layout, F.gaussian_nll_loss(x, y, spread, full, eps, reduction))
    torch._assert_async((spread >= 0).all())
    spread = spread + (spread.clamp_min(eps) - spread).detach()
    loss = 0.5 * (spread.log() + (x - y).square() / spread) + full * 0.5 * math.log(2 * math.pi)
    return reduced(layout.wrap(loss), reduction)


def _named(reduction: Any) -> str:
    """A reduction that is given by name or by PyTorch's number."""
    name = REDUCTIONS[reduction] if reduction in (0, 1, 2) else reduction
    if name not in REDUCTIONS:
        raise ValueError(f"reduction is one of {REDUCTIONS}; got {reduction!r}")
    return name


def reduced(loss: Any, reduction: Any) -> Any:
    """A loss of each position, or its sum or mean."""
    name = _named(reduction)
    return loss if name == "none" else getattr(loss, name)()


# ------------------------------------------------------------------ one value per vector


def over_features(name: str, classes: bool) -> dispatch.Handler:
    """Losses that consume one static dim of their operands.

    The payloads become rows [rows, features] and targets [rows], for which PyTorch has the loss.

    Args:
        classes: the dim is dim 1 where that is static; else always the last.
    """
    names = list(inspect.signature(getattr(F, name)).parameters)

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operands, labels = [*args, *kwargs.values()], [*names[: len(args)], *kwargs]
        ndim = operands[labels.index(names[0])].dim()
        full = [i for i, x in enumerate(operands) if _is_tensor(x) and _has_features(x, labels[i], ndim)]
        if not any(is_packed(operands[i]) for i in full):
            raise TypeError(f"{name}: the input must be packed where the target or a weight is")
        if any(labels[i] == "weight" for i in full):
            raise ValueError(
                f"{name}: the weight has one entry for each class, shape (C,); to weigh positions, multiply "
                'the loss of reduction="none"'
            )
        _require_equal_dims(name, [operands[i] for i in full])
        payloads, layout = _on_cells(name, [operands[i] for i in full])
        for i, payload in zip(full, payloads):
            if labels[i] == "target" and payload.shape[1:] != payloads[0].shape[1:]:
                _unfit(name, operands[i], operands[full[0]])
        place = _feature_dim(name, layout, ndim, classes)
        c = layout.order[place] - layout.k
        without = Layout(
            layout.grid, tuple(e - (e > c + layout.k) for e in layout.order if e != c + layout.k)
        )
        payloads = list(torch.broadcast_tensors(*payloads)) if len(payloads) > 1 else payloads
        rest = payloads[0].movedim(c, -1).shape[:-1]
        for i, x in enumerate(operands):
            if i in full:
                operands[i] = payloads[full.index(i)].movedim(c, -1).flatten(0, -2)
            elif labels[i] == "target":
                known = is_packed(x) and x.grid is layout.grid and x.order == without.order
                if not (known and x.values.shape[1:] == rest[1:]):
                    known, positions = False, without.wrap(payloads[0].detach().select(c, 0))
                operands[i] = (x.values if known else _targets(name, x, positions)).flatten()
                if torch.compiler.is_compiling():  # of one structure; before 2.13 a graph does not know it
                    torch._check(operands[i].shape[0] == rest.numel())
        values = func(*operands[: len(args)], **dict(zip(kwargs, operands[len(args) :])))
        return without.wrap(values.view(rest)) if values.dim() else values

    return handler


def _has_features(x: Any, label: str, ndim: int) -> bool:
    if label == "target":
        return x.dim() == ndim
    return label in WITH_FEATURES or (label == "weight" and (is_packed(x) or x.dim() > 1))


def _feature_dim(name: str, layout: Layout, ndim: int, classes: bool) -> int:
    place = 1 if classes and ndim > 1 and layout.order[1] > layout.k else ndim - 1
    if layout.order[place] <= layout.k:
        what = "dim 1 nor the last dim is" if classes else "the last dim is not"
        raise ValueError(
            f"{name}: the {'classes' if classes else 'features'} need a static dim, and "
            f"{'neither ' if classes else ''}{what}; transpose them to the end"
        )
    return place


def _unfit(name: str, target: Any, other: Any) -> None:
    raise ValueError(
        f"{name}: a target of shape {tuple(target.shape)} does not fit an input of {tuple(other.shape)}"
    )


def _targets(name: str, target: Any, positions: PackedTensor) -> Tensor:
    """Targets [cells, *static], one for each of ``positions``."""
    if not _is_tensor(target) or target.dim() != positions.dim():
        shape = tuple(target.shape) if isinstance(target, (Tensor, PackedTensor)) else target
        raise ValueError(
            f"{name}: a target of shape {shape} for positions {tuple(positions.shape)}: it has one entry for "
            "each position, or as many dims as the input"
        )
    (_, values), layout = _on_cells(name, [positions, target])
    if layout.grid is not positions.grid or values.shape[1:] != positions.values.shape[1:]:
        _unfit(name, target, positions)
    return values


def multilabel_soft_margin_loss(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    """``F.multilabel_soft_margin_loss``: the last dim holds the classes, and is averaged."""
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    _require_equal_dims("multilabel_soft_margin_loss", (input, target))
    loss: Any = F.binary_cross_entropy_with_logits(input, target, reduction="none")
    _feature_dim("multilabel_soft_margin_loss", Layout(loss.grid, loss.order), loss.dim(), False)
    return reduced((loss if weight is None else loss * weight).mean(-1), reduction)


def triplet_margin_with_distance_loss(
    anchor: Any,
    positive: Any,
    negative: Any,
    *,
    distance_function: Callable[[Any, Any], Any] | None = None,
    margin: float = 1.0,
    swap: bool = False,
    reduction: str = "mean",
) -> Any:
    """``F.triplet_margin_with_distance_loss``; the distance is a function of packed tensors."""
    if margin <= 0:
        raise ValueError(f"margin must be greater than 0, got {margin}")
    _require_equal_dims("triplet_margin_with_distance_loss", (anchor, positive, negative))
    distance = distance_function or F.pairwise_distance
    to_negative = distance(anchor, negative)
    if swap:
        to_negative = torch.minimum(to_negative, distance(positive, negative))
    return reduced((distance(anchor, positive) - to_negative + margin).clamp_min(0), reduction)


# ------------------------------------------------------------------ one value per sample


def ctc_loss(
    log_probs: Any,
    targets: Any,
    input_lengths: Any = None,
    target_lengths: Any = None,
    blank: int = 0,
    reduction: Any = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """``F.ctc_loss``: (B, n, C), in any order of dims, with targets (B, s).

    What is packed knows its lengths: give None for them, or the same ones. Targets may also be dense,
    padded (B, S) or one after the other, with their lengths; the logarithms may be dense (T, B, C).

    Returns:
        [B], or a number.

    Raises:
        ValueError: lengths that are not the structure's, or dims that do not fit.
    """
    if is_packed(log_probs):
        require_one_axis("log_probs", log_probs, 3)
        input_lengths = agreed_lengths("input_lengths", input_lengths, log_probs.grid.axes[0])
        log_probs = Segments(log_probs.grid, ()).padded(log_probs.values, 0).transpose(0, 1)
    if is_packed(targets):
        require_one_axis("targets", targets, 2)
        target_lengths = agreed_lengths("target_lengths", target_lengths, targets.grid.axes[0])
        targets = targets.values
    given = on_host("input", input_lengths), on_host("target", target_lengths)
    if not torch.compiler.is_compiling():
        number = REDUCTIONS.index(_named(reduction))
        return torch.ctc_loss(log_probs, targets, given[0], given[1], blank, number, zero_infinity)
    losses = ctc.ctc_losses(log_probs, targets, *given, blank, zero_infinity)
    if zero_infinity:
        losses = losses.masked_fill(losses.isinf(), 0)
    if _named(reduction) == "mean":
        losses = losses / given[1].clamp_min(1).to(losses)
    return reduced(losses, reduction)


def _register(handler: dispatch.Handler, name: str) -> None:
    """A row under the spellings in ``torch.nn.functional`` and in ``torch``."""
    for space in (F, torch):
        if hasattr(space, name):
            function = getattr(space, name)
            dispatch.register_function("loss", handler, name, function, inspect.unwrap(function))


for _name in ELEMENTWISE:
    _register(elementwise, _name)
for _name in (*OVER_CLASSES, *OVER_FEATURES):
    if hasattr(F, _name):
        _register(over_features(_name, _name in OVER_CLASSES), _name)
for _rule in (gaussian_nll_loss, multilabel_soft_margin_loss, triplet_margin_with_distance_loss, ctc_loss):
    _register(on_operands(_rule), _rule.__name__)

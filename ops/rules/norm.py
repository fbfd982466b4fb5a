"""Normalisation: statistics are those of valid positions.

``layer_norm`` and ``rms_norm`` work on trailing static dims of each position. The others have their
channels in dim 1, as in PyTorch: ``batch_norm`` over all valid positions of all samples together,
``group_norm`` and ``instance_norm`` over those of each sample, ``local_response_norm`` over channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import dispatch
from ..kernels import norm, structure
from ..normalisation import affine, batch_norm_of, entries_of_channel, move, over_samples
from ..segments import Segments
from ..statistics import wide_of
from ..tensor import ROWS, PackedTensor, is_packed, like
from .feature import trailing
from .shape import on_operands

Handler = dispatch.Handler

# ------------------------------------------------------------------ trailing dims


def normalized_shape(dense: Any = None) -> Handler:
    """Operators on as many trailing dims as their second argument has; ``dense`` is run on the payload."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) < 2:
            kwargs = dict(kwargs)
            args = (*args, *(kwargs.pop(n) for n in ("input", "normalized_shape")[len(args) :]))
        x = _packed(dispatch.name_of(func), args[0])
        x = trailing(x, 1 if isinstance(args[1], int) else len(args[1]), func)
        out = (dense or func)(x.values, *args[1:], **kwargs)
        return like(x, out) if isinstance(out, Tensor) else tuple(like(x, part) for part in out)

    return handler


# ------------------------------------------------------------------ channels in dim 1


def _packed(name: str, x: Any) -> PackedTensor:
    if not is_packed(x):
        raise TypeError(f"{name}: the input must be packed where a parameter is; parameters stay dense")
    return x


def on_channels(name: str, x: Any, rule: Callable[[Tensor], Tensor]) -> PackedTensor:
    """``rule`` on the payload laid out as [cells, C, *the other static dims], which it keeps.

    Raises:
        ValueError: dim 1, where PyTorch has the channels, is not static.
    """
    c, k = (_packed(name, x).order[1] if len(x.order) > 1 else 0), len(x.grid.axes)
    if c <= k:
        found = f"the ragged axis '{x.grid.axes[c - 1].label}'" if c > 0 else "the batch"
        raise ValueError(
            f"{name}: dim 1 of {tuple(x.shape)} has to hold the channels, and is {found}: move them there, "
            "e.g. x.transpose(1, 2), or give rows, x.flatten(0, 1)"
        )
    return like(x, rule(x.values.movedim(c - k, 1)).movedim(1, c - k))


# ------------------------------------------------------------------ over all samples


def batch_norm(
    input: Any,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> PackedTensor:
    """``F.batch_norm``: each channel's statistics are those of all its valid entries, one sample after the
    other; running statistics too. A batch without any entry leaves them as they are.

    Raises:
        ValueError: dim 1 is not static, or in training a channel has one valid entry.
    """

    def rule(values: Tensor) -> Tensor:
        if training:
            structure.check_not_single(
                input.grid.lengths.sum().view(1) * entries_of_channel(values),
                "batch_norm: expected more than 1 value per channel when training; the whole batch has one "
                "valid position",
            )
        given = (running_mean, running_var)
        if not torch.compiler.is_compiling():
            return F.batch_norm(values, *given, weight, bias, training, momentum, eps)
        return batch_norm_of(values, given, weight, bias, training, momentum, eps)

    return on_channels("batch_norm", input, rule)


def synchronised(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PackedTensor:
    """``nn.SyncBatchNorm`` across processes: statistics of the valid positions of all of them."""
    return on_channels("SyncBatchNorm", args[0], lambda values: func(values, *args[1:]))


# ------------------------------------------------------------------ over each sample


def _by_sample(name: str, x: Any) -> Segments | None:
    """The cells of each sample; None for rows, each of which stands for itself."""
    if _packed(name, x).order[0] > 0:
        raise ValueError(f"{name}: dim 0 of {tuple(x.shape)} has to be the batch: transpose it there")
    return None if x.order[0] == ROWS else Segments(x.grid, ())


def group_norm(
    input: Any,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> PackedTensor:
    """``F.group_norm``: each sample's groups of channels over its valid positions.

    (B, C, *) has the batch in dim 0; a row of (T, C, *) is a sample. Half precision is computed in float32.

    Raises:
        ValueError: dim 0 is not the batch, dim 1 not static, or not divisible by ``num_groups``.
    """
    segments = _by_sample("group_norm", input)

    def rule(values: Tensor) -> Tensor:
        if num_groups < 1 or values.shape[1] % num_groups:
            raise ValueError(f"group_norm: {values.shape[1]} channels do not make {num_groups} groups")
        grouped = values.reshape(values.shape[0], num_groups, values.shape[1:].numel() // num_groups)
        if segments is None:
            out = F.layer_norm(wide_of(grouped), grouped.shape[2:], eps=eps)
        else:
            out = norm.normalize_rows(grouped, *segments.maps, segments.rows, eps)[0]
        return affine("group_norm", out.view(values.shape), weight, bias).to(values.dtype)

    return on_channels("group_norm", input, rule)


def instance_norm(
    input: Any,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> PackedTensor:
    """``F.instance_norm``: each channel of each sample over its valid positions.

    Running statistics move to the mean of the samples' own; an empty sample has none.

    Raises:
        ValueError: dim 0 is not the batch, dim 1 not static, or a sample has one value per channel.
    """
    segments = _by_sample("instance_norm", input)
    if segments is None:
        raise ValueError(
            "instance_norm: rows have one value per channel; keep the samples apart: (B, C, n), not (T, C)"
        )
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)

    def rule(values: Tensor) -> Tensor:
        structure.check_not_single(
            input.grid.lengths * entries_of_channel(values),
            "instance_norm: expected more than 1 value per channel in each sample; sample {sample} has one",
        )
        flat = values.flatten(2) if values.dim() > 2 else values.unsqueeze(2)
        out, mean, var = norm.normalize_rows(flat, *segments.maps, segments.rows, eps)
        if running_mean is not None:
            move((running_mean, running_var), *over_samples(segments, flat, mean, var), momentum)
        return affine("instance_norm", out.view(values.shape), weight, bias).to(values.dtype)

    return on_channels("instance_norm", input, rule)


# ------------------------------------------------------------------ over channels


def local_response_norm(
    input: Any, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> PackedTensor:
    """``F.local_response_norm``: each entry over its neighbours among the channels.

    Raises:
        ValueError: fewer than 3 dims, or dim 1 is not static.
    """
    if _packed("local_response_norm", input).dim() < 3:
        raise ValueError(f"local_response_norm: expected at least 3 dims, got {input.dim()}")

    def rule(values: Tensor) -> Tensor:
        padding = [0, 0] * (values.dim() - 2) + [size // 2, (size - 1) // 2]
        means = F.pad(values.square(), padding).unfold(1, size, 1).mean(-1)
        return values / (means * alpha + k).pow(beta)

    return on_channels("local_response_norm", input, rule)


def channel_shuffle(input: Any, groups: int) -> PackedTensor:
    """``F.channel_shuffle``: channels taken in turn from each of ``groups``."""

    def rule(values: Tensor) -> Tensor:
        if groups < 1 or values.shape[1] % groups:
            raise ValueError(f"channel_shuffle: {values.shape[1]} channels do not make {groups} groups")
        return values.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)

    return on_channels("channel_shuffle", input, rule)


def _parameters_first(rule: Callable[..., Any]) -> Callable[..., Any]:
    """``torch``'s order of arguments, in which the parameters stand before the running statistics."""

    def reordered(
        input: Any,
        weight: Any,
        bias: Any,
        running_mean: Any,
        running_var: Any,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
        cudnn_enabled: bool = True,
        **kwargs: Any,
    ) -> Any:
        training = kwargs.get("use_input_stats", training)
        return rule(input, running_mean, running_var, weight, bias, training, momentum, eps)

    return reordered


KIND = "normalisation"
dispatch.register(KIND, normalized_shape(torch.layer_norm), "layer_norm")  # no second look for overrides
dispatch.register(KIND, normalized_shape(), "rms_norm native_layer_norm")
for _rule in (batch_norm, instance_norm, local_response_norm):
    dispatch.register_function(KIND, on_operands(_rule), _rule.__name__, getattr(F, _rule.__name__))
dispatch.register(KIND, on_operands(group_norm), "group_norm")
for _rule in (batch_norm, instance_norm):
    _handler = on_operands(_parameters_first(_rule))
    dispatch.register_function(KIND, _handler, _rule.__name__, getattr(torch, _rule.__name__))
dispatch.PYTHON["sync_batch_norm"] = synchronised
dispatch.register("feature", on_operands(channel_shuffle), "channel_shuffle")

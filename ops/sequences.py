"""Time-major order: PyTorch's packed sequences and ours, rows exchanged.

A ``PackedSequence`` holds the first position of all samples, then the second of all that have one, and so on,
longest samples first; ``batch_sizes`` [longest], on the host, says how many have each position. The row of
position ``t`` of a sample is ``starts[t] + rank[sample]``. Sizes come from host lengths: nothing is read from
the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .axis import Axis, Grid
from .kernels import segment, structure
from .layout import lengths_of
from .tensor import PackedTensor


@dataclass(frozen=True)
class TimeMajor:
    """An axis' rows in time-major order.

    Attributes:
        batch_sizes: int64 [longest] on the host.
        order, rank: the samples by length, longest first, and the place of each sample; int64 [B].
        index, inverse: for each time-major row its packed row, and back; int32 [total].
    """

    batch_sizes: Tensor
    order: Tensor
    rank: Tensor
    index: Tensor
    inverse: Tensor

    @property
    def live(self) -> int:
        """How many samples are not empty."""
        return int(self.batch_sizes[0]) if len(self.batch_sizes) else 0


def time_major(axis: Axis) -> TimeMajor:
    """The time-major order of an axis; kept with it."""

    def build() -> TimeMajor:
        lengths, device = axis.lengths.numpy(), axis.offsets.device
        shorter = np.cumsum(np.bincount(lengths, minlength=axis.max_length + 1))[: axis.max_length]
        sizes = torch.from_numpy(len(lengths) - shorter)
        order = np.argsort(-lengths, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        places = torch.from_numpy(rank).to(device, non_blocking=True)
        slots = _slots(axis, sizes, places)
        samples = torch.from_numpy(order).to(device, non_blocking=True)
        return TimeMajor(sizes, samples, places, structure.invert(slots), slots)

    return axis.cached(("time major",), build)


def _slots(axis: Axis, batch_sizes: Tensor, rank: Tensor) -> Tensor:
    """For each packed row its time-major row, int32 [total]."""
    starts = (batch_sizes.cumsum(0) - batch_sizes).to(rank.device, non_blocking=True)
    slots = starts.index_select(0, axis.positions) + rank.index_select(0, axis.sample_ids)
    return slots.to(torch.int32)


def to_packed_sequence(x: PackedTensor, enforce_sorted: bool = False) -> PackedSequence:
    """PyTorch's packed sequence of the same samples, as ``pack_padded_sequence`` would make it.

    Args:
        x: one ragged axis, (B, n, ...) or (n, B, ...), with static dims in any order behind it.
        enforce_sorted: the samples are longest first already, and the result carries no order.

    Returns:
        ``data`` [total, *static dims] in ``x``'s logical order. Gradients flow back to ``x``.

    Raises:
        ValueError: dims that do not fit, an empty sample, or one longer than that before it.
    """
    if len(x.axes) != 1 or sorted(x.order[:2]) != [0, 1]:
        raise ValueError(
            "a PackedSequence holds one ragged axis, with the batch in the first two dims; got a packed "
            f"tensor of shape {tuple(x.shape)} with the order {x.order}"
        )
    axis = x.axes[0]
    structure.check_longer(axis.lengths, 1, "a PackedSequence holds no empty samples")
    rising = np.nonzero(np.diff(axis.lengths.numpy()) > 0)[0]
    if enforce_sorted and len(rising):
        raise ValueError(f"enforce_sorted: sample {int(rising[0]) + 1} is longer than the one before it")
    time = time_major(axis)
    values = x.values.permute(0, *(c - 1 for c in x.order[2:]))
    data = segment.reorder_rows(values, time.index, time.inverse)
    if enforce_sorted:
        return PackedSequence(data, time.batch_sizes)
    return PackedSequence(data, time.batch_sizes, time.order, time.rank)


def from_packed_sequence(
    sequence: PackedSequence, like: PackedTensor | Axis | None = None, name: str | None = None
) -> PackedTensor:
    """The samples of PyTorch's packed sequence, in the order they were packed from.

    Args:
        sequence: of any dtype and device; its ``data`` [total, *static dims].
        like: a packed tensor over the same samples, or its axis: the result shares that axis (and the
            order of the first two dims). Without it the axis is new, and the order of samples is read from
            the device.
        name: of a new axis.

    Returns:
        (B, n, *static dims). Gradients flow back to ``data``.

    Raises:
        ValueError: ``like`` has other lengths; names the first sample.
    """
    sizes, rank = sequence.batch_sizes.numpy(), sequence.unsorted_indices
    by_length = np.searchsorted(-sizes, -np.arange(int(sizes[0])), side="left")
    data, device = sequence.data, sequence.data.device
    if isinstance(like, PackedTensor):
        axis, order = like.axes[0], like.order[:2] if len(like.axes) == 1 else (0, 1)
    else:
        host = by_length if rank is None else by_length[rank.cpu().numpy()] if like is None else None
        axis, order = like or Axis(host, name=name, device=device), (0, 1)  # type: ignore[arg-type]
    time = time_major(axis)
    if rank is time.rank and torch.equal(sequence.batch_sizes, time.batch_sizes):
        slots, index = time.inverse, time.index
    else:
        if rank is None:
            rank = torch.arange(len(by_length), device=device)
        _require_lengths(axis, torch.from_numpy(by_length).to(device, non_blocking=True), rank)
        slots = _slots(axis, sequence.batch_sizes, rank)
        index = structure.invert(slots)
    values = segment.reorder_rows(data, slots, index)
    order = (*(order if sorted(order) == [0, 1] else (0, 1)), *range(2, data.dim() + 1))
    return PackedTensor(values, Grid((axis,)), order)


def _require_lengths(axis: Axis, by_length: Tensor, rank: Tensor) -> None:
    if len(rank) != axis.batch_size:
        raise ValueError(
            f"a PackedSequence of {len(rank)} samples for an axis of {axis.batch_size}; none may be empty"
        )
    wrong = by_length.index_select(0, rank) != lengths_of(axis)
    if wrong.device.type != "cpu":
        torch._assert_async(~wrong.any())
    elif wrong.any():
        sample = int(wrong.nonzero()[0])
        raise ValueError(
            f"sample {sample} has {int(by_length[rank[sample]])} positions in the PackedSequence, "
            f"{int(axis.lengths[sample])} along the axis '{axis.label}'"
        )


# ------------------------------------------------------------------ lengths given beside a packed sequence


def require_one_axis(what: str, x: PackedTensor, ndim: int) -> None:
    """Raise ValueError unless an operand of a loss over sequences has a batch and one ragged dim."""
    if x.dim() != ndim or len(x.grid.axes) != 1 or 0 not in x.order:
        dims = "a batch, a ragged and a class dim" if ndim == 3 else "a batch and a ragged dim"
        raise ValueError(f"ctc_loss: packed {what} have {dims}; got {tuple(x.shape)}")


def agreed_lengths(what: str, given: Any, axis: Axis) -> Tensor:
    """The lengths of an axis, and that ``given`` ones are the same."""
    if given is not None:
        lengths = torch.as_tensor(given)
        if lengths.device.type == "cpu":
            structure.check_same(
                lengths.long(), axis.lengths, f"ctc_loss: {what} against the packed operand's"
            )
        else:
            torch._assert_async((lengths == lengths_of(axis)).all())
    return axis.lengths


def on_host(what: str, lengths: Any) -> Tensor:
    """Lengths as int64 on the host."""
    if lengths is None:
        raise ValueError(f"ctc_loss: {what}_lengths are needed where that operand is dense")
    return torch.as_tensor(lengths).cpu().long()

"""Recurrent layers: ``nn.RNN``, ``nn.LSTM`` and ``nn.GRU`` on samples of varying length, and their cells.

The rows are brought to the time-major order of PyTorch's packed sequences by one gather and back by another;
states (layers, B, H) are dense. The cells work on rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from ..align import align, over_cells
from ..kernels import segment
from ..sequences import TimeMajor, time_major
from ..tensor import PackedTensor, is_packed


def layers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.lstm``, ``torch.gru``, ``torch.rnn_tanh`` and ``torch.rnn_relu``, as the modules call them.

    An empty sample's final state is its initial state. (On a dense empty sequence PyTorch raises.)

    Args:
        args: the input, (B, n, C) if ``batch_first``, else (n, B, C); the initial state (a pair for an LSTM)
            of [layers * directions, B, H]; weights and options.

    Returns:
        (output, state) or (output, hidden state, cell state): the output packed, over the input's axis.

    Raises:
        TypeError: the input is dense, or a state is packed.
        ValueError: the input's dims are not those of ``batch_first``.
        NotImplementedError: in a graph.
    """
    name = dispatch.name_of(func)
    if kwargs or len(args) != 9 or not isinstance(args[3], bool):
        raise NotImplementedError(
            f"{name} with batch_sizes takes the data of a PackedSequence: give it the packed tensor alone, "
            "with batch_first, or ops.to_packed_sequence(x).data"
        )
    x, state, weights, *options, batch_first = args
    states = list(state) if isinstance(state, (tuple, list)) else [state]
    if not is_packed(x) or any(is_packed(s) for s in states):
        raise TypeError(f"{name}: the input must be packed and the initial states dense, [layers, B, H]")
    _require_layout(name, x, batch_first)
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            f"{name} of a packed tensor cannot be in a graph: the sizes of its steps depend on lengths. "
            "Exclude it with torch.compiler.disable"
        )
    for s in states:
        if s.dim() != 3 or s.shape[1] != x.batch_size:
            raise ValueError(
                f"{name}: a state of shape {tuple(s.shape)} for a batch of {x.batch_size} samples"
            )
    time, bidirectional = time_major(x.axes[0]), options[-1]
    if time.live:
        data = segment.reorder_rows(x.values, time.index, time.inverse)
        first = [s.index_select(1, time.order[: time.live]) for s in states]
        given = tuple(first) if len(first) > 1 else first[0]
        out, *last = func(data, time.batch_sizes, given, weights, *options)
        out = segment.reorder_rows(out, time.inverse, time.index)
        states = [_all_samples(end, start, time) for end, start in zip(last, states)]
    else:
        out = x.values.new_empty((0, states[0].shape[2] * (1 + bidirectional)))
    return (PackedTensor(out, x.grid, x.order), *states)


def _all_samples(last: Tensor, first: Tensor, time: TimeMajor) -> Tensor:
    """Final states [layers, B, H] of all samples: those of empty ones are the initial states."""
    if time.live < len(time.order):
        last = torch.cat([last, first.index_select(1, time.order[time.live :])], 1)
    return last.index_select(1, time.rank)


def _require_layout(name: str, x: PackedTensor, batch_first: bool) -> None:
    if x.order != ((0, 1, 2) if batch_first else (1, 0, 2)):
        wanted = "(B, n, C), or batch_first=False" if batch_first else "(n, B, C), or batch_first=True"
        raise ValueError(
            f"{name}: the module takes {wanted}, with one ragged axis; got a packed tensor of shape "
            f"{tuple(x.shape)} with the order {x.order}; transpose it"
        )


def cell(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One step on every row: ``torch.lstm_cell`` and its kin, on (T, C) or (B, n, C) with states alike."""
    name = dispatch.name_of(func)
    x, state, *weights = args
    states = list(state) if isinstance(state, (tuple, list)) else [state]
    payloads, layout = align(name, [x, *states])
    rows = [over_cells(values, given, layout) for values, given in zip(payloads, [x, *states])]
    if any(values.dim() != 2 for values in rows) or layout.order[-1] != layout.k + 1:
        raise ValueError(
            f"{name} takes rows of features, the last dim, in a packed tensor without other dims"
        )
    out = func(rows[0], rows[1:] if len(states) > 1 else rows[1], *weights, **kwargs)
    return layout.wrap(out) if isinstance(out, Tensor) else tuple(layout.wrap(values) for values in out)


dispatch.register("recurrent", layers, "lstm gru rnn_tanh rnn_relu", compiles=False)
dispatch.register("recurrent", cell, "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")

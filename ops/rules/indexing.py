"""Indexing by integers, slices, None and Ellipsis, on any logical dims; samples by lists and tensors.

A slice of a ragged axis gives a derived axis (so ``x[:, 1:]`` and ``x[:, :-1]`` share one); an integer
consumes the axis. Samples of the batch are chosen by a slice, a list, a boolean list or a tensor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import dispatch
from ..axis import Axis, Extent, Grid, map_cells
from ..kernels import structure
from ..tensor import ROWS, PackedTensor, is_packed, sample_rows


def getitem(x: PackedTensor, key: Any) -> Any:
    """``x[key]``.

    Raises:
        IndexError: too many indices, or a position that a sample does not have (names the sample).
        NotImplementedError: an index that no rule covers yet; says what to write.
    """
    keys = _expand_ellipsis(key if isinstance(key, tuple) else (key,), len(x.order))
    keys = [_plain(k) for k in keys]
    if sum(1 for k in keys if _is_list(k)) > 1:
        raise NotImplementedError("index with one list or tensor at a time, e.g. x[:, :, ids][samples]")
    plan, dim = [], 0
    for place, k in enumerate(keys):
        if k is not None and dim < len(x.order) and x.order[dim] == 0 and not _is_all(k):
            x, keys[place] = _index_batch(x, k), slice(None)
            if not is_packed(x):
                return x[tuple(keys[:place] + keys[place + 1 :])]
            k = slice(None)
        plan.append((dim, k))
        dim += k is not None
    out: Any = x
    for dim, k in reversed(plan):
        if k is None:
            out = out.unsqueeze(dim)
        elif is_packed(out):
            out = _index_dim(out, dim, k)
        else:
            out = out[(slice(None),) * dim + (k,)]
    return out


def _expand_ellipsis(keys: tuple[Any, ...], ndim: int) -> list[Any]:
    used = sum(1 for k in keys if k is not None and k is not Ellipsis)
    if used > ndim:
        raise IndexError(f"too many indices: {used} for a packed tensor of {ndim} dims")
    place = [i for i, k in enumerate(keys) if k is Ellipsis]
    if not place:
        return list(keys)
    return [*keys[: place[0]], *[slice(None)] * (ndim - used), *keys[place[0] + 1 :]]


def _plain(key: Any) -> Any:
    """Integers of numpy and of tensors as Python's."""
    if isinstance(key, slice):
        bounds = (key.start, key.stop, key.step)
        return slice(*[int(b) if isinstance(b, np.integer) else b for b in bounds])
    if isinstance(key, (bool, np.bool_)) or (
        isinstance(key, Tensor) and key.dim() == 0 and key.dtype == torch.bool
    ):
        raise NotImplementedError("a packed tensor is not indexed by one truth value")
    if _is_list(key) and np.ndim(key) > 1:
        raise NotImplementedError("a packed tensor is indexed by lists and tensors of one dim")
    scalar = isinstance(key, Tensor) and key.dim() == 0
    return int(key) if scalar or isinstance(key, np.integer) else key


def _is_all(key: Any) -> bool:
    return isinstance(key, slice) and key == slice(None)


def _is_list(key: Any) -> bool:
    return isinstance(key, (list, tuple, range, np.ndarray)) or (isinstance(key, Tensor) and key.dim() > 0)


def _index_dim(x: PackedTensor, dim: int, key: Any) -> Any:
    if _is_all(key):
        return x
    c, k = x.order[dim], len(x.grid.axes)
    if c == ROWS:
        return x.to_padded()[(slice(None),) * dim + (key,)]
    if c > k:
        return _index_static(x, dim, c - k, key)
    if isinstance(key, slice):
        return slice_axis(x, c - 1, key)
    if isinstance(key, int):
        return select_position(x, dim, key)
    raise NotImplementedError(
        f"the ragged axis '{x.grid.axes[c - 1].label}' takes a slice or an integer; got {type(key).__name__}"
    )


def _index_static(x: PackedTensor, dim: int, place: int, key: Any) -> PackedTensor:
    if is_packed(key):
        raise NotImplementedError("a packed tensor does not index a packed tensor yet; use to_list()")
    values = x.values[(slice(None),) * place + (key,)]
    if values.dim() == x.values.dim():
        return PackedTensor(values, x.grid, x.order)
    c = x.order[dim]
    order = [e - (e > c) for d, e in enumerate(x.order) if d != dim]
    return PackedTensor(values, x.grid, tuple(order))


def _index_batch(x: PackedTensor, key: Any) -> Any:
    if torch.compiler.is_compiling():
        raise NotImplementedError("choosing samples inside a compiled graph: choose them before the call")
    count = x.batch_size
    if isinstance(key, int):
        if not -count <= key < count:
            raise IndexError(f"sample {key} is out of range for a batch of {count}")
        one = sample_range(x, key % count, key % count + 1)
        return one.to_list()[0]
    if isinstance(key, slice):
        start, stop, step = key.indices(count)
        if step == 1:
            return sample_range(x, start, max(start, stop))
        return sample_rows(x, range(start, stop, step))
    chosen = key.cpu().numpy() if isinstance(key, Tensor) else np.asarray(key)
    if chosen.dtype == np.bool_:
        if chosen.shape != (count,):
            raise IndexError(f"a mask of shape {chosen.shape} does not choose from a batch of {count}")
        chosen = np.nonzero(chosen)[0]
    if chosen.ndim != 1 or (chosen.size and not -count <= chosen.min() <= chosen.max() < count):
        raise IndexError(f"samples {chosen.tolist()} are out of range for a batch of {count}")
    return sample_rows(x, [int(i) % count for i in chosen.tolist()])


def sample_range(x: PackedTensor, start: int, stop: int) -> PackedTensor:
    """Samples ``start`` to ``stop``; the payload is a view."""
    lengths = x.grid.lengths
    first = int(lengths[:start].sum())
    rows = int(lengths[start:stop].sum())
    return PackedTensor(x.values.narrow(0, first, rows), x.grid.select(range(start, stop)), x.order)


def slice_axis(x: PackedTensor, k: int, key: slice) -> PackedTensor:
    """A slice of axis ``k`` of the grid: a derived axis takes its place."""
    axis = x.grid.axes[k]
    start, step = key.start or 0, 1 if key.step is None else key.step
    if step <= 0:
        raise ValueError("slice step must be positive")
    derived = _sliced_axis(axis, start, key.stop, step)
    if derived is axis:
        return x
    axes = list(x.grid.axes)
    axes[k] = derived
    grid = Grid(axes)
    starts, strides = [0] * len(axes), [1] * len(axes)
    starts[k], strides[k] = start, step
    index = grid.part.map(
        f"slice {k} {start} {step} {axis.steps}",
        lambda: map_cells(axes, x.grid.axes, range(len(axes)), starts, strides),
    )
    return PackedTensor(x.values.index_select(0, index), grid, x.order)


def _sliced_axis(axis: Axis, start: int, stop: int | None, step: int) -> Axis:
    if isinstance(stop, Extent) and stop.axis is axis:
        stop = None
    if start >= 0:
        if stop is None or stop < 0:
            axis = axis.derive((stop or 0) - start)
        else:
            axis = axis.derive(-start, cap=stop)
    elif stop is None or stop < 0:
        axis = axis.derive(stop or 0, cap=-start)
    else:
        raise NotImplementedError(
            f"the slice {start}:{stop} of a ragged axis: slice twice, e.g. x[:, {start}:]"
        )
    return axis.derive(step - 1, step)


def select_position(x: PackedTensor, dim: int, position: int) -> Any:
    """One position of a ragged dim: the axis is consumed."""
    k = x.order[dim] - 1
    axes = x.grid.axes
    needed = position + 1 if position >= 0 else -position
    structure.check_longer(axes[k].lengths, needed, f"x[{position}] along the ragged axis '{axes[k].label}'")
    kept = x.grid.others((k,))
    places = [kept.index(j) if j != k else -1 for j in range(len(axes))]
    starts = [position if j == k else 0 for j in range(len(axes))]
    index = map_cells([axes[j] for j in kept], axes, places, starts, [1] * len(axes))
    values = x.values.index_select(0, index)
    order = [c - (c > k + 1) for d, c in enumerate(x.order) if d != dim]
    if kept:
        return PackedTensor(values, x.grid.sub(kept), tuple(order))
    return values.permute(order)


def _getitem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, key = args
    if not is_packed(x):
        raise NotImplementedError("a dense tensor is not indexed by a packed one yet; use index.values")
    return getitem(x, key)


dispatch.PYTHON["__getitem__"] = _getitem

"""Indexing by integers, slices, None, Ellipsis, lists and masks, on any logical dims; assignment.

A slice of a ragged axis gives a derived axis (so ``x[:, 1:]`` and ``x[:, :-1]`` share one); an integer
consumes the axis; a list of positions makes it static. Samples of the batch are chosen by a slice, a
list, a boolean list or a tensor. A packed mask chooses valid rows of every sample.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import dispatch
from ..align import Layout, align, as_positions, dense_payload, packed_payload
from ..axis import Axis, Extent, Grid, map_cells, require_same
from ..kernels import structure
from ..layout import cells_at, lengths_of
from ..segments import Segments
from ..tensor import ROWS, PackedTensor, is_packed, like, sample_rows
from .feature import segments_along, static_dim
from .reshape import in_logical_order
from .shape import on_tensor


def getitem(x: PackedTensor, key: Any) -> Any:
    """``x[key]``.

    Raises:
        IndexError: too many indices, or a position that a sample does not have (names the sample).
        NotImplementedError: an index that no rule covers yet; says what to write.
    """
    keys = _expand_ellipsis(key if isinstance(key, tuple) else (key,), len(x.order))
    if any(is_packed(k) for k in keys):
        return _mask_rows(x, keys)
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
    if _is_list(key):
        return pick(x, dim, key)
    raise NotImplementedError(
        f"the ragged axis '{x.grid.axes[c - 1].label}' takes a slice, an integer or a list of positions; got "
        f"{type(key).__name__}"
    )


def _index_static(x: PackedTensor, dim: int, place: int, key: Any) -> PackedTensor:
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


# ------------------------------------------------------------------ the same positions of every sample


def unstack(x: PackedTensor, dim: int, values: Tensor) -> Any:
    """A result whose ragged dim ``dim`` became static: [rows without its axis, size, *static]."""
    k, kept = len(x.grid.axes), x.grid.others((x.order[dim] - 1,))
    order = _unstacked_order(x, dim)
    return PackedTensor(values, x.grid.sub(kept), order) if k > 1 else values.permute(order)


def _unstacked_order(x: PackedTensor, dim: int) -> tuple[int, ...]:
    c, k = x.order[dim], len(x.grid.axes)
    return tuple(k if e == c else e - (c < e <= k) for e in x.order)


def pick(x: PackedTensor, dim: int, key: Any) -> Any:
    """Positions ``key`` (one list for all samples) of a ragged dim, which becomes static."""
    cells = _picked(x, dim, key, "positions")
    return unstack(x, dim, x.values.index_select(0, cells.flatten()).unflatten(0, cells.shape))


def _picked(x: PackedTensor, dim: int, key: Any, what: str) -> Tensor:
    """The cells [rows without the axis, size] at positions ``key``; negative ones count from the end."""
    positions = torch.as_tensor(key, device=x.device)
    if positions.dtype == torch.bool or positions.is_floating_point():
        raise NotImplementedError(f"the ragged axis takes integer positions or a packed mask; got {key}")
    segments = segments_along(x, dim)
    assert segments is not None
    lengths = segments.counts().view(-1, 1)
    return _cells_of(x, segments, torch.where(positions < 0, positions + lengths, positions), what)


def _cells_of(x: PackedTensor, segments: Segments, positions: Tensor, what: str) -> Tensor:
    """Cells at positions [rows without the axis, size, *] of each segment; checks them."""
    axis, kept = x.grid.axes[segments.axis], segments.kept
    samples = x.grid.sub(kept).sample_ids if kept else torch.arange(x.batch_size, device=x.device)
    structure.check_inside(positions, lengths_of(axis), samples, f"{what} along '{axis.label}'")
    return segments.cells(positions)


# ------------------------------------------------------------------ masks


def _mask_rows(x: PackedTensor, keys: list[Any]) -> PackedTensor:
    """``x[mask]``: the rows that a packed mask over the leading dims chooses, still samples inside.

    The result's first dim holds valid rows, as after ``flatten``; ``unflatten(0, (B, -1))`` of it has the
    batch and a ragged dim.
    """
    mask, rest = keys[0], keys[1:]
    if not is_packed(mask) or mask.dtype != torch.bool or not all(_is_all(k) for k in rest):
        raise NotImplementedError(
            "a packed tensor is indexed by one packed boolean mask over its leading dims; for packed "
            "integers use torch.take_along_dim(x, index, dim)"
        )
    x, mask = in_logical_order(x, with_axes=True), in_logical_order(mask, with_axes=True)
    if x.order[: len(mask.order)] != mask.order or len(mask.grid.axes) != len(x.grid.axes):
        raise ValueError(
            f"a mask of dims {mask.order} does not choose rows of a tensor of dims {x.order}: it needs the "
            "batch and every ragged dim in front, as x has them"
        )
    for a, b in zip(x.grid.axes, mask.grid.axes):
        require_same(a, b, "x[mask]")
    entries, dims = mask.values.flatten(), mask.values.dim()
    offsets = x.grid.offsets * mask.values.shape[1:].numel()
    lengths, offsets, extent, peak, index = structure.select_mask(entries, offsets)
    axis = Axis(lengths, offsets, name=x.grid.axes[0].name, sizes=(extent, peak))
    values = x.values.flatten(0, dims - 1).index_select(0, index)
    return PackedTensor(values, Grid((axis,)), (ROWS, *range(2, values.dim() + 1)))


def masked_select(x: Any, mask: Any) -> PackedTensor:
    """The entries that a mask chooses, in one dim of valid entries."""
    payloads, layout = align("masked_select", [x, mask])
    shape = torch.broadcast_shapes(*(p.shape[1:] for p in payloads))
    values, chosen = (layout.wrap(p.expand(layout.grid.cells, *shape)) for p in payloads)
    return _mask_rows(values, [chosen])


def nonzero(x: PackedTensor, *, as_tuple: bool = False) -> Any:
    """Indices of entries that are not 0, in the padded shape: (found, dims), with samples in the first."""
    return x.to_padded().nonzero(as_tuple=as_tuple)


# ------------------------------------------------------------------ gather and scatter


def _located(x: PackedTensor, dim: int, index: Any, what: str) -> tuple[int, Tensor, Any]:
    """Where ``index`` (of positions along ``dim``) points to in the payload.

    Returns:
        The payload's dim, indices into it, and a function that lays a result or a source out alike.
    """
    place = x.dim_index(dim)
    segments = segments_along(x, place)
    if segments is None:
        layout = Layout(x.grid, x.order)
        payload = packed_payload(what, index, layout)
        return static_dim(x, place, what), payload, layout
    if is_packed(index) and 1 <= index.order[place] <= len(index.grid.axes) or len(x.grid.axes) > 1:
        payload, grid = as_positions(what, index, x, place)
        k = segments.axis
        axis = x.grid.axes[k]
        structure.check_inside(payload, lengths_of(axis), grid.sample_ids, f"{what} along '{axis.label}'")
        return 0, cells_at(grid, x.grid, k, payload), Layout(grid, x.order)
    order = _unstacked_order(x, place)
    payload = index.permute([order.index(d) for d in range(len(order))])
    return 0, _cells_of(x, segments, payload, what).flatten(0, 1), order


def _source(what: str, source: Any, index: Tensor, layout: Any) -> Any:
    """The payload of a source that is laid out like the index."""
    if not isinstance(source, (Tensor, PackedTensor)) or source.dim() == 0:
        return source
    if isinstance(layout, tuple):
        return source.permute([layout.index(d) for d in range(len(layout))]).flatten(0, 1)
    if is_packed(source):
        return packed_payload(what, source, layout)
    return dense_payload(what, source, layout).expand(index.shape)


def gather(x: PackedTensor, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    """Entries at positions ``index`` along ``dim``, inside each sample; the result is laid out like it.

    Raises:
        IndexError: a position that the sample does not have; names it.
    """
    place, cells, layout = _located(x, dim, index, "gather")
    values = x.values.gather(place, cells)
    if isinstance(layout, tuple):
        return values.unflatten(0, (x.batch_size, -1)).permute(layout)
    return layout.wrap(values)


def take_along_dim(x: PackedTensor, indices: Any, dim: int | None = None) -> Any:
    """:func:`gather` that broadcasts static dims of size 1."""
    if dim is None:
        raise NotImplementedError("take_along_dim of a packed tensor needs dim=")
    place, cells, layout = _located(x, dim, indices, "take_along_dim")
    sizes = torch.broadcast_shapes(
        *([1 if d in (0, place) else n for d, n in enumerate(t.shape)] for t in (x.values, cells))
    )
    values, cells = (
        t.expand([t.shape[d] if d in (0, place) else n for d, n in enumerate(sizes)])
        for t in (x.values, cells)
    )
    values = values.gather(place, cells)
    if isinstance(layout, tuple):
        return values.unflatten(0, (x.batch_size, -1)).permute(layout)
    return layout.wrap(values)


def scatter(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The scatter family, out of place and in place: ``index`` holds positions inside each sample."""
    name = dispatch.name_of(func)
    x, dim, index, source, *rest = (*args, *(kwargs.pop(n) for n in _SCATTERED[len(args) :] if n in kwargs))
    place, cells, layout = _located(x, dim, index, name)
    return _write(func, x, place, cells, _source(name, source, cells, layout), *rest, **kwargs)


_SCATTERED = ("input", "dim", "index", "src", "value", "reduce")


def indexed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``index_add`` and its kin: ``index`` [size] names entries of one dim, the same for all samples."""
    name = dispatch.name_of(func)
    x, dim, index, source, *rest = (*args, *(kwargs.pop(n) for n in _INDEXED[len(args) :] if n in kwargs))
    place = x.dim_index(dim)
    if segments_along(x, place) is None:
        if isinstance(source, (Tensor, PackedTensor)) and source.dim():
            layout = Layout(x.grid, x.order)
            payload = packed_payload(name, source, layout) if is_packed(source) else None
            source = dense_payload(name, source, layout) if payload is None else payload
            source = source.expand(x.values.shape[0], *source.shape[1:])
        return _write(func, x, static_dim(x, place, name), index, source, *rest, **kwargs)
    cells, order = _picked(x, place, index, name), _unstacked_order(x, place)
    if is_packed(source):
        target = Layout(x.grid.sub(x.grid.others((x.order[place] - 1,))), order)
        source = packed_payload(name, source, target).flatten(0, 1)
    elif isinstance(source, Tensor) and source.dim():
        source = source.permute([order.index(d) for d in range(len(order))]).flatten(0, 1)
    return _write(func, x, 0, cells.flatten(), source, *rest, **kwargs)


_INDEXED = ("input", "dim", "index", "source", "value", "reduce")


def _write(func: Any, x: PackedTensor, *args: Any, **kwargs: Any) -> PackedTensor:
    """``func`` on the payload; the in-place form changes it, in a graph a copy that replaces it."""
    if not dispatch.name_of(func).endswith("_"):
        return like(x, func(x.values, *args, **kwargs))
    if torch.compiler.is_compiling():
        x.values = x.values.clone()
    func(x.values, *args, **kwargs)
    return x


def index_select(x: PackedTensor, dim: int, index: Any) -> Any:
    """Entries of one dim by number, the same for all samples."""
    return x[(slice(None),) * x.dim_index(dim) + (index,)]


# ------------------------------------------------------------------ assignment


def setitem(x: PackedTensor, key: Any, value: Any) -> None:
    """``x[key] = value`` for every key that ``x[key]`` takes; ``value`` broadcasts to what it gives."""
    keys = key if isinstance(key, tuple) else (key,)
    if len(keys) == 1 and is_packed(keys[0]) and not is_packed(value):
        mask = keys[0][(..., *[None] * (len(x.order) - len(keys[0].order)))]
        x.copy_(torch.where(mask, torch.as_tensor(value, dtype=x.dtype, device=x.device), x))
        return
    count = x.values.numel()
    numbers = like(x, torch.arange(count, device=x.device).view(x.values.shape))
    chosen = getitem(numbers, key)
    if not is_packed(chosen):
        if is_packed(value):
            raise ValueError("x[key] = value: the key gives a dense tensor, the value is packed")
        where = chosen
        source = torch.as_tensor(value, dtype=x.dtype, device=x.device).expand(where.shape)
    else:
        where = chosen.values
        source = _payload_for(value, chosen, x).expand(where.shape)
    _write(torch.Tensor.put_, x, where, source.to(x.dtype))


def _payload_for(value: Any, chosen: PackedTensor, x: PackedTensor) -> Tensor:
    layout = Layout(chosen.grid, chosen.order)
    if not is_packed(value):
        return dense_payload("x[key] = value", torch.as_tensor(value, device=x.device), layout)
    if len(value.order) != len(chosen.order):
        raise ValueError(f"x[key] = value: {len(chosen.order)} dims, the value has {len(value.order)}")
    return packed_payload("x[key] = value", value, layout)


# ------------------------------------------------------------------ a dense tensor by packed indices


def _index_dense(x: Tensor, key: Any) -> PackedTensor:
    """``table[ids]``: dims of a dense tensor looked up for every position of packed integers."""
    keys = key if isinstance(key, tuple) else (key,)
    packed = [k for k in keys if is_packed(k)]
    if any(k.dtype == torch.bool for k in packed) or not all(is_packed(k) or _is_all(k) for k in keys):
        raise NotImplementedError(
            "a dense tensor is indexed by packed integers and full slices; a packed mask has another structure"
        )
    payloads, layout = align("indexing", packed)
    stream = iter(payloads)
    first, last = (f(i for i, k in enumerate(keys) if is_packed(k)) for f in (min, max))
    if last - first + 1 != len(packed):
        raise NotImplementedError("packed indices of a dense tensor must stand next to each other")
    values = x[tuple(next(stream) if is_packed(k) else k for k in keys)].movedim(first, 0)
    inner, k = len(layout.order), layout.k
    static = inner - 1 - k
    before = range(k + 1, k + 1 + first)
    middle = [e + first if e > k else e for e in layout.order]
    after = range(k + 1 + first + static, values.dim() + k)
    return PackedTensor(values, layout.grid, (*before, *middle, *after))


def _getitem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, key = args
    return getitem(x, key) if is_packed(x) else _index_dense(x, key)


def _setitem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x, key, value = args
    if not is_packed(x):
        raise NotImplementedError("packed values are not written into a dense tensor; use x.to_padded()")
    setitem(x, key, value)


dispatch.PYTHON["__getitem__"] = _getitem
dispatch.PYTHON["__setitem__"] = _setitem
dispatch.register_function("indexing", _getitem, "getitem", Tensor.__getitem__)
dispatch.register_function("indexing", _setitem, "setitem", Tensor.__setitem__)
for _rule, _names in {
    gather: "gather",
    take_along_dim: "take_along_dim",
    index_select: "index_select",
    masked_select: "masked_select",
    nonzero: "nonzero argwhere",
}.items():
    dispatch.register("indexing", on_tensor(_rule), _names)
for _handler, _names in {
    scatter: "scatter scatter_add scatter_reduce",
    indexed: "index_add index_copy index_fill index_reduce",
}.items():
    dispatch.register("indexing", _handler, [f"{n}{end}" for n in _names.split() for end in ("", "_")])

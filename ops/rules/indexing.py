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
from ..align import Layout, align, dense_payload, packed_payload
from ..axis import Axis, Grid, require_same
from ..cells import (
    laid_out,
    located,
    picked,
    sample_range,
    segments_along,
    select_position,
    slice_axis,
    source_payload,
    static_dim,
    unstack,
    unstacked_order,
)
from ..kernels import structure
from ..keys import expand_ellipsis, is_all, is_list, plain
from ..reshaping import in_logical_order
from ..tensor import ROWS, PackedTensor, is_packed, like, sample_rows
from .shape import on_operands, on_tensor, unsqueeze


def getitem(x: PackedTensor, key: Any) -> Any:
    """``x[key]``.

    Raises:
        IndexError: too many indices, or a position that a sample does not have (names the sample).
        NotImplementedError: an index that no rule covers yet; says what to write.
    """
    keys = expand_ellipsis(key if isinstance(key, tuple) else (key,), len(x.order))
    if all(k is None or is_all(k) for k in keys):
        return _new_dims(x, keys)
    if any(is_packed(k) for k in keys):
        return _mask_rows(x, keys)
    keys = [plain(k) for k in keys]
    if sum(1 for k in keys if is_list(k)) > 1:
        raise NotImplementedError("index with one list or tensor at a time, e.g. x[:, :, ids][samples]")
    plan, dim = [], 0
    for place, k in enumerate(keys):
        if k is not None and dim < len(x.order) and x.order[dim] == 0 and not is_all(k):
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


def _new_dims(x: PackedTensor, keys: list[Any]) -> PackedTensor:
    """``x[key]`` of ``None`` and ``:`` only."""
    for dim, k in enumerate(keys):
        if k is None:
            x = unsqueeze(x, dim)
    return x


def _index_dim(x: PackedTensor, dim: int, key: Any) -> Any:
    if is_all(key):
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
    if is_list(key):
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


# ------------------------------------------------------------------ the same positions of every sample


def pick(x: PackedTensor, dim: int, key: Any) -> Any:
    """Positions ``key`` (one list for all samples) of a ragged dim, which becomes static."""
    cells = picked(x, dim, key, "positions")
    return unstack(x, dim, x.values.index_select(0, cells.flatten()).unflatten(0, cells.shape))


# ------------------------------------------------------------------ masks


def _mask_rows(x: PackedTensor, keys: list[Any]) -> PackedTensor:
    """``x[mask]``: the rows that a packed mask over the leading dims chooses, still samples inside.

    The result's first dim holds valid rows, as after ``flatten``; ``unflatten(0, (B, -1))`` of it has the
    batch and a ragged dim.
    """
    mask, rest = keys[0], keys[1:]
    if not is_packed(mask) or mask.dtype != torch.bool or not all(is_all(k) for k in rest):
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


def masked_scatter(x: Any, mask: Any, source: Any) -> PackedTensor:
    """Entries under a mask replaced by those of ``source``, in order.

    A dense source goes on from sample to sample, as over a padded batch; of a packed one each sample takes
    its own entries, which have to be as many as its mask chooses.
    """
    payloads, layout = align("masked_scatter", [x, mask])
    if layout.order != tuple(range(len(layout.order))):
        raise ValueError(
            "masked_scatter fills in the order of dims: permute to the batch, ragged dims, static dims"
        )
    shape = torch.broadcast_shapes(*(p.shape[1:] for p in payloads))
    values, chosen = (p.expand(layout.grid.cells, *shape) for p in payloads)
    if is_packed(source):
        source, found = source.reshape(-1), _mask_rows(layout.wrap(values), [layout.wrap(chosen)])
        what = "masked_scatter, entries that the mask chooses against the source's"
        structure.check_same(found.grid.lengths, source.grid.lengths, what)
        source = source.values
    return layout.wrap(values.masked_scatter(chosen, source))


def nonzero(x: PackedTensor, *, as_tuple: Any = False) -> Any:
    """Indices of entries that are not 0, in the padded shape: (found, dims), with samples in the first."""
    return x.to_padded().nonzero(as_tuple=as_tuple)


# ------------------------------------------------------------------ gather and scatter


def gather(x: PackedTensor, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    """Entries at positions ``index`` along ``dim``, inside each sample; the result is laid out like it.

    Raises:
        IndexError: a position that the sample does not have; names it.
    """
    place, cells, layout = located(x, dim, index, "gather")
    return laid_out(x, x.values.gather(place, cells), layout)


def take_along_dim(x: PackedTensor, indices: Any, dim: int | None = None) -> Any:
    """:func:`gather` that broadcasts static dims of size 1."""
    if dim is None:
        raise NotImplementedError("take_along_dim of a packed tensor needs dim=")
    place, cells, layout = located(x, dim, indices, "take_along_dim")
    sizes = torch.broadcast_shapes(
        *([1 if d in (0, place) else n for d, n in enumerate(t.shape)] for t in (x.values, cells))
    )
    values, cells = (
        t.expand([t.shape[d] if d in (0, place) else n for d, n in enumerate(sizes)])
        for t in (x.values, cells)
    )
    return laid_out(x, values.gather(place, cells), layout)


def take(x: Any, index: Any) -> PackedTensor:
    """Entries at packed positions: in each sample's entries in one dim, or in those of a dense table."""
    if not is_packed(index):
        raise ValueError(
            "take of a packed tensor needs packed positions inside each sample; for the same positions of "
            "every sample use x.index_select(dim, index)"
        )
    if index.dtype != torch.int64:
        raise RuntimeError(f"take: positions are int64, not {index.dtype}; a mask chooses by x[mask]")
    if not is_packed(x):
        return like(index, torch.take(x, index.values))
    if x.batch_size != index.batch_size:
        raise ValueError(f"take: batches of {x.batch_size} and {index.batch_size} samples")
    entries = x.reshape(-1)
    part, samples = entries.grid.part, index.grid.sample_ids
    counts = structure.counts(part.offsets, part.batch_size)
    first, count = (
        t.index_select(0, samples).view(-1, *[1] * (index.values.dim() - 1)) for t in (part.offsets, counts)
    )
    positions = torch.where(index.values < 0, index.values + count, index.values)
    structure.check_inside(positions, counts, samples, "take")
    found = entries.values.flatten().index_select(0, (first + positions).flatten())
    return like(index, found.view_as(positions))


def scatter(name: str, inplace: bool) -> dispatch.Handler:
    """The scatter family: ``index`` holds positions inside each sample."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, dim, index, source, *rest = _operands(("input", "dim", "index", "src", "value"), args, kwargs)
        place, cells, layout = located(x, dim, index, name)
        source = source_payload(name, source, layout)
        return _write(func, x, inplace, place, cells, source, *rest, **kwargs)

    return handler


def indexed(name: str, inplace: bool) -> dispatch.Handler:
    """``index_add`` and its kin: ``index`` [size] names entries of one dim, the same for all samples."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, dim, index, source, *rest = _operands(("input", "dim", "index", "source", "value"), args, kwargs)
        place = x.dim_index(dim)
        segments = segments_along(x, place)
        layout: Any = Layout(x.grid, x.order)
        if segments is None:
            where, cells = static_dim(x, place, name), index
            source = source_payload(name, source, layout)
        else:
            where, cells, order = 0, picked(x, place, index, name).flatten(), unstacked_order(x, place)
            layout = Layout(x.grid.sub(segments.kept), order) if segments.kept else order
            source = source_payload(name, source, layout)
            if segments.kept and isinstance(source, Tensor) and source.dim():
                source = source.flatten(0, 1)
        return _write(func, x, inplace, where, cells, source, *rest, **kwargs)

    return handler


def _operands(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Arguments in order, those that were given by name taken out of ``kwargs``."""
    return [*args, *(kwargs.pop(name) for name in names[len(args) :] if name in kwargs)]


def _write(func: Any, x: PackedTensor, inplace: bool, *args: Any, **kwargs: Any) -> PackedTensor:
    """``func`` on the payload; the in-place form changes it, in a graph a copy that replaces it."""
    if not inplace:
        return like(x, func(x.values, *args, **kwargs))
    if torch.compiler.is_compiling():
        x.values = x.values.clone()
    func(x.values, *args, **kwargs)
    return x


def index_select(x: PackedTensor, dim: int, index: Any) -> Any:
    """Entries of one dim by number, the same for all samples."""
    return x[(slice(None),) * x.dim_index(dim) + (index,)]


# ------------------------------------------------------------------ assignment


def setitem(x: Any, key: Any, value: Any, accumulate: bool = False) -> None:
    """``x[key] = value`` for every key that ``x[key]`` takes; ``value`` broadcasts to what it gives.

    With ``accumulate`` it is added, as often as a position is named.
    """
    keys = key if isinstance(key, tuple) else (key,)
    if len(keys) == 1 and is_packed(keys[0]) and not is_packed(value):
        mask = keys[0][(..., *[None] * (len(x.order) - len(keys[0].order)))]
        value = torch.as_tensor(value, dtype=x.dtype, device=x.device)
        x.copy_(torch.where(mask, x + value if accumulate else value, x))
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
    _write(torch.Tensor.put_, x, True, where, source.to(x.dtype), accumulate)


def index_put(
    x: PackedTensor, indices: Any, values: Any, accumulate: bool = False, *, inplace: bool = False
) -> PackedTensor:
    """A copy with ``x[indices] = values``, or added to where they accumulate."""
    out = x if inplace else x.clone()
    setitem(out, tuple(indices), values, accumulate)
    return out


def index_put_(x: PackedTensor, indices: Any, values: Any, accumulate: bool = False) -> PackedTensor:
    """:func:`index_put` into ``x`` itself."""
    return index_put(x, indices, values, accumulate, inplace=True)


def select_scatter(x: PackedTensor, src: Any, dim: int, index: int) -> PackedTensor:
    """A copy with one position of a dim replaced."""
    _require_dims("select_scatter", src, len(x.order) - 1)
    return index_put(x, [*[slice(None)] * x.dim_index(dim), index], src)


def slice_scatter(
    x: PackedTensor, src: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> PackedTensor:
    """A copy with a slice of a dim replaced."""
    _require_dims("slice_scatter", src, len(x.order))
    return index_put(x, [*[slice(None)] * x.dim_index(dim), slice(start, end, step)], src)


def _require_dims(what: str, src: Any, dims: int) -> None:
    if src.dim() != dims:
        raise ValueError(f"{what}: a source of {dims} dims is needed; got one of {src.dim()}")


def _payload_for(value: Any, chosen: PackedTensor, x: PackedTensor) -> Tensor:
    layout = Layout(chosen.grid, chosen.order)
    if not is_packed(value):
        value = torch.as_tensor(value, device=x.device)
        return dense_payload("x[key] = value", value, layout) if value.dim() else value
    if len(value.order) != len(chosen.order):
        raise ValueError(f"x[key] = value: {len(chosen.order)} dims, the value has {len(value.order)}")
    return packed_payload("x[key] = value", value, layout)


# ------------------------------------------------------------------ a dense tensor by packed indices


def _index_dense(x: Tensor, key: Any) -> PackedTensor:
    """``table[ids]``: dims of a dense tensor looked up for every position of packed integers."""
    keys = key if isinstance(key, tuple) else (key,)
    packed = [k for k in keys if is_packed(k)]
    if any(k.dtype == torch.bool for k in packed) or not all(is_packed(k) or is_all(k) for k in keys):
        raise NotImplementedError(
            "a dense tensor is indexed by packed integers and full slices; a packed mask does not fit it"
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
        raise NotImplementedError(
            "a dense tensor takes neither packed keys nor packed values; use x.to_padded()"
        )
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
    index_put: "index_put",
    index_put_: "index_put_",
    select_scatter: "select_scatter",
    slice_scatter: "slice_scatter",
}.items():
    dispatch.register("indexing", on_tensor(_rule), _names)
dispatch.register("indexing", on_operands(take), "take")
dispatch.register("indexing", on_operands(masked_scatter), "masked_scatter")
for _family, _names in {
    scatter: "scatter scatter_add scatter_reduce",
    indexed: "index_add index_copy index_fill index_reduce",
}.items():
    for _name in _names.split():
        dispatch.register("indexing", _family(_name, inplace=False), _name)
        dispatch.register("indexing", _family(_name, inplace=True), f"{_name}_")

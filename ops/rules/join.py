"""Joining and splitting along any dim, repeats, and padding.

Along the batch, samples follow each other; along a ragged dim, each sample's positions do, and lengths
add up: parts of a fixed size shift them, so that ``cat([cls, x], 1)[:, 1:]`` is back on the axis of
``x``. A dense part is read as any dense operand is: (B, s, C) puts ``s`` positions into every sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import dispatch
from ..align import align, as_positions, over_cells
from ..cells import sample_range, static_dim
from ..kernels import segment, structure
from ..kernels.define import recorded
from ..layout import append_grids, cells_at, interleaved, lengths_of, positions_of, replaced
from ..reshaping import in_logical_order
from ..tensor import ROWS, PackedTensor, is_packed, like, sample_rows
from .shape import dims_of, on_operands, on_tensor

# ------------------------------------------------------------------ cat and stack


def cat(tensors: Sequence[Any], dim: int = 0, *, axis: int | None = None, out: Any = None) -> Any:
    """Tensors one after the other along ``dim``; at least one is packed.

    Raises:
        ValueError: dims or structures that do not fit; names them.
    """
    dispatch.refuse_out("cat", {"out": out})
    parts = list(tensors)
    first = _first_packed(parts)
    place = first.dim_index(dim if axis is None else axis)
    for x in parts:
        if x.dim() != first.dim():
            raise ValueError(f"cat: tensors of {first.dim()} and {x.dim()} dims; unsqueeze one of them")
    ragged = [x for x in parts if is_packed(x) and 1 <= x.order[place] <= len(x.grid.axes)]
    if ragged:
        return _cat_positions(parts, ragged[0], place)
    if first.order[place] <= 0:
        return _cat_samples(parts)
    return _cat_static(parts, place)


def _first_packed(tensors: Sequence[Any]) -> PackedTensor:
    for x in tensors:
        if is_packed(x):
            return x
    raise TypeError("a list of packed and dense tensors was expected")


def stack(tensors: Sequence[Any], dim: int = 0, *, out: Any = None) -> Any:
    """Tensors side by side along a new static dim."""
    place = dim % (_first_packed(tensors).dim() + 1)
    return cat([x.unsqueeze(place) for x in tensors], place, out=out)


def _cat_static(parts: list[Any], place: int) -> PackedTensor:
    payloads, layout = align("cat", parts)
    for x in parts:
        if is_packed(x) and len(x.grid.axes) != layout.k:
            raise ValueError(
                f"cat does not broadcast: one tensor has the axes {[a.label for a in x.grid.axes]}, another "
                f"{[a.label for a in layout.grid.axes]}; give it the others by expand_as"
            )
    rows = [over_cells(values, x, layout) for values, x in zip(payloads, parts)]
    return layout.wrap(torch.cat(rows, layout.order[place] - layout.k))


def _cat_samples(parts: list[Any]) -> PackedTensor:
    if not all(is_packed(x) for x in parts):
        raise ValueError("cat along the batch takes packed tensors only: pack the dense one with from_list")
    if any(x.order != parts[0].order for x in parts):
        parts = [in_logical_order(x, with_axes=True) for x in parts]
    for x in parts:
        if x.order != parts[0].order:
            raise ValueError(
                f"cat along the batch: dims {parts[0].order} and {x.order} do not hold the same; permute one"
            )
    grid = append_grids([x.grid for x in parts])
    return PackedTensor(torch.cat([x.values for x in parts]), grid, parts[0].order)


def _cat_positions(parts: list[Any], base: PackedTensor, place: int) -> PackedTensor:
    k = base.order[place] - 1
    payloads, grids = [], []
    for x in parts:
        values, grid = as_positions("cat", x, base, place)
        payloads.append(values)
        grids.append(grid)
    axis = grids[0].axes[k].join([grid.axes[k] for grid in grids[1:]])
    grid = replaced(base.grid, k, axis)
    parents = tuple((a.axes[k].token, a.axes[k].steps) for a in grids)
    index = grid.part.cached(("cat", k, parents), lambda: interleaved(grids, grid, k))
    rows = torch.cat(payloads)
    if not recorded(rows):
        return PackedTensor(rows.index_select(0, index), grid, base.order)
    inverse = grid.part.cached(("cat back", k, parents), lambda: structure.invert(index))
    return PackedTensor(segment.reorder_rows(rows, index, inverse), grid, base.order)


def hstack(tensors: Sequence[Any], *, out: Any = None) -> Any:
    """``cat`` along dim 1."""
    return cat(tensors, 1, out=out)


def vstack(tensors: Sequence[Any], *, out: Any = None) -> Any:
    """``cat`` along dim 0, the batch where it stands there."""
    return cat(tensors, 0, out=out)


def dstack(tensors: Sequence[Any], *, out: Any = None) -> Any:
    """``cat`` along dim 2, of tensors of at least three dims."""
    return cat([atleast(x, 3) for x in tensors], 2, out=out)


# ------------------------------------------------------------------ split


def splitter(name: str, default: int | None = 0) -> Callable[..., Any]:
    """``split`` and its kin: parts of a static dim or of the batch."""
    function = getattr(torch, name)

    def rule(x: PackedTensor, sizes: Any, dim: int = 0) -> Any:
        c = x.order[x.dim_index(dim)]
        if c == 0:
            return _sample_ranges(x, function(torch.arange(x.batch_size), sizes))
        if c > len(x.grid.axes) or c == ROWS:
            return tuple(like(x, part) for part in function(x.values, sizes, static_dim(x, dim, name)))
        if name == "tensor_split" and isinstance(sizes, int):
            return tuple(_nth_part(x, c - 1, i, sizes) for i in range(sizes))
        raise ValueError(
            f"{name} of the ragged axis '{x.grid.axes[c - 1].label}' has no fixed number of parts; slice it, "
            "or take tensor_split(x, parts, dim), which gives every sample as many"
        )

    return rule


def _sample_ranges(x: PackedTensor, parts: Sequence[Tensor]) -> tuple[PackedTensor, ...]:
    start, found = 0, []
    for part in parts:
        found.append(sample_range(x, start, start + len(part)))
        start += len(part)
    return tuple(found)


def _nth_part(x: PackedTensor, k: int, i: int, parts: int) -> PackedTensor:
    """Part ``i`` of each sample's positions cut into ``parts``, the first ones longer by one."""
    axis = x.grid.axes[k]
    grid = replaced(x.grid, k, axis.derive(parts - 1 - i, parts))
    lengths = lengths_of(axis)
    starts = i * (lengths // parts) + (lengths % parts).clamp_max(i)
    index = cells_at(grid, x.grid, k, positions_of(grid, k) + starts.index_select(0, grid.sample_ids))
    return PackedTensor(x.values.index_select(0, index), grid, x.order)


def unbind(x: PackedTensor, dim: int = 0) -> Any:
    """The samples of the batch dim, or the entries of a static one."""
    place = x.dim_index(dim)
    if x.order[place] == 0:
        return tuple(x.to_list())
    return tuple(x.select(place, i) for i in range(x.values.shape[static_dim(x, dim, "unbind")]))


def _even_splitter(name: str, dim: int) -> Callable[..., Any]:
    """``hsplit`` and its kin: ``tensor_split`` along one dim, into parts of one size."""

    def rule(x: PackedTensor, sizes: Any) -> Any:
        c, k = x.order[x.dim_index(dim)], len(x.grid.axes)
        if isinstance(sizes, int) and 1 <= c <= k:
            raise ValueError(f"{name} needs parts of one size; tensor_split cuts a ragged axis in {sizes}")
        if isinstance(sizes, int) and (sizes < 1 or x.size(dim) % sizes):
            raise ValueError(f"{name}: dim {dim} of size {x.size(dim)} is not divisible by {sizes}")
        return splitter("tensor_split")(x, sizes, dim)

    return rule


# ------------------------------------------------------------------ repeats


def repeat(x: PackedTensor, *sizes: Any) -> PackedTensor:
    """Every dim as often as its entry of ``sizes`` says; more sizes than dims add dims in front."""
    times = dims_of(sizes)
    while len(times) > len(x.order):
        x = x.unsqueeze(0)
    if len(times) < len(x.order):
        raise ValueError(f"repeat: {len(times)} numbers for a packed tensor of {len(x.order)} dims")
    k, static = len(x.grid.axes), [1] * x.values.dim()
    for dim, (c, n) in enumerate(zip(x.order, times)):
        if c > k:
            static[c - k] = n
        elif n != 1:
            x = cat([x] * n, dim) if n else x[(slice(None),) * dim + (slice(0, 0),)]
    return like(x, x.values.repeat(static)) if any(n != 1 for n in static) else x


def tile(x: PackedTensor, *sizes: Any) -> PackedTensor:
    """:func:`repeat` with 1 for dims in front that have no number."""
    times = dims_of(sizes)
    return repeat(x, [1] * (len(x.order) - len(times)) + times)


def repeat_interleave(
    x: PackedTensor, repeats: Any, dim: int | None = None, *, output_size: int | None = None
) -> PackedTensor:
    """Every entry of one dim ``repeats`` times in a row."""
    if dim is None:
        raise NotImplementedError("repeat_interleave of a packed tensor needs dim=")
    c = x.order[x.dim_index(dim)]
    if 1 <= c <= len(x.grid.axes) and isinstance(repeats, int):
        grid = replaced(x.grid, c - 1, x.grid.axes[c - 1].repeat(repeats))
        index = cells_at(grid, x.grid, c - 1, positions_of(grid, c - 1) // max(repeats, 1))
        return PackedTensor(x.values.index_select(0, index), grid, x.order)
    if c == 0 and isinstance(repeats, int):
        return sample_rows(x, [i for i in range(x.batch_size) for _ in range(repeats)])
    place = static_dim(x, dim, "repeat_interleave by a tensor")
    return like(x, x.values.repeat_interleave(repeats, place, output_size=output_size))


def expand_as(x: Any, other: Any) -> Any:
    """``x`` over the structure of ``other``, to which it broadcasts."""
    return broadcast_tensors(x, other)[0]


def broadcast_tensors(*tensors: Any) -> tuple[PackedTensor, ...]:
    """Tensors brought to one structure."""
    payloads, layout = align("broadcast_tensors", dims_of(tensors))
    static = torch.broadcast_shapes(*(values.shape[1:] for values in payloads))
    return tuple(layout.wrap(values.expand(layout.grid.cells, *static)) for values in payloads)


def atleast(x: Any, least: int) -> Any:
    """At least ``least`` dims, as ``torch.atleast_3d`` adds them."""
    while x.dim() < least:
        x = x.unsqueeze(-1) if x.dim() == 2 else x.unsqueeze(0)
    return x


def _atleast(least: int) -> Callable[..., Any]:
    def rule(x: Any) -> Any:
        return atleast(x, least)

    return rule


# ------------------------------------------------------------------ padding


def pad(x: PackedTensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    """``F.pad``: pairs of entries before and after, from the last dim on.

    A ragged dim grows by them in every sample; modes other than ``"constant"`` take static dims only.
    """
    n, k = len(x.order), len(x.grid.axes)
    if len(pad) % 2 or len(pad) > 2 * n:
        raise ValueError(f"pad: pairs for at most {n} dims are needed; got {tuple(pad)}")
    static = [0] * (2 * (x.values.dim() - 1))
    for i in range(len(pad) // 2):
        low, high = pad[2 * i], pad[2 * i + 1]
        c = x.order[n - 1 - i]
        if c > k:
            place = x.values.dim() - 1 - (c - k)
            static[2 * place], static[2 * place + 1] = low, high
        elif low or high:
            if c <= 0 or mode != "constant":
                raise ValueError(
                    f"pad: mode '{mode}' does not pad dim {n - 1 - i}, a ragged one or the batch"
                )
            x = _pad_axis(x, n - 1 - i, low, high, value or 0)
    if any(static):
        while not any(static[-2:]):
            static = static[:-2]
        x = like(x, F.pad(x.values, static, mode, value))
    return x


def constant_pad(x: PackedTensor, pads: Sequence[int], value: float = 0) -> Any:
    """:func:`pad` of the mode ``"constant"``."""
    return pad(x, pads, value=value)


def _pad_axis(x: PackedTensor, dim: int, low: int, high: int, value: float) -> PackedTensor:
    keep = slice(-low if low < 0 else None, high if high < 0 else None)
    x, k = x[(slice(None),) * dim + (keep,)], x.order[dim] - 1
    parts = []
    for size in (max(low, 0), max(high, 0)):
        grid = replaced(x.grid, k, x.grid.axes[k].derive(size, cap=0))
        filled = x.values.new_full((grid.cells, *x.values.shape[1:]), value)
        parts.append(PackedTensor(filled, grid, x.order))
    chosen = [part for part, size in zip(parts, (low, high)) if size > 0]
    if not chosen:
        return x
    return cat([*chosen[: low > 0], x, *chosen[low > 0 :]], dim)


for _rule, _names in {
    cat: "cat concat concatenate",
    stack: "stack",
    hstack: "hstack column_stack",
    vstack: "vstack row_stack",
    dstack: "dstack",
    broadcast_tensors: "broadcast_tensors",
    expand_as: "expand_as",
}.items():
    dispatch.register("join", on_operands(_rule), _names)
for _rule, _names in {
    splitter("split"): "split unsafe_split",
    splitter("split_with_sizes"): "split_with_sizes unsafe_split_with_sizes",
    splitter("chunk"): "chunk unsafe_chunk",
    splitter("tensor_split"): "tensor_split",
    unbind: "unbind",
    _even_splitter("hsplit", 1): "hsplit",
    _even_splitter("vsplit", 0): "vsplit",
    _even_splitter("dsplit", 2): "dsplit",
    _atleast(1): "atleast_1d",
    _atleast(2): "atleast_2d",
    _atleast(3): "atleast_3d",
    repeat: "repeat",
    tile: "tile",
    repeat_interleave: "repeat_interleave",
    pad: "pad",
    constant_pad: "constant_pad_nd",
}.items():
    dispatch.register("join", on_tensor(_rule), _names)

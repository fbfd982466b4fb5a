"""Shape operators: dims permuted, added, removed, merged and split. Axes stay what they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .. import dispatch
from ..axis import Extent, Grid
from ..kernels import structure
from ..reshaping import Plan, in_logical_order, is_rest, merged_axis, product
from ..tensor import ROWS, PackedTensor

Handler = dispatch.Handler


def dims_of(args: Sequence[Any]) -> list[Any]:
    """Dims given one by one or as one sequence."""
    return list(args[0]) if len(args) == 1 and isinstance(args[0], (list, tuple)) else list(args)


def reshape(x: PackedTensor, *shape: Any) -> Any:
    """``x.reshape(shape)``; all entries in one dim are a dense tensor.

    Raises:
        ValueError: the sizes do not fit; names both shapes.
    """
    target = dims_of(shape)
    if len(target) == 1 and is_rest(target[0]) and x.order[-1] > len(x.grid.axes):
        return _all_entries(x)
    plan = Plan(x, target)
    plan.run()
    return plan.build()


def _all_entries(x: PackedTensor) -> PackedTensor:
    """Every valid entry in one dim: rows of an axis whose lengths count entries."""
    x = in_logical_order(x, with_axes=True)
    if x.order != tuple(range(len(x.order))) and ROWS not in x.order:
        raise ValueError(
            "flattening all dims needs the batch first and the ragged dims before the static ones"
        )
    axis = merged_axis(x.grid) if len(x.grid.axes) > 1 else x.grid.axes[0]
    entries = product(x.values.shape[1:])
    return PackedTensor(x.values.reshape(-1), Grid((axis.repeat(entries),)), (ROWS,))


def permute(x: PackedTensor, *dims: Any) -> PackedTensor:
    """Logical dims in another order; free."""
    wanted = [x.dim_index(d) for d in dims_of(dims)]
    if sorted(wanted) != list(range(len(x.order))):
        raise ValueError(f"permute: {tuple(dims_of(dims))} is not a permutation of {len(x.order)} dims")
    return PackedTensor(x.values, x.grid, tuple(x.order[d] for d in wanted))


def transpose(x: PackedTensor, dim0: int, dim1: int) -> PackedTensor:
    """Two logical dims exchanged; free."""
    order = list(x.order)
    a, b = x.dim_index(dim0), x.dim_index(dim1)
    order[a], order[b] = order[b], order[a]
    return PackedTensor(x.values, x.grid, tuple(order))


def movedim(x: PackedTensor, source: Any, destination: Any) -> PackedTensor:
    """Logical dims moved to new places; free."""
    sources = [x.dim_index(d) for d in ([source] if isinstance(source, int) else source)]
    targets = [x.dim_index(d) for d in ([destination] if isinstance(destination, int) else destination)]
    rest = [d for d in range(len(x.order)) if d not in sources]
    for target, moved in sorted(zip(targets, sources)):
        rest.insert(target, moved)
    return permute(x, rest)


def unsqueeze(x: PackedTensor, dim: int) -> PackedTensor:
    """A static dim of size 1 before logical dim ``dim``."""
    n, k = len(x.order), len(x.grid.axes)
    if not -n - 1 <= dim <= n:
        raise IndexError(f"unsqueeze: dim {dim} is out of range for a packed tensor of {n} dims")
    place = dim % (n + 1)
    before = sum(1 for c in x.order[:place] if c > k)
    new = k + 1 + before
    order = [c + 1 if c >= new else c for c in x.order]
    order.insert(place, new)
    return PackedTensor(x.values.unsqueeze(1 + before), x.grid, tuple(order))


def squeeze(x: PackedTensor, dim: Any = None) -> PackedTensor:
    """Static dims of size 1 removed. A ragged dim is never one, whatever its lengths."""
    k = len(x.grid.axes)
    dims = range(len(x.order)) if dim is None else [dim] if isinstance(dim, int) else dim
    places = {x.dim_index(d) for d in dims}
    gone = {d for d in places if x.order[d] > k and x.values.shape[x.order[d] - k] == 1}
    return drop_static(x, gone)


def drop_static(x: PackedTensor, places: set[int]) -> PackedTensor:
    """Logical dims ``places``, static of size 1, removed."""
    k = len(x.grid.axes)
    gone = sorted(x.order[d] for d in places)
    values = x.values
    for c in reversed(gone):
        values = values.squeeze(c - k)
    kept = [c for d, c in enumerate(x.order) if d not in places]
    return PackedTensor(values, x.grid, tuple(c - sum(g < c for g in gone) for c in kept))


def matrix_t(x: PackedTensor) -> PackedTensor:
    """The two dims of a batch of numbers exchanged."""
    if len(x.order) > 2:
        raise ValueError(f"t() takes a tensor of 2 dims; got {len(x.order)}: use x.mT or x.transpose(1, 2)")
    return transpose(x, 0, 1)


def adjoint(x: PackedTensor) -> PackedTensor:
    """The last two dims exchanged, complex entries conjugated."""
    return transpose(PackedTensor(x.values.conj(), x.grid, x.order), -1, -2)


def view(x: PackedTensor, *shape: Any) -> Any:
    """``reshape``, or with a dtype the payload read as another dtype."""
    if len(shape) == 1 and isinstance(shape[0], torch.dtype):
        return PackedTensor(x.values.view(shape[0]), x.grid, x.order)
    return reshape(x, *shape)


def flatten(x: PackedTensor, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Merge neighbouring dims: static ones, ragged ones into one axis, batch and all axes into rows."""
    a, b = x.dim_index(start_dim), x.dim_index(end_dim)
    if a > b:
        raise ValueError(f"flatten: start_dim {start_dim} comes after end_dim {end_dim}")
    shape = list(x.shape)
    return x if a == b else reshape(x, *shape[:a], -1, *shape[b + 1 :])


def unflatten(x: PackedTensor, dim: int, sizes: Sequence[int]) -> Any:
    """Split one dim into ``sizes``."""
    d = x.dim_index(dim)
    shape = list(x.shape)
    return reshape(x, *shape[:d], *sizes, *shape[d + 1 :])


def ravel(x: PackedTensor) -> Tensor:
    """All valid entries, dense."""
    return reshape(x, -1)


def select(x: PackedTensor, dim: int, index: int) -> Any:
    """One position of a dim."""
    return x[(slice(None),) * x.dim_index(dim) + (index,)]


def narrow(x: PackedTensor, dim: int, start: int, length: int) -> Any:
    """``length`` positions of a dim from ``start`` on; every sample must have them."""
    c, size = x.order[x.dim_index(dim)], x.size(dim)
    if start < 0 or length < 0 or (c > len(x.grid.axes) and start + length > size):
        raise ValueError(f"narrow: positions {start} to {start + length} of a dim of size {size}")
    if 1 <= c <= len(x.grid.axes):
        structure.check_longer(x.grid.axes[c - 1].lengths, start + length, "narrow")
    return x[(slice(None),) * x.dim_index(dim) + (slice(start, start + length),)]


def slice_of(x: PackedTensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """``x[start:end:step]`` along a dim."""
    return x[(slice(None),) * x.dim_index(dim) + (slice(start, end, step),)]


def view_as(x: PackedTensor, other: Any) -> PackedTensor:
    """``reshape`` to the shape of another tensor."""
    return reshape(x, list(other.shape))


def expand(x: PackedTensor, *sizes: Any) -> PackedTensor:
    """Static dims of size 1 repeated without a copy; ``-1`` or an entry of ``x.shape`` keeps a dim."""
    k, wanted = len(x.grid.axes), dims_of(sizes)
    if len(wanted) != len(x.order):
        raise ValueError(f"expand: {len(wanted)} sizes for a packed tensor of {len(x.order)} dims")
    target = list(x.values.shape)
    for c, size, current in zip(x.order, wanted, x.shape):
        fixed = 1 <= c <= k and not isinstance(size, Extent) and not torch.compiler.is_compiling()
        if is_rest(size) or (statically_known_true(size == current) and not fixed):
            continue
        if c <= k:
            raise ValueError(
                f"expand: a batch or ragged dim of size {current} cannot become {size}; give -1 or x.shape's"
            )
        target[c - k] = size
    return PackedTensor(x.values.expand(target), x.grid, x.order)


def on_tensor(rule: Any) -> Handler:
    """A handler from a function of (x, *args, **kwargs)."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not args:
            args = (kwargs.pop("input"),)
        if not isinstance(args[0], PackedTensor):
            raise TypeError(f"{dispatch.name_of(func)}: the first operand must be the packed one")
        return rule(*args, **kwargs)

    return handler


def on_operands(rule: Any) -> Handler:
    """A handler from a function of the operator's own arguments."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return rule(*args, **kwargs)

    return handler


def matrix_transpose(x: PackedTensor) -> PackedTensor:
    """The last two dims exchanged."""
    return transpose(x, -1, -2)


for _rule, _names in {
    permute: "permute",
    transpose: "transpose swapaxes swapdims",
    matrix_t: "t",
    adjoint: "adjoint",
    movedim: "movedim moveaxis",
    unsqueeze: "unsqueeze",
    squeeze: "squeeze",
    flatten: "flatten",
    unflatten: "unflatten",
    ravel: "ravel",
    reshape: "reshape",
    select: "select",
    narrow: "narrow",
    view: "view",
    view_as: "view_as reshape_as",
    expand: "expand broadcast_to",
}.items():
    dispatch.register("shape", on_tensor(_rule), _names)
PackedTensor.mT = property(matrix_transpose)  # type: ignore[attr-defined]

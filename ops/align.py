"""Alignment: operands of one operator brought to one layout.

Broadcasting follows PyTorch's rules on logical dims, from the right. It creates axes: a ragged dim of
one operand against a size of 1 in another makes the result ragged there, so (B, n, 1, C) with
(B, 1, n, C) gives (B, n, n, C). A dense operand is read by feature where it meets static dims, by
sample where it meets the batch, by position where it meets a ragged dim.

The result takes the layout of the first operand that has all its axes, else a new grid with the axes
in logical order. Every payload then is [rows, *static], rows being the cells of that grid or 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from .axis import Axis, Grid, require_same
from .kernels import segment
from .kernels.define import recorded
from .layout import positions_of, replaced
from .tensor import ROWS, PackedTensor, is_packed


class Layout:
    """A grid and the order of logical dims over it: what a packed tensor is without its values."""

    def __init__(self, grid: Grid, order: tuple[int, ...]) -> None:
        self.grid = grid
        self.order = order
        self.k = len(grid.axes)

    def wrap(self, values: Tensor) -> PackedTensor:
        """``values`` [cells, *static] with this layout."""
        return PackedTensor(values, self.grid, self.order)

    @property
    def static_dims(self) -> list[int]:
        """The logical dims that are static, in the order of storage."""
        return [self.order.index(c) for c in range(self.k + 1, max(self.order) + 1)]


def align(what: str, operands: Sequence[Any]) -> tuple[list[Any], Layout]:
    """Bring the tensors among ``operands`` to one layout; anything else is passed through.

    Args:
        what: the operator's name, for errors.
        operands: packed tensors, dense tensors, numbers, ...; at least one is packed.

    Returns:
        The payloads, in order, and the layout of the result.

    Raises:
        ValueError: structures that differ, or a size that does not broadcast; names both.
    """
    packed = [x for x in operands if is_packed(x)]
    layout = _result_layout(what, packed)
    payloads = []
    for x in operands:
        if is_packed(x):
            payloads.append(packed_payload(what, x, layout))
        elif isinstance(x, Tensor) and x.dim():
            payloads.append(dense_payload(what, x, layout))
        else:
            payloads.append(x)
    return payloads, layout


def _result_layout(what: str, packed: list[PackedTensor]) -> Layout:
    ndim = len(packed[0].order)
    for x in packed[1:]:
        if len(x.order) != ndim:
            raise ValueError(
                f"{what}: packed operands of {ndim} and {len(x.order)} dims: their batch dims do not meet; "
                "give both as many dims, e.g. x[:, :, None]"
            )
    roles = [_role(what, d, packed) for d in range(ndim)]
    ragged = [d for d, role in enumerate(roles) if isinstance(role, Axis)]
    for x in packed:
        if len(x.grid.axes) == len(ragged) or ROWS in x.order:
            return Layout(x.grid, x.order)
    order, static = [0] * ndim, len(ragged)
    for d, role in enumerate(roles):
        if isinstance(role, Axis):
            order[d] = ragged.index(d) + 1
        elif role != "batch":
            static += 1
            order[d] = static
    return Layout(Grid([role for role in roles if isinstance(role, Axis)]), tuple(order))


def _role(what: str, d: int, packed: list[PackedTensor]) -> Axis | str:
    """What dim ``d`` of the result is: an axis, "batch", "rows" or "static"."""
    found: Axis | str = "static"
    for x in packed:
        c, k = x.order[d], len(x.grid.axes)
        role: Axis | str = (
            "static" if c > k else "batch" if c == 0 else "rows" if c == ROWS else x.grid.axes[c - 1]
        )
        if role == "static":
            size = x.values.shape[c - k]
            if found != "static" and not (isinstance(found, Axis) and size == 1):
                _mismatch(what, d, found, f"the fixed size {size}")
        elif found == "static":
            found = role
        elif isinstance(found, Axis) and isinstance(role, Axis):
            require_same(found, role, f"{what}, dim {d} ('{found.label}' against '{role.label}')")
        elif found != role:
            _mismatch(what, d, found, _role_name(role))
    for x in packed:
        c, k = x.order[d], len(x.grid.axes)
        if found != "static" and c > k and not (isinstance(found, Axis) and x.values.shape[c - k] == 1):
            _mismatch(what, d, found, f"the fixed size {x.values.shape[c - k]}")
    return found


def _role_name(role: Axis | str) -> str:
    return f"the ragged axis {role!r}" if isinstance(role, Axis) else f"the {role} dim"


def _mismatch(what: str, d: int, found: Axis | str, other: str) -> None:
    raise ValueError(
        f"{what}: dim {d} is {_role_name(found)} in one operand and {other} in another; "
        "permute or unsqueeze one of them"
    )


def packed_payload(what: str, x: PackedTensor, layout: Layout) -> Tensor:
    """The payload of a packed operand in another layout: [cells, *static] with 1s where it broadcasts."""
    values, k = x.values, len(x.grid.axes)
    if x.grid is layout.grid and x.order == layout.order:
        return expand_to(values, layout.grid, tuple(range(k)))
    if ROWS in x.order:
        kept = tuple(range(layout.k))
        for a, b in zip(x.grid.axes, layout.grid.axes):
            require_same(a, b, what)
    else:
        kept = tuple(layout.order[x.order.index(j + 1)] - 1 for j in range(k))
        for axis, target in zip(x.grid.axes, kept):
            require_same(axis, layout.grid.axes[target], what)
    static = [x.order[d] - k for d in layout.static_dims]
    single = [d for d in range(1, values.dim()) if d not in static]  # where it broadcasts into an axis
    if static != sorted(static):
        values = values.permute(0, *static, *single)
        single = list(range(1 + len(static), values.dim()))
    if single:
        values = values.squeeze(single[0] if len(single) == 1 else tuple(single))
    return expand_to(values, layout.grid, kept)


def expand_to(values: Tensor, grid: Grid, kept: tuple[int, ...]) -> Tensor:
    """Rows of ``grid.sub(kept)`` repeated over (or re-ordered to) the cells of ``grid``."""
    if kept == tuple(range(len(grid.axes))):
        if torch.compiler.is_compiling():
            torch._check(values.shape[0] == grid.cells)
        return values
    index = grid.map_to(kept)
    if not recorded(values):
        return values.index_select(0, index)
    return segment.expand_rows(values, index, grid.order_by(kept), grid.splits(kept))


def dense_payload(what: str, x: Tensor, layout: Layout) -> Tensor:
    """The payload of a dense operand: [cells or 1, *static], read by feature, sample and position."""
    lead = len(layout.order) - x.dim()
    if lead < 0:
        raise ValueError(
            f"{what}: a dense operand of shape {tuple(x.shape)} has more dims than the packed operand's "
            f"{len(layout.order)}"
        )
    by_dim = {d - lead: c for d, c in enumerate(layout.order) if d >= lead}
    static = [d - lead for d in layout.static_dims]
    varying = sorted((c, d) for d, c in by_dim.items() if c <= layout.k and _meets(what, x, d, c, layout))
    single = [d for d, c in by_dim.items() if c <= layout.k and (c, d) not in varying]
    dims = [d for _, d in varying] + [d for d in static if d >= 0]
    moved = x.permute(*dims, *single)
    shape = [x.shape[d] if d >= 0 else 1 for d in static]
    if not varying:
        return moved.reshape(1, *shape)
    sizes = [x.shape[d] for _, d in varying]
    flat = moved.reshape(-1, *shape) if len(varying) > 1 else moved.reshape(sizes[0], *shape)
    return _read(flat, [c for c, _ in varying], sizes, layout)


def _meets(what: str, x: Tensor, d: int, c: int, layout: Layout) -> bool:
    """Whether dim ``d`` of a dense operand varies along entry ``c`` of the layout (else it has size 1)."""
    size = x.shape[d]
    if guard_or_false(size == 1):
        return False
    if c == 0:
        expected, name = layout.grid.batch_size, "the batch size"
    elif c == ROWS:
        expected, name = layout.grid.cells, "the number of valid rows"
    else:
        axis = layout.grid.axes[c - 1]
        expected, name = axis.max_length, f"the largest length of axis '{axis.label}'"
    if torch.compiler.is_compiling():
        torch._check(size == expected)
    elif size != expected:
        raise ValueError(
            f"{what}: a dense operand of shape {tuple(x.shape)} has {size} where {name} is {expected}; "
            f"slice it to x.shape, or keep a size of 1 to broadcast"
        )
    return True


def _read(flat: Tensor, entries: list[int], sizes: list[int], layout: Layout) -> Tensor:
    grid = layout.grid
    if entries == [ROWS]:
        return flat
    if entries == [0]:
        return expand_to(flat, grid, ())
    index = None
    for c, size in zip(entries, sizes):
        coordinate = grid.sample_ids if c == 0 else positions_of(grid, c - 1)
        index = coordinate if index is None else index.long() * size + coordinate
    assert index is not None
    return flat.index_select(0, index)


def over_cells(values: Tensor, x: Any, layout: Layout) -> Tensor:
    """The payload of a dense operand that does not vary along the rows, repeated over them."""
    return values if is_packed(x) else values.expand(layout.grid.cells, *values.shape[1:])


def as_positions(what: str, x: Any, base: PackedTensor, place: int) -> tuple[Tensor, Grid]:
    """The payload of ``x`` in the layout of ``base``, whose dim ``place`` is ragged, and its grid.

    ``x`` may have another axis there. A static dim there is an axis of one length; a dense operand
    (B, s, ...) has ``s`` positions in every sample.
    """
    if is_packed(x) and x.grid is base.grid and x.order == base.order:
        return x.values, x.grid
    k = base.order[place] - 1
    if not is_packed(x):
        grid = replaced(base.grid, k, base.grid.axes[k].derive(x.shape[place], cap=0))
        layout = Layout(grid, base.order)
        return over_cells(dense_payload(what, x, layout), x, layout), grid
    if x.order[place] > len(x.grid.axes):
        x = _static_as_axis(x, place)
    if len(x.grid.axes) != len(base.grid.axes):
        raise ValueError(
            f"{what}: one tensor has the ragged axes {[a.label for a in base.grid.axes]}, another "
            f"{[a.label for a in x.grid.axes]}"
        )
    layout = Layout(replaced(base.grid, k, x.grid.axes[x.order[place] - 1]), base.order)
    return packed_payload(what, x, layout), layout.grid


def _static_as_axis(x: PackedTensor, place: int) -> PackedTensor:
    k, c = len(x.grid.axes), x.order[place]
    axis = x.grid.axes[0].derive(x.values.shape[c - k], cap=0)
    values = x.values.movedim(c - k, 1).flatten(0, 1)
    order = tuple(k + 1 if e == c else e + 1 if k < e < c else e for e in x.order)
    return PackedTensor(values, Grid([*x.grid.axes, axis]), order)

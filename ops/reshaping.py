"""The plan of a reshape: dims of a packed tensor matched with target sizes, from left to right.

A ragged dim is named by its entry of ``x.shape`` (in a graph: a symbol equal to it), a plain integer is a
fixed size, ``-1`` is the rest: the static dims there, the axes there merged into one, or batch and axes
as valid rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .align import Layout, packed_payload
from .axis import Axis, Extent, Grid, same_axis
from .kernels import structure
from .tensor import ROWS, PackedTensor
from .tokens import Token

REST = -1


def in_logical_order(x: PackedTensor, with_axes: bool) -> PackedTensor:
    """``x`` with static dims (and, if asked for, axes) stored in the order of the logical dims."""
    k = len(x.grid.axes)
    axes = [c for c in x.order if 1 <= c <= k]
    grid = x.grid
    if with_axes and axes != sorted(axes):
        grid = Grid([x.grid.axes[c - 1] for c in axes])
    numbers, static = iter(range(1, k + 1)), iter(range(k + 1, len(x.order) + k + 1))
    order = tuple(
        c if c <= 0 else next(static) if c > k else c if grid is x.grid else next(numbers) for c in x.order
    )
    if order == x.order:
        return x
    layout = Layout(grid, order)
    return layout.wrap(packed_payload("reshape", x, layout))


def merged_axis(grid: Grid) -> Axis:
    """One axis in place of all axes of a grid: its lengths are the cells of each sample."""

    def build() -> Axis:
        token = Token("product", tuple((axis.token, axis.steps) for axis in grid.axes))
        name = "*".join(axis.label for axis in grid.axes)
        if torch.compiler.is_compiling():
            longest: Any = 1
            for axis in grid.axes:
                longest = longest * axis.max_length
        else:
            longest = int(grid.lengths.max()) if grid.batch_size else 0
        return Axis(
            grid.lengths,
            grid.offsets,
            name=name,
            sizes=(grid.part.extent, structure.extent(longest)),
            token=token,
        )

    return grid.part.part("merged", build)


def is_rest(size: Any) -> bool:
    """Whether a size is the -1 of a shape."""
    return not isinstance(size, Extent) and statically_known_true(size == REST)


def _equal(a: Any, b: Any) -> bool:
    return statically_known_true(a == b)


class Plan:
    """One reshape.

    ``result`` collects the logical dims of the result: "batch", "rows", an Axis, or a static size in a
    one-element list. ``merges`` says that axes were merged or rows made, for which storage must be in
    logical order.
    """

    def __init__(self, x: PackedTensor, target: list[Any]) -> None:
        self.x = x
        self.k = len(x.grid.axes)
        self.target = target
        self.result: list[Any] = []
        self.merges = False
        self.changed = False

    def run(self) -> None:
        i = j = 0
        source = self.x.order
        while i < len(source) or j < len(self.target):
            if i == len(source) or source[i] > self.k:
                i, j = self.static_run(i, j)
            elif j == len(self.target):
                self.fail()
            elif source[i] == ROWS:
                i, j = self.rows(i, j)
            elif source[i] == 0:
                i, j = self.batch(i, j)
            else:
                i, j = self.axis(i, j)

    def batch(self, i: int, j: int) -> tuple[int, int]:
        size, end = self.target[j], self.axes_end(i + 1)
        rest = is_rest(size)
        if (end == i + 1 or self.names_axis_next(j + 1)) and (rest or _equal(size, self.x.grid.batch_size)):
            self.result.append("batch")
            return i + 1, j + 1
        if end - i - 1 == self.k and rest:
            self.merges = True
            self.result.append("rows")
            return end, j + 1
        return self.one_or_fail(i, j)

    def rows(self, i: int, j: int) -> tuple[int, int]:
        axes, size = self.x.grid.axes, self.target[j]
        named = self.target[j + 1 : j + 1 + self.k]
        whole = is_rest(size) or _equal(size, self.x.grid.batch_size)
        rest = [self.k == 1 and is_rest(s) and not is_rest(size) for s in named]
        if (
            whole
            and len(named) == self.k
            and all(r or self.names(s, a) for r, s, a in zip(rest, named, axes))
        ):
            self.result += ["batch", *axes]
            return i + 1, j + 1 + self.k
        if is_rest(size) or _equal(size, self.x.grid.cells):
            self.result.append("rows")
            return i + 1, j + 1
        return self.one_or_fail(i, j)

    def axis(self, i: int, j: int) -> tuple[int, int]:
        axis, size = self.x.grid.axes[self.x.order[i] - 1], self.target[j]
        factors = self.factors(axis, j)
        if factors:
            self.changed = True
            self.result += factors
            return i + 1, j + len(factors)
        if self.names(size, axis):
            self.result.append(axis)
            return i + 1, j + 1
        if not is_rest(size):
            return self.one_or_fail(i, j)
        end = self.axes_end(i)
        if end == i + 1 or len(self.target) - j > len(self.x.order) - end + 1:
            self.result.append(axis)
            return i + 1, j + 1
        self.merges = self.changed = True
        self.result.append(merged_axis(Grid([self.x.grid.axes[c - 1] for c in self.x.order[i:end]])))
        return end, j + 1

    def factors(self, axis: Axis, j: int) -> list[Axis]:
        """The axes that the target names in place of one that was merged from them."""
        count = len(axis.token.parents) if axis.token.kind == "product" else 0
        named = self.target[j : j + count]
        if count < 2 or len(named) < count or not all(isinstance(size, Extent) for size in named):
            return []
        axes = [size.axis for size in named]
        structure.check_same(Grid(axes).lengths, axis.lengths, "reshape")
        return axes

    def static_run(self, i: int, j: int) -> tuple[int, int]:
        end = i
        while end < len(self.x.order) and self.x.order[end] > self.k:
            end += 1
        total: Any = 1
        for c in self.x.order[i:end]:
            total = total * self.x.values.shape[c - self.k]
        taken: list[Any] = []
        while j < len(self.target) and not isinstance(self.target[j], Extent):
            if end < len(self.x.order) and self.run_is_over(taken, total, j, end):
                break
            taken.append(self.target[j])
            j += 1
        known = [size for size in taken if not is_rest(size)]
        whole = product(known)
        if len(known) == len(taken) - 1 and _equal(total % max(whole, 1), 0):
            taken = [total // max(whole, 1) if is_rest(size) else size for size in taken]
        elif len(known) != len(taken) or not _equal(whole, total):
            self.fail()
        self.result += [[size] for size in taken]
        return end, j

    def run_is_over(self, taken: list[Any], total: Any, j: int, end: int) -> bool:
        """Whether sizes ``taken`` make up a static run that ends before a batch or ragged dim ``end``."""
        if _known(taken):
            return _equal(product(taken), total)
        left = len(self.x.order) - end
        return self.x.order[end] == 0 and len(self.target) - j <= left

    def one_or_fail(self, i: int, j: int) -> tuple[int, int]:
        """A fixed size of 1 may stand anywhere; nothing else stands in for a ragged dim."""
        if isinstance(self.target[j], Extent) or not _equal(self.target[j], 1):
            self.fail()
        self.result.append([1])
        return i, j + 1

    def axes_end(self, i: int) -> int:
        """Where the run of ragged dims that begins at logical dim ``i`` ends."""
        while i < len(self.x.order) and 1 <= self.x.order[i] <= self.k:
            i += 1
        return i

    def names_axis_next(self, j: int) -> bool:
        """Whether the next target size, 1s aside, stands for a ragged dim."""
        for size in self.target[j:]:
            if (
                isinstance(size, Extent)
                or is_rest(size)
                or any(self.names(size, a) for a in self.x.grid.axes)
            ):
                return True
            if not _equal(size, 1):
                return False
        return False

    def names(self, size: Any, axis: Axis) -> bool:
        """Whether a target size means this axis."""
        if isinstance(size, Extent):
            return same_axis(size.axis, axis) or torch.equal(size.axis.lengths, axis.lengths)
        return torch.compiler.is_compiling() and _equal(size, axis.max_length)

    def build(self) -> PackedTensor:
        x = in_logical_order(self.x, with_axes=self.merges)
        axes = [entry for entry in self.result if isinstance(entry, Axis)]
        grid = x.grid
        if self.changed:
            grid = Grid(axes, x.grid.part if len(axes) > 1 else None)
        k = len(grid.axes)
        kept = iter(
            [c for c in x.order if 1 <= c <= k]
            if not self.changed and ROWS not in x.order
            else range(1, k + 1)
        )
        static = iter(range(k + 1, k + 1 + len(self.result)))
        order, sizes = [], []
        for entry in self.result:
            if isinstance(entry, list):
                order.append(next(static))
                sizes.append(entry[0])
            else:
                order.append(0 if entry == "batch" else ROWS if entry == "rows" else next(kept))
        return PackedTensor(x.values.reshape(x.values.shape[0], *sizes), grid, tuple(order))

    def fail(self) -> Any:
        raise ValueError(
            f"cannot reshape a packed tensor of shape {list(self.x.shape)} (ragged: "
            f"{[axis.label for axis in self.x.grid.axes]}) to {self.target}: a ragged dim is named by its "
            "entry of x.shape, a plain integer is a fixed size, -1 stands for the rest"
        )


def product(sizes: Sequence[Any]) -> Any:
    """The product of sizes, which may be symbols."""
    total: Any = 1
    for size in sizes:
        total = total * size
    return total


def _known(sizes: Sequence[Any]) -> bool:
    return not any(is_rest(size) for size in sizes)

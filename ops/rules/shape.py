"""Shape operators: dims permuted, added, removed, merged and split. Axes stay what they are."""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .. import dispatch
from ..axis import Axis, Extent, Grid, Token, require_same
from ..kernels import structure
from ..tensor import ROWS, PackedTensor

Handler = dispatch.Handler


def _ints(args: Sequence[Any]) -> list[Any]:
    """Dims given one by one or as one sequence."""
    return list(args[0]) if len(args) == 1 and isinstance(args[0], (list, tuple)) else list(args)


def permute(x: PackedTensor, *dims: Any) -> PackedTensor:
    """Logical dims in another order; free."""
    wanted = [x.dim_index(d) for d in _ints(dims)]
    if sorted(wanted) != list(range(len(x.order))):
        raise ValueError(f"permute: {tuple(_ints(dims))} is not a permutation of {len(x.order)} dims")
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


def flatten(x: PackedTensor, start_dim: int = 0, end_dim: int = -1) -> PackedTensor:
    """Merge neighbouring dims: static ones, ragged ones into one axis, batch and all axes into rows."""
    a, b = x.dim_index(start_dim), x.dim_index(end_dim)
    shape = list(x.shape)
    return reshape(x, [*shape[:a], -1, *shape[b + 1 :]])


def unflatten(x: PackedTensor, dim: int, sizes: Sequence[int]) -> PackedTensor:
    """Split one dim into ``sizes``."""
    d = x.dim_index(dim)
    shape = list(x.shape)
    return reshape(x, [*shape[:d], *sizes, *shape[d + 1 :]])


def ravel(x: PackedTensor) -> PackedTensor:
    """All dims merged."""
    return reshape(x, [-1])


def view(x: PackedTensor, *shape: Any) -> PackedTensor:
    """``reshape``, or with a dtype the payload read as another dtype."""
    if len(shape) == 1 and isinstance(shape[0], torch.dtype):
        return PackedTensor(x.values.view(shape[0]), x.grid, x.order)
    return reshape(x, *shape)


def reshape(x: PackedTensor, *shape: Any) -> PackedTensor:
    """Merge and split dims.

    An entry of ``x.shape`` for a ragged dim means its axis; a plain integer is a fixed size. ``-1`` is
    the rest: static dims, the axes there (merged into one), or the batch and all axes as valid rows.

    Raises:
        ValueError: the sizes do not fit; names both shapes.
    """
    return _Reshape(x, _ints(shape)).run()


def view_as(x: PackedTensor, other: Any) -> PackedTensor:
    """``reshape`` to the shape of another tensor."""
    return reshape(x, list(other.shape))


def expand(x: PackedTensor, *sizes: Any) -> PackedTensor:
    """Static dims of size 1 repeated without a copy; ``-1`` or an entry of ``x.shape`` keeps a dim."""
    k, wanted = len(x.grid.axes), _ints(sizes)
    if len(wanted) != len(x.order):
        raise ValueError(f"expand: {len(wanted)} sizes for a packed tensor of {len(x.order)} dims")
    target = list(x.values.shape)
    for c, size in zip(x.order, wanted):
        if c > k and not (isinstance(size, int) and size == -1):
            target[c - k] = size
    return PackedTensor(x.values.expand(target), x.grid, x.order)


class _Reshape:
    """One reshape: walks the source's dims and the target's sizes from left to right in groups."""

    def __init__(self, x: PackedTensor, target: list[Any]) -> None:
        self.x = x
        self.target = target
        self.k = len(x.grid.axes)
        self.order: list[Any] = []  # entries of the result; a static size as a one-element list
        self.axes: list[Axis] = []
        self.regroup = False

    def run(self) -> PackedTensor:
        i = j = 0
        while i < len(self.x.order) or j < len(self.target):
            i, j = self.step(i, j)
        return self.result()

    def step(self, i: int, j: int) -> tuple[int, int]:
        c = self.x.order[i] if i < len(self.x.order) else self.k + 1
        if c > self.k:
            return self.static_run(i, j)
        if j == len(self.target):
            self.fail()
        if c == ROWS:
            return self.rows(i, j)
        if c == 0:
            return self.batch(i, j)
        return self.axis(i, j)

    def batch(self, i: int, j: int) -> tuple[int, int]:
        size, end = self.target[j], i + 1
        while end < len(self.x.order) and 1 <= self.x.order[end] <= self.k:
            end += 1
        following = self.target[j + 1] if j + 1 < len(self.target) else None
        alone = end == i + 1 or (following is not None and self.continues(following, i + 1))
        if alone and (self.is_rest(size) or self.equal(size, self.x.grid.batch_size)):
            self.order.append(0)
            return i + 1, j + 1
        whole = self.x.order[i:end] == tuple(range(self.k + 1))
        if whole and (self.is_rest(size) or self.equal(size, self.x.grid.cells)):
            self.order.append(ROWS)
            return end, j + 1
        return self.fail()

    def continues(self, size: Any, i: int) -> bool:
        """Whether a target size stands for the ragged dim ``i`` of the source."""
        return self.is_rest(size) or self.names(size, self.x.grid.axes[self.x.order[i] - 1])

    def rows(self, i: int, j: int) -> tuple[int, int]:
        size = self.target[j]
        after = self.target[j + 1 : j + 1 + self.k]
        if len(after) == self.k and all(self.names(s, a) for s, a in zip(after, self.x.grid.axes)):
            self.order.extend(range(self.k + 1))
            return i + 1, j + 1 + self.k
        if self.is_rest(size) or self.equal(size, self.x.grid.cells):
            self.order.append(ROWS)
            return i + 1, j + 1
        return self.fail()

    def axis(self, i: int, j: int) -> tuple[int, int]:
        c, size = self.x.order[i], self.target[j]
        axis = self.x.grid.axes[c - 1]
        if self.names(size, axis):
            self.order.append(c)
            return i + 1, j + 1
        split = axis.token.parents if axis.token.kind == "product" else ()
        if len(split) > 1 and self.k == 1:
            named = self.target[j : j + len(split)]
            if all(isinstance(s, Extent) for s in named):
                return self.split_axis(i, j, [s.axis for s in named])
        if self.is_rest(size):
            last = i + 1
            while last < len(self.x.order) and self.x.order[last] == self.x.order[last - 1] + 1 <= self.k:
                last += 1
            left = len(self.target) - j - 1
            if last == i + 1 or left >= len(self.x.order) - i - 1:
                self.order.append(c)
                return i + 1, j + 1
            if last - i == self.k:
                return self.merge_axes(last, j)
        return self.fail()

    def merge_axes(self, last: int, j: int) -> tuple[int, int]:
        grid = self.x.grid
        token = Token("product", tuple((a.token, a.steps) for a in grid.axes))
        longest: Any = 1
        for a in grid.axes:
            longest = longest * a.max_length
        if not torch.compiler.is_compiling():
            longest = int(grid.lengths.max()) if grid.batch_size else 0
        peak = structure.extent(longest)
        self.axes = [
            Axis(grid.lengths, grid.offsets, name="*".join(a.label for a in grid.axes),
                 extent=grid.part.extent, peak=peak, token=token)
        ]  # fmt: skip
        self.order.append(1)
        self.regroup = True
        return last, j + 1

    def split_axis(self, i: int, j: int, axes: list[Axis]) -> tuple[int, int]:
        grid = Grid(axes)
        structure.check_same(grid.lengths, self.x.grid.lengths, "reshape")
        self.axes = axes
        self.order.extend(range(1, len(axes) + 1))
        self.regroup = True
        return i + 1, j + len(axes)

    def static_run(self, i: int, j: int) -> tuple[int, int]:
        end = i
        while end < len(self.x.order) and self.x.order[end] > self.k:
            end += 1
        sizes = [self.x.values.shape[c - self.k] for c in self.x.order[i:end]]
        total = 1
        for size in sizes:
            total = total * size
        taken: list[Any] = []
        last = end == len(self.x.order)
        while j < len(self.target) and not isinstance(self.target[j], Extent):
            done = self.product(taken)
            if not last and done is not None and self.equal(done, total) and not self.equal(self.target[j], 1):
                break
            taken.append(self.target[j])
            j += 1
        known = [s for s in taken if not self.is_rest(s)]
        rest = self.product(known)
        if len(known) == len(taken) - 1 and total % max(rest, 1) == 0:
            taken = [total // max(rest, 1) if self.is_rest(s) else s for s in taken]
        elif len(known) != len(taken) or not self.equal(rest, total):
            self.fail()
        self.order.extend([size] for size in taken)
        return end, j

    def result(self) -> PackedTensor:
        static = [c for c in self.x.order if c > self.k]
        values = self.x.values
        if static != sorted(static):
            values = values.permute(0, *[c - self.k for c in static])
        sizes = [entry[0] for entry in self.order if isinstance(entry, list)]
        grid = Grid(self.axes, self.x.grid.part if len(self.axes) > 1 else None) if self.regroup else self.x.grid
        numbers = iter(range(len(grid.axes) + 1, len(grid.axes) + 1 + len(sizes)))
        order = tuple(next(numbers) if isinstance(entry, list) else entry for entry in self.order)
        return PackedTensor(values.reshape(values.shape[0], *sizes), grid, order)

    @staticmethod
    def product(sizes: list[Any]) -> Any:
        total: Any = 1
        for size in sizes:
            if isinstance(size, int) and size == -1:
                return None
            total = total * size
        return total

    @staticmethod
    def is_rest(size: Any) -> bool:
        return isinstance(size, int) and not isinstance(size, Extent) and statically_known_true(size == -1)

    @staticmethod
    def equal(a: Any, b: Any) -> bool:
        return statically_known_true(a == b)

    def names(self, size: Any, axis: Axis) -> bool:
        """Whether a target size means this axis."""
        if isinstance(size, Extent):
            if size.axis is not axis:
                require_same(size.axis, axis, "reshape")
            return True
        return torch.compiler.is_compiling() and statically_known_true(size == axis.max_length)

    def fail(self) -> Any:
        raise ValueError(
            f"cannot reshape a packed tensor of shape {list(self.x.shape)} (ragged: "
            f"{[a.label for a in self.x.grid.axes]}) to {self.target}: a ragged dim is named by its entry "
            "of x.shape, a plain integer is a fixed size, -1 stands for the rest"
        )


def _on_tensor(rule: Any) -> Handler:
    """A handler from a function of (x, *args, **kwargs)."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not args:
            args = (kwargs.pop("input"),)
        if not isinstance(args[0], PackedTensor):
            raise TypeError(f"{dispatch.name_of(func)}: the first operand must be the packed one")
        return rule(*args, **kwargs)

    return handler


def matrix_transpose(x: PackedTensor) -> PackedTensor:
    """The last two dims exchanged."""
    return transpose(x, -1, -2)


for _rule, _names in {
    permute: "permute",
    transpose: "transpose swapaxes swapdims",
    movedim: "movedim moveaxis",
    unsqueeze: "unsqueeze",
    squeeze: "squeeze",
    flatten: "flatten",
    unflatten: "unflatten",
    ravel: "ravel",
    reshape: "reshape",
    view: "view",
    view_as: "view_as reshape_as",
    expand: "expand",
}.items():
    dispatch.register("shape", _on_tensor(_rule), _names)
PackedTensor.mT = property(matrix_transpose)  # type: ignore[attr-defined]

"""Axis and Grid: the structure of a packed batch, without values.

An :class:`Axis` is one ragged dim of a batch: a length for each sample. A :class:`Grid` is an ordered
product of axes with one cell for every valid position: sample-major, then row-major.

Identity. Two tensors that share an Axis object are known to agree. An axis that was derived from
another one is known by what it was derived from (its ``token``) and by its length function in normal
form (its ``steps``), so two branches of a model that derive the same lengths meet again without a
comparison. Where identity was lost (batches built apart, pickles, pytrees) lengths are compared, on
the host.

Sizes. The batch size, the total and the maximum are dims of tensors (``lengths``, ``extent``,
``peak``), never Python integers kept on the object: a compiler would specialise on those.

Caches. What is computed from a structure (products, slices, coordinate maps) is kept on the axis, in
eager only: a graph that read the cache would be compiled again when the cache fills. A cached
structure never refers to its owner; tokens, which carry no reference, stand for axes. What the loader
delivers lies in ``maps``, is fixed for the life of the object and is read in graphs too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked, maybe_mark_dynamic
from torch._subclasses.fake_tensor import FakeTensor

from .kernels import structure
from .lengths import Lengths, Step, brief, compose, derived_maximum, host_lengths
from .tokens import Factors, Token, same_factors, same_token

#: Dims that hold the batch size carry one name, so that a graph knows that they agree.
BATCH = "packed.batch"


def map_name(kind: str, kept: tuple[int, ...]) -> str:
    """What a grid's map is called in ``maps``, whoever computes it; ``kept`` are axes of the grid.

    =========  =============================================================================================
    kind       map
    =========  =============================================================================================
    map        int32 [cells]: the cell of the grid over ``kept`` that each cell lies on (:meth:`Grid.map_to`)
    splits     int32 [rows + 1]: offsets of the cells over each cell of it (:meth:`Grid.splits`)
    order      int32 [cells]: cells ordered by ``kept`` first, for which splits hold (:meth:`Grid.order_by`)
    =========  =============================================================================================

    Besides these, every partition has ``"sample_ids"`` and an axis ``"positions"``, both int32 [total].
    """
    return f"{kind} {kept}"


class Partition:
    """How many rows each sample has, and where they lie in a packed buffer.

    Attributes:
        lengths: int64 [B] on the host.
        offsets: int32 [B + 1] on the device; what kernels call ``cu_seqlens``.
        extent: a tensor [total, 0] of no bytes that carries the total.
        maps: index tensors that were delivered with the batch, by name; fixed.
        parts, products: structures derived from this one that were delivered with it; fixed.
    """

    def __init__(
        self, lengths: Tensor, offsets: Tensor, extent: Tensor, maps: dict[str, Tensor] | None = None
    ) -> None:
        self.lengths = lengths
        self.offsets = offsets
        self.extent = extent
        self.maps = dict(maps or {})
        self.parts: dict[Any, Partition] = {}
        self.products: list[tuple[Factors, Partition]] = []
        self.dynamic: str | None = None
        self._cache: dict[Any, Any] = {}

    @property
    def batch_size(self) -> int:
        """Number of samples B."""
        return self.lengths.shape[0]

    @property
    def total(self) -> int:
        """Number of rows of all samples together."""
        return self.extent.shape[0]

    @property
    def sample_ids(self) -> Tensor:
        """The sample of every row, int32 [total]."""
        return self.map("sample_ids", lambda: structure.sample_ids(self.offsets, self.total))

    def map(self, name: str, build: Callable[[], Tensor]) -> Tensor:
        """A map that the loader delivered, else one built here, and in eager kept."""
        delivered = self.maps.get(name)
        if delivered is None:
            return self.cached(name, build)
        if torch.compiler.is_compiling() and not name.startswith("splits"):
            torch._check(delivered.shape[0] == self.total)
        return delivered

    def cached(self, key: Any, build: Callable[[], Any]) -> Any:
        """``build()``, kept under ``key`` in eager; never kept in a graph, nor with fake tensors."""
        if torch.compiler.is_compiling():
            found = build()
            if isinstance(found, Partition):
                found.dynamic = self.dynamic
            return found
        found = self._cache.get(key)
        if found is None:
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(False):
                    found = build()
            else:
                found = build()
            if self.dynamic and isinstance(found, Partition):
                found.mark_dynamic(self.dynamic)
            if type(found.offsets if isinstance(found, Partition) else found) is not FakeTensor:
                self._cache[key] = found
        return found

    def part(self, key: Any, build: Callable[[], Any]) -> Any:
        """A derived structure that was delivered, else one built here, and in eager kept."""
        delivered = self.parts.get(key)
        return delivered if delivered is not None else self.cached(key, build)

    def deliver(self) -> None:
        """Make all that was built from here so far a part of the structure: fixed, and read in graphs."""
        self._complete()
        for key, found in self._cache.items():
            if isinstance(key, str) and isinstance(found, Tensor):
                self.maps[key] = found
            elif key == "merged" or key[0] in ("derive", "repeat"):
                self.parts[key] = found
            elif key[0] == "product":
                self.products.append((key[1], found))
        self._cache = {}
        for part in self._delivered():
            part.deliver()
        if self.dynamic:
            self.mark_dynamic(self.dynamic)

    def _complete(self) -> None:
        """Build the row of every cell, which a graph reads and eager code without gradients does not."""
        self.cached("sample_ids", lambda: self.sample_ids)
        for key in [key for key in self._cache if str(key).startswith("splits")]:
            if key.replace("splits", "order") not in self._cache:
                build = partial(structure.sample_ids, self._cache[key], self.total)
                self.cached(key.replace("splits", "map"), build)

    def _delivered(self) -> list[Partition]:
        return [*self.parts.values(), *(part for _, part in self.products)]

    def mark_dynamic(self, batch: str = BATCH) -> None:
        """Mark the sizes that vary from batch to batch, here and in all that is derived from here.

        ``batch`` names the batch size: a graph takes sizes of one name for equal.
        """
        self.dynamic = batch
        mark_unbacked(self.lengths, 0, shape_id=batch)
        for tensor in (self.offsets, self.extent, *self.maps.values()):
            mark_unbacked(tensor, 0)
        for part in self._delivered():
            part.mark_dynamic(batch)

    def __getstate__(self) -> dict[str, Any]:
        """Lengths and maps as numbers: a tensor costs a loader's consumer over 100 us and a descriptor."""
        rebuilt = ("lengths", "offsets", "extent", "peak", "_cache")
        state = {name: value for name, value in self.__dict__.items() if name not in rebuilt}
        state["lengths"] = self.lengths.tolist()
        if self.offsets.device.type != "cpu":
            state["offsets"] = self.offsets
        else:
            state["maps"] = {name: found.numpy().tobytes() for name, found in self.maps.items()}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        host = np.array(state.pop("lengths"), dtype=np.int64)
        self.lengths, offsets, self.extent = structure.partition(host, torch.device("cpu"))
        self.offsets = state.pop("offsets", offsets)
        self._cache = {}
        self.__dict__.update(state)
        self.maps = {name: _map_from(found) for name, found in self.maps.items()}
        self._finish(host)
        if self.dynamic:  # marks are lost on the way
            self.mark_dynamic(self.dynamic)

    def _finish(self, host: np.ndarray) -> None:
        """Set what a subclass derives from host lengths."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Partition:
        return self


class Axis(Partition):
    """One ragged dim of a batch.

    Args:
        lengths: the length of every sample, [B]; copied to a host int64 tensor.
        offsets: int32 [B + 1] on the device, if at hand; else computed from ``lengths``.
        name: how errors and prints call the axis.
        device: where ``offsets`` go if they are computed here.
        maps: index tensors delivered with the batch: ``"sample_ids"``, ``"positions"``, int32 [total].
        sizes: the tensors [total, 0] and [maximum, 0] that carry the sizes, if lengths (a host int64
            tensor) and offsets are at hand and known to be right; nothing is computed or checked then.
        token, steps: where a derived axis came from.

    Raises:
        ValueError: negative lengths, or more than 2**31 - 1 rows.
    """

    def __init__(
        self,
        lengths: Lengths,
        offsets: Tensor | None = None,
        *,
        name: str | None = None,
        device: torch.device | str | None = None,
        maps: dict[str, Tensor] | None = None,
        sizes: tuple[Tensor, Tensor] | None = None,
        token: Token | None = None,
        steps: tuple[Step, ...] = (),
    ) -> None:
        if sizes is None:
            host = host_lengths(lengths)
            place = offsets.device if offsets is not None else torch.device(device or "cpu")
            lengths, computed, extent = structure.partition(host, place)
            offsets = computed if offsets is None else offsets
            sizes = (extent, structure.extent(int(host.max(initial=0))))
        super().__init__(lengths, offsets, sizes[0], maps)  # type: ignore[arg-type]
        self.peak = sizes[1]
        self.name = name
        self.token = Token() if token is None else token
        self.steps = steps

    def _finish(self, host: np.ndarray) -> None:
        self.peak = structure.extent(int(host.max(initial=0)))

    def mark_dynamic(self, batch: str = BATCH) -> None:
        """See :meth:`Partition.mark_dynamic`; the maximum is dynamic with a value a graph may look at."""
        super().mark_dynamic(batch)
        maybe_mark_dynamic(self.peak, 0)

    @property
    def max_length(self) -> int:
        """The largest length of the batch; known without reading the device."""
        return self.peak.shape[0]

    @property
    def positions(self) -> Tensor:
        """The position inside its sample of every row, int32 [total]."""
        return self.map("positions", lambda: structure.positions(self.offsets, self.total))

    @property
    def label(self) -> str:
        """The axis' name for messages."""
        return self.name or "n"

    def derive(self, shift: int = 0, stride: int = 1, cap: int = structure.NO_CAP) -> Axis:
        """The axis of lengths ``max((min(n, cap) + shift) // stride, 0)``.

        Derived axes have identity: however two of them came about, if their length functions have the
        same normal form they are the same axis, and the identity function gives this axis.
        """
        if (cap, shift, stride) == (structure.NO_CAP, 0, 1):
            return self
        step = (cap, shift, stride)
        return self.part(("derive", step), lambda: self._derived(step))

    def _derived(self, step: Step) -> Axis:
        cap, shift, stride = step
        lengths, offsets, extent = structure.derive(self.lengths, self.offsets, cap, shift, stride)
        peak = structure.extent(derived_maximum(self.max_length, step))
        return Axis(
            lengths,
            offsets,
            name=self.name,
            sizes=(extent, peak),
            token=self.token,
            steps=compose(self.steps, step),
        )

    def repeat(self, times: int) -> Axis:
        """The axis of lengths ``n * times``: each row stands for several entries."""
        if times == 1:
            return self

        def build() -> Axis:
            token = Token(f"repeat {times}", ((self.token, self.steps),))
            return Axis(
                self.lengths * times,
                self.offsets * times,
                name=self.name,
                sizes=(structure.extent(self.total * times), structure.extent(self.max_length * times)),
                token=token,
            )

        return self.part(("repeat", times), build)

    def select(self, samples: Sequence[int]) -> Axis:
        """The axis of a sub-batch: the lengths of the given samples, in the given order."""
        chosen = tuple(samples)

        def build() -> Axis:
            host = self.lengths.numpy()[np.asarray(chosen, dtype=np.int64)]
            token = Token(f"samples {chosen}", ((self.token, self.steps),))
            return Axis(host, name=self.name, device=self.offsets.device, token=token)

        return self.cached(("select", chosen), build)

    @property
    def constant(self) -> int | None:
        """The length of all samples, where it follows from how the axis was derived."""
        if not self.steps or self.steps[-1][0] != 0:
            return None
        _, shift, stride = self.steps[-1]
        return max(shift // stride, 0)

    def join(self, others: Sequence[Axis]) -> Axis:
        """The axis of summed lengths: each sample's rows of this axis, then of each of the others."""
        known = [axis.constant for axis in (self, *others)]
        rest = [axis for axis, size in zip((self, *others), known) if size is None]
        size = sum(n for n in known if n is not None)
        if not rest:
            return self.derive(size, cap=0)
        if len(rest) == 1:
            return rest[0].derive(size)
        if all(same_axis(rest[0], axis) for axis in rest):
            return rest[0].repeat(len(rest)).derive(size)
        return rest[0]._summed(rest[1:]).derive(size)

    def _summed(self, others: Sequence[Axis]) -> Axis:
        axes = (self, *others)
        parents = tuple((axis.token, axis.steps) for axis in axes)

        def build() -> Axis:
            lengths, offsets = self.lengths, self.offsets
            for axis in others:
                lengths, offsets = lengths + axis.lengths, offsets + axis.offsets
            total = structure.extent(sum(axis.total for axis in axes))
            longest = structure.longest(lengths)
            return Axis(lengths, offsets, name=self.name, sizes=(total, longest), token=Token("sum", parents))

        return self.cached(("sum", parents[1:]), build)

    def append(self, others: Sequence[Axis]) -> Axis:
        """The axis of several batches one after the other."""
        axes = (self, *others)
        parents = tuple((axis.token, axis.steps) for axis in axes)

        def build() -> Axis:
            ends, total = [self.offsets], self.total
            peak: Any = self.max_length
            for axis in others:
                ends.append(axis.offsets[1:] + total)
                total, peak = total + axis.total, torch.sym_max(peak, axis.max_length)
            return Axis(
                torch.cat([axis.lengths for axis in axes]),
                torch.cat(ends),
                name=self.name,
                sizes=(structure.extent(total), structure.extent(peak)),
                token=Token("batches", parents),
            )

        return self.cached(("batches", parents[1:]), build)

    def __repr__(self) -> str:
        return f"Axis({self.label}: {brief(self.lengths.tolist())})"


class Grid:
    """An ordered product of axes, one cell for every valid position.

    Args:
        axes: the axes, outermost first; an axis may stand in it more than once.
        part: the partition of the product, if it is at hand (for one axis it is the axis itself).
    """

    def __init__(self, axes: Iterable[Axis], part: Partition | None = None) -> None:
        self.axes = tuple(axes)
        self.part: Partition = _product(self.axes) if part is None else part

    @property
    def dynamic(self) -> bool:
        """Whether the structure was marked for a graph over any lengths (:func:`ops.mark_dynamic`)."""
        return self.axes[0].dynamic is not None

    @property
    def cells(self) -> int:
        """Number of valid positions of all samples together."""
        return self.part.total

    @property
    def lengths(self) -> Tensor:
        """Number of cells of every sample, int64 [B] on the host."""
        return self.part.lengths

    @property
    def offsets(self) -> Tensor:
        """Where each sample's cells begin, int32 [B + 1] on the device."""
        return self.part.offsets

    @property
    def batch_size(self) -> int:
        """Number of samples B."""
        return self.part.batch_size

    @property
    def sample_ids(self) -> Tensor:
        """The sample of every cell, int32 [cells]."""
        return self.map_to(())

    def coordinates(self, k: int) -> Tensor:
        """For each cell the packed row of axis ``k`` that it lies on, int32 [cells]."""
        return self.map_to((k,))

    def row_splits(self, level: int) -> Tensor:
        """Offsets of the cells under each cell of the first ``level`` axes, int32 [rows + 1].

        Level 0 is ``offsets``.
        """
        return self.splits(tuple(range(level)))

    def sub(self, kept: tuple[int, ...]) -> Grid:
        """The grid of some of the axes, in the given order."""
        if kept == tuple(range(len(self.axes))):
            return self
        return Grid([self.axes[k] for k in kept])

    def map_to(self, kept: tuple[int, ...]) -> Tensor:
        """For each cell, the cell of ``self.sub(kept)`` that it projects on, int32 [cells]."""
        if not kept:
            return self.part.sample_ids
        return self.part.map(map_name("map", kept), lambda: self._build_map(kept))

    def _build_map(self, kept: tuple[int, ...]) -> Tensor:
        count = len(self.axes)
        if kept == tuple(range(len(kept))):
            return structure.sample_ids(self.splits(kept), self.cells)
        if kept == (count - 1,):
            outer = self.sub(tuple(range(count - 1)))
            first = structure.firsts(self.axes[-1].offsets, self.batch_size)
            first = first.index_select(0, outer.sample_ids)
            return structure.ranges(first, self.splits(tuple(range(count - 1))), self.cells)
        targets = [self.axes[k] for k in kept]
        return map_cells(self.axes, targets, kept, (0,) * len(kept), (1,) * len(kept))

    def order_by(self, kept: tuple[int, ...]) -> Tensor | None:
        """Cells ordered by ``kept`` first, then by the other axes; None where they already are."""
        full = kept + self.others(kept)
        if full == tuple(range(len(self.axes))):
            return None
        return self.part.map(map_name("order", kept), lambda: structure.invert(self.map_to(full)))

    def splits(self, kept: tuple[int, ...]) -> Tensor:
        """Offsets into :meth:`order_by` of the cells over each cell of ``self.sub(kept)``."""
        if not kept:
            return self.offsets
        rest = [self.axes[k].offsets for k in self.others(kept)]
        return self.part.map(
            map_name("splits", kept), lambda: structure.splits(self.sub(kept).sample_ids, rest)
        )

    def others(self, kept: tuple[int, ...]) -> tuple[int, ...]:
        """The axes that are not in ``kept``."""
        return tuple(k for k in range(len(self.axes)) if k not in kept)

    def select(self, samples: Sequence[int]) -> Grid:
        """The grid of a sub-batch."""
        return Grid([axis.select(samples) for axis in self.axes])

    def __deepcopy__(self, memo: dict[int, Any]) -> Grid:
        return self

    def __repr__(self) -> str:
        return " x ".join(repr(axis) for axis in self.axes)


class Extent(int):
    """The padded size of a ragged dim, as ``x.shape`` shows it: an integer that knows its axis.

    Handing it to ``reshape`` means the axis; a plain integer means a fixed size.
    """

    axis: Axis

    def __new__(cls, axis: Axis) -> Extent:
        self = super().__new__(cls, axis.max_length)
        self.axis = axis
        return self


def same_axis(a: Axis, b: Axis) -> bool:
    """Whether two axes are known to agree without looking at lengths."""
    return a is b or (a.steps == b.steps and same_token(a.token, b.token))


def require_same(a: Axis, b: Axis, what: str) -> None:
    """Check that two axes agree; in a graph the check runs when the graph does.

    Raises:
        ValueError: they differ; the message names the first sample that does, and both lengths.
    """
    if same_axis(a, b):
        return
    structure.check_same(a.lengths, b.lengths, what)
    if torch.compiler.is_compiling():
        torch._check(a.batch_size == b.batch_size)
        torch._check(a.total == b.total)


def same_grid(a: Grid, b: Grid) -> bool:
    """Whether two grids are known to agree without looking at lengths."""
    return a is b or (len(a.axes) == len(b.axes) and all(same_axis(p, q) for p, q in zip(a.axes, b.axes)))


def map_cells(
    source: Sequence[Axis],
    target: Sequence[Axis],
    axes: Sequence[int],
    starts: Sequence[int],
    strides: Sequence[int],
) -> Tensor:
    """For each cell of the grid over ``source`` a cell of the grid over ``target``.

    See :data:`ops.kernels.structure.grid_map`; an empty ``source`` has one cell a sample.
    """
    if len(source) == len(target) == 1 and starts[0] >= 0 and strides[0] == 1:
        first = structure.firsts(target[0].offsets, target[0].batch_size)
        return structure.ranges(first + starts[0], source[0].offsets, source[0].total)
    return structure.grid_map(
        [axis.offsets for axis in source],
        [axis.offsets for axis in target],
        list(axes),
        list(starts),
        list(strides),
        _running_totals(source or target, len(source)),
    )


def _running_totals(axes: Sequence[Axis], count: int) -> list[int]:
    """The batch size, then the cells of the first, the first two, ... ``count`` axes."""
    totals = [axes[0].batch_size]
    for k in range(1, count + 1):
        totals.append(Grid(axes[:k]).cells)
    return totals


def _product(axes: tuple[Axis, ...]) -> Partition:
    first, others = axes[0], axes[1:]
    if not others:
        return first
    for axis in others:
        if axis is not first and not torch.compiler.is_compiling():
            _require_batch(first, axis)
    factors = tuple((axis.token, axis.steps) for axis in others)
    for delivered, part in first.products:
        if same_factors(delivered, factors):
            return part
    return first.cached(
        ("product", factors),
        lambda: Partition(*structure.product(first.lengths, first.offsets, [a.lengths for a in others])),
    )


def _map_from(found: Tensor | bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(found, np.int32).copy()) if isinstance(found, bytes) else found


def delivered_grid(axes: Sequence[Axis], part: Partition) -> Grid:
    """The grid over several axes whose partition is at hand; every product of these axes will find it."""
    factors = tuple((axis.token, axis.steps) for axis in axes[1:])
    axes[0].products.append((factors, part))
    return Grid(axes, part)


def _require_batch(a: Axis, b: Axis) -> None:
    if a.batch_size != b.batch_size:
        raise ValueError(
            f"axes '{a.label}' and '{b.label}' are of batches of {a.batch_size} and {b.batch_size} samples"
        )


torch.serialization.add_safe_globals([Token, Partition, Axis, Grid])

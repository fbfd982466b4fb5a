"""Operators on the matrices of a batch, described by a letter for every matrix dim.

``"nn,nk->nk"`` is an operator of two operands whose last two dims are matrices, ``"rc->rm,m,mc"`` one of
three results; ``m`` is the smaller of ``r`` and ``c`` where no operand has it. All dims before the matrix
dims are the batch.

Where every matrix dim is static, the rows of the payload are a batch of matrices and the operator runs on
them once. Where one is ragged, matrices of one size are brought together: one gather puts them size after
size, the operator runs once for each size, and one gather puts the results where they belong. Sizes come
from host lengths.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .align import align
from .axis import Axis, Grid, require_same, same_axis
from .kernels import segment, structure
from .tensor import PackedTensor, is_packed
from .tokens import Token

Size = Axis | int
Call = Callable[..., Any]


def apply(name: str, call: Call, spec: str, operands: Sequence[Any]) -> Any:
    """Run a dense operator on the matrices of packed operands.

    Args:
        name: the operator's, for errors.
        call: the operator, of dense tensors [*batch, *matrix dims].
        spec: see the module's docstring.
        operands: at least one is packed. A dense one broadcasts; beside ragged matrices it is one for all.

    Returns:
        What ``call`` returns, with packed results. A result without a ragged dim is dense; one that PyTorch
        leaves empty for some matrices is empty.

    Raises:
        ValueError: dims that do not fit each other.
        NotImplementedError: a ragged matrix dim in a graph.
    """
    inputs, outputs = (part.split(",") for part in spec.split("->"))
    sizes = _bound(name, inputs, operands)
    if "m" in spec and "m" not in sizes:
        sizes["m"] = minimum(sizes["r"], sizes["c"])
    if not any(isinstance(size, Axis) for size in sizes.values()):
        return _on_rows(name, call, inputs, outputs, operands)
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            f"{name} of matrices of varying size cannot be in a graph; call it outside of it"
        )
    return _BySize(name, inputs, outputs, operands, sizes).run(call)


def minimum(a: Size, b: Size) -> Size:
    """The axis or size of the smaller lengths."""
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    if isinstance(a, int) or isinstance(b, int):
        axis, cap = (b, a) if isinstance(a, int) else (a, b)
        return axis.derive(cap=cap)  # type: ignore[union-attr, arg-type]
    if same_axis(a, b):
        return a
    parents = ((a.token, a.steps), (b.token, b.steps))

    def build() -> Axis:
        host = np.minimum(a.lengths.numpy(), b.lengths.numpy())
        return Axis(host, name=a.name, device=a.offsets.device, token=Token("minimum", parents))

    return a.cached(("minimum", parents[1]), build)


def _bound(name: str, inputs: list[str], operands: Sequence[Any]) -> dict[str, Size]:
    """What each letter stands for: an axis, or a static size."""
    sizes: dict[str, Size] = {}
    for x, letters in zip(operands, inputs, strict=True):
        if x.dim() < len(letters) + is_packed(x):
            raise ValueError(
                f"{name}: an operand of shape {tuple(x.shape)} has no {len(letters)} matrix dims"
                + " behind the batch" * is_packed(x)
            )
        for letter, d in zip(letters, range(x.dim() - len(letters), x.dim())):
            size = _size(name, x, d)
            known = sizes.setdefault(letter, size)
            if isinstance(known, Axis) and isinstance(size, Axis):
                require_same(known, size, f"{name}: matrix dims that have to be of one size")
            elif isinstance(known, Axis) or isinstance(size, Axis):
                axis, fixed = (known, size) if isinstance(known, Axis) else (size, known)
                raise ValueError(
                    f"{name}: matrix dims that have to be of one size are the ragged axis "
                    f"'{axis.label}' and the fixed size {fixed}"  # type: ignore[union-attr]
                    + (
                        ""
                        if is_packed(x)
                        else "; pack the dense operand: PackedTensor.from_padded(y, lengths)"
                    )
                )
    return sizes


def _size(name: str, x: Any, d: int) -> Size:
    if not is_packed(x):
        return x.shape[d]
    c, k = x.order[d], len(x.grid.axes)
    if c <= 0:
        what = "the batch" if c == 0 else "the valid rows"
        raise ValueError(f"{name}: dim {d} is {what}, matrix dims come behind it; permute the tensor")
    return x.grid.axes[c - 1] if c <= k else x.values.shape[c - k]


def _results(out: Any, build: Callable[[int], Any]) -> Any:
    """``out`` with each of its tensors built anew; named results keep their names."""
    if isinstance(out, Tensor):
        return build(0)
    parts = [build(i) for i in range(len(out))]
    return tuple(parts) if type(out) is tuple else type(out)(parts)


def _parts(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else list(out)


def _attempt(name: str, call: Call, operands: list[Tensor], sample_of: Callable[[int], int]) -> Any:
    """``call``, whose errors name the sample where PyTorch names the matrix."""
    operands = [t.contiguous() for t in operands]  # some operators take views of them
    if torch.compiler.is_compiling():
        return call(*operands)
    try:
        return call(*operands)
    except (RuntimeError, IndexError) as error:
        found = re.search(r"Batch element (\d+)", str(error))
        sample = sample_of(int(found[1]) if found else 0)
        place = f"sample {sample}" if found else f"matrices of the size of sample {sample}"
        raise type(error)(f"{name}: {place}: {error}") from None


# ------------------------------------------------------------------ static matrix dims


def _on_rows(name: str, call: Call, inputs: list[str], outputs: list[str], operands: Sequence[Any]) -> Any:
    width = max(map(len, inputs))
    widened = [x if len(dims) == width else x.unsqueeze(-1) for x, dims in zip(operands, inputs)]
    payloads, layout = align(name, widened)
    lead, k = len(layout.order) - width, layout.k
    batch = [c - k for c in layout.order[:lead] if c > k]
    dims = [0, *batch, *(c - k for c in layout.order[lead:])]
    if dims != sorted(dims):
        payloads = [values.permute(dims) for values in payloads]
    payloads = [p if len(d) == width else p.squeeze(-1) for p, d in zip(payloads, inputs)]

    def sample_of(element: int) -> int:
        row = element // math.prod(out_batch)
        return int(np.searchsorted(layout.grid.lengths.cumsum(0).numpy(), row, side="right"))

    out_batch = torch.broadcast_shapes(*(p.shape[1 : 1 + len(batch)] for p in payloads))
    out = _attempt(name, call, payloads, sample_of)
    numbers = iter(range(k + 1, k + 1 + len(batch)))
    order = tuple(next(numbers) if c > k else c for c in layout.order[:lead])

    def build(i: int) -> Any:
        values, last = _parts(out)[i], k + 1 + len(batch)
        absent = values.dim() != last - k + len(outputs[i])
        if absent or not (torch.compiler.is_compiling() or values.shape[0] == layout.grid.cells):
            return values
        return PackedTensor(values, layout.grid, (*order, *range(last, last + len(outputs[i]))))

    return _results(out, build)


# ------------------------------------------------------------------ ragged matrix dims


@dataclass(frozen=True)
class _Groups:
    """Matrices (one for each sample and cell of the ragged batch dims) by size.

    Attributes:
        sizes: [groups, ragged letters], on the host.
        counts: matrices in each group.
        rows: the matrices, group after group, on the host.
        index, inverse: the same as int32 on the device, and the inverse.
    """

    sizes: list[list[int]]
    counts: list[int]
    rows: np.ndarray
    index: Tensor
    inverse: Tensor


def _grouped(samples: np.ndarray, lengths: list[np.ndarray], device: torch.device) -> _Groups:
    sizes = np.stack(lengths, 1)[samples]
    found, group, counts = np.unique(sizes, axis=0, return_inverse=True, return_counts=True)
    if not len(counts):
        found, counts = np.zeros((1, len(lengths)), dtype=np.int64), np.zeros(1, dtype=np.int64)
    rows = np.argsort(group.reshape(-1), kind="stable").astype(np.int32)
    index = torch.from_numpy(rows)
    index, inverse = (t.to(device, non_blocking=True) for t in (index, structure.invert(index)))
    return _Groups(found.tolist(), counts.tolist(), rows, index, inverse)


class _BySize:
    """One call over matrices of varying size.

    The ragged batch dims of the first operand with ragged matrix dims, in its order of storage, number the
    matrices: sample-major, then row-major.
    """

    def __init__(
        self,
        name: str,
        inputs: list[str],
        outputs: list[str],
        operands: Sequence[Any],
        sizes: dict[str, Size],
    ) -> None:
        self.name, self.inputs, self.outputs, self.operands, self.sizes = (
            name,
            inputs,
            outputs,
            operands,
            sizes,
        )
        self.base: PackedTensor = next(
            x
            for x, dims in zip(operands, inputs)
            if is_packed(x) and any(isinstance(sizes[n], Axis) for n in dims)
        )
        dims = inputs[[x is self.base for x in operands].index(True)]
        self.lead = self.base.dim() - len(dims)
        entries, k = self.base.order[: self.lead], len(self.base.grid.axes)
        if 0 not in entries:
            raise ValueError(f"{name}: matrix dims come behind the batch; permute the tensor")
        self.places = sorted((d for d in range(self.lead) if 1 <= entries[d] <= k), key=lambda d: entries[d])
        self.kept = [self.base.grid.axes[entries[d] - 1] for d in self.places]
        self.letters = [n for n in sizes if isinstance(sizes[n], Axis)]
        axes: Any = [sizes[n] for n in self.letters]
        self.key = tuple((axis.token, axis.steps) for axis in (*self.kept, *axes))
        self.groups: _Groups = self.base.grid.part.cached(
            ("sizes", *self.key),
            lambda: _grouped(self.samples(), [a.lengths.numpy() for a in axes], self.device),
        )

    @property
    def device(self) -> torch.device:
        return self.base.device

    def samples(self) -> np.ndarray:
        """The sample of every matrix, on the host."""
        counts = np.ones(self.base.batch_size, dtype=np.int64)
        for axis in self.kept:
            counts = counts * axis.lengths.numpy()
        return np.repeat(np.arange(len(counts)), counts)

    def run(self, call: Call) -> Any:
        """Call the operator once for each size."""
        columns = [self.matrices(x, dims) for x, dims in zip(self.operands, self.inputs)]
        outs, start = [], 0
        for g, count in enumerate(self.groups.counts):
            operands = [column[g] for column in columns]

            def sample_of(element: int, first: int = start, given: list[Tensor] = operands) -> int:
                each = math.prod(self.batch_of(given)[1:])
                return int(self.samples()[self.groups.rows[first + element // max(each, 1)]])

            outs.append(_attempt(self.name, call, operands, sample_of))
            start += count
        return _results(outs[0], lambda i: self.put([_parts(out)[i] for out in outs], self.outputs[i]))

    def batch_of(self, operands: list[Tensor]) -> torch.Size:
        """The batch dims of dense operands, broadcast."""
        return torch.broadcast_shapes(*(t.shape[: t.dim() - len(d)] for t, d in zip(operands, self.inputs)))

    def matrices(self, x: Any, dims: str) -> list[Tensor]:
        """An operand as [matrices, *static batch dims, *matrix dims] for each size."""
        if not is_packed(x):
            if x.dim() > len(dims):
                raise ValueError(
                    f"{self.name}: beside ragged matrices a dense operand is one matrix for all samples; got "
                    f"shape {tuple(x.shape)}. Pack it: PackedTensor.from_padded(y, lengths)"
                )
            return [x] * len(self.groups.counts)
        kept, k, lead = self.kept_of(x, dims), len(x.grid.axes), x.dim() - len(dims)
        ragged = [n for n in dims if isinstance(self.sizes[n], Axis)]
        tail = [c - 1 for c in x.order[lead:] if c <= k]
        rows = segment.reorder_rows(x.values, *self.maps(x.grid, kept, tail))
        shapes = [[sizes[self.letters.index(n)] for n in ragged] for sizes in self.groups.sizes]
        parts = rows.split([n * math.prod(shape) for n, shape in zip(self.groups.counts, shapes)])
        places = iter(range(1, 1 + len(tail)))
        order = [0, *(c - k + len(tail) for c in x.order[:lead] if c > k)]
        order += [next(places) if c <= k else c - k + len(tail) for c in x.order[lead:]]
        static = x.values.shape[1:]
        return [
            part.reshape(n, *shape, *static).permute(order)
            for part, n, shape in zip(parts, self.groups.counts, shapes)
        ]

    def kept_of(self, x: PackedTensor, dims: str) -> list[int]:
        """The axes of ``x`` that are the ragged batch dims, in the order of the first operand's."""
        lead, k = x.dim() - len(dims), len(x.grid.axes)
        ragged = [d for d in range(lead) if 1 <= x.order[d] <= k]
        fits = lead == self.lead and x.order[self.base.order.index(0)] == 0 and ragged == sorted(self.places)
        if not fits:
            raise ValueError(
                f"{self.name}: operands of shapes {tuple(self.base.shape)} and {tuple(x.shape)} need the "
                "batch and ragged dims before the matrix dims at the same places; unsqueeze or expand one"
            )
        for axis, d in zip(self.kept, self.places):
            require_same(axis, x.grid.axes[x.order[d] - 1], f"{self.name}, dim {d}")
        return [x.order[d] - 1 for d in self.places]

    def maps(self, grid: Grid, kept: list[int], tail: list[int]) -> tuple[Tensor, Tensor]:
        """The cells of ``grid``, matrix after matrix by size, row-major over ``tail``; and the inverse."""
        if not tail and kept == sorted(kept):
            return self.groups.index, self.groups.inverse

        def build() -> tuple[Tensor, Tensor]:
            axes, order = tuple(kept), grid.order_by((*kept, *tail))
            splits, rows = grid.splits(axes), len(self.groups.rows)
            first = splits.index_select(0, self.groups.index)
            counts = structure.counts(splits, rows).index_select(0, self.groups.index)
            ends = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
            index = structure.ranges(first, ends, grid.cells)
            index = index if order is None else order.index_select(0, index)
            return index, structure.invert(index)

        return grid.part.cached(("by size", tuple(kept), tuple(tail), *self.key), build)

    def put(self, parts: list[Tensor], dims: str) -> Any:
        """Results [matrices, *static batch dims, *matrix dims] for each size, in their places."""
        absent = [
            t
            for t, n in zip(parts, self.groups.counts)
            if t.dim() < 1 + len(dims) or t.shape[0] != n or t.dim() != parts[0].dim()
        ]
        if absent:
            return absent[0]
        lead = parts[0].dim() - len(dims)
        ragged = [i for i, n in enumerate(dims) if isinstance(self.sizes[n], Axis)]
        static = [i for i in range(len(dims)) if i not in ragged]
        order = [0, *(lead + i for i in ragged), *range(1, lead), *(lead + i for i in static)]
        joined = torch.cat([t.permute(order).flatten(0, len(ragged)) for t in parts])
        axes: Any = [*self.kept, *(self.sizes[dims[i]] for i in ragged)]
        numbers = iter(range(len(axes) + 1, len(axes) + lead))
        k, entries = len(self.base.grid.axes), []
        for d, c in enumerate(self.base.order[: self.lead]):
            entries.append(1 + self.places.index(d) if d in self.places else 0 if c == 0 else next(numbers))
        last = len(axes) + lead
        entries += [
            1 + len(self.kept) + ragged.index(i) if i in ragged else last + static.index(i)
            for i in range(len(dims))
        ]
        if not axes:
            back = segment.reorder_rows(joined, self.groups.inverse, self.groups.index)
            return back.permute(entries)
        same = len(axes) == k and all(a is b for a, b in zip(axes, self.base.grid.axes))
        grid = self.base.grid if same else Grid(axes)
        kept = list(range(len(self.kept)))
        index, inverse = self.maps(grid, kept, list(range(len(kept), len(axes))))
        return PackedTensor(segment.reorder_rows(joined, inverse, index), grid, tuple(entries))


# ------------------------------------------------------------------ covariances


def covariance(correction: int) -> Callable[[Tensor], Tensor]:
    """A function of matrices (..., variables, observations): their covariances."""

    def call(values: Tensor) -> Tensor:
        values = (
            values
            if values.is_floating_point() or values.is_complex()
            else values.to(torch.get_default_dtype())
        )
        centred = values - values.mean(-1, keepdim=True)
        return centred @ centred.mH / max(values.shape[-1] - correction, 0)

    return call


def correlation(values: Tensor) -> Tensor:
    """Matrices (..., variables, observations) -> correlations of their variables."""
    out = covariance(1)(values)
    spread = out.diagonal(dim1=-2, dim2=-1).real.sqrt()
    out = out / spread.unsqueeze(-1) / spread.unsqueeze(-2)
    return torch.complex(out.real.clip(-1, 1), out.imag.clip(-1, 1)) if out.is_complex() else out.clip(-1, 1)

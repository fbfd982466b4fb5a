"""PackedTensor: a batch of samples of varying size, stored without padding.

``values`` [cells, *static] holds the valid positions of all samples, sample after sample; ``grid``
says which sample and position each row is; ``order`` gives the logical dims:

    entry    meaning                     storage
    0        the batch                   (rows, by grid.offsets)
    1..k     axis k - 1 of the grid      (rows)
    k + 1..  a static dim                dim 1.. of ``values``
    ROWS     batch and axes flattened    dim 0 of ``values``

Permuting dims changes ``order`` alone. It is a plain object with ``__torch_function__`` and not a
``torch.Tensor`` subclass: autograd runs on ``values`` and ``torch.compile`` traces through it.
"""

from __future__ import annotations

import dis
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked

from . import dispatch
from .axis import Axis, Extent, Grid
from .layout import map_grid, padded_index
from .pattern import Pattern, check_sample, parse

#: The entry of ``order`` for batch and ragged axes flattened into one dim of valid rows.
ROWS = -1


@dataclass(eq=False, repr=False)
class PackedTensor:
    """A packed batch.

    Args:
        values: [cells, *static], the payload.
        grid: its structure.
        order: what each logical dim is; see the module's docstring.

    The constructor checks nothing; :meth:`from_list`, :meth:`from_padded`, :meth:`from_offsets` and
    :meth:`from_nested` do.
    """

    values: Tensor
    grid: Grid
    order: tuple[int, ...]

    def __post_init__(self) -> None:
        if not torch.compiler.is_compiling() and self.grid.dynamic:
            mark_rows(self.values)

    __hash__ = object.__hash__
    is_nested = False
    is_sparse = False
    is_quantized = False

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return dispatch.call(func, args, kwargs)

    if TYPE_CHECKING:  # methods and operators are generated from the table

        def __getattr__(self, name: str) -> Any: ...

    # -------------------------------------------------------------- constructors

    @classmethod
    def from_list(cls, tensors: Sequence[Tensor], pattern: str | Pattern) -> PackedTensor:
        """Pack one tensor a sample.

        Args:
            tensors: B tensors of the shape that ``pattern`` describes, of one dtype and device.
            pattern: e.g. ``"n _"``; see :mod:`ops.pattern`.

        Raises:
            ValueError: a shape, dtype or device that does not fit (names the sample); or no tensors, and
                a static dim whose size the pattern does not give.
        """
        pattern = _ragged_pattern(pattern)
        if not tensors:
            return cls._of_no_samples(pattern)
        _check_list(tensors, pattern)
        axes: dict[str, Axis] = {}
        for d, name in zip(pattern.ragged, pattern.names):
            if name not in axes:
                axes[name] = Axis([t.shape[d] for t in tensors], name=name, device=tensors[0].device)
        grid = Grid([axes[name] for name in pattern.names])
        dims = (*pattern.ragged, *pattern.static)
        static = [tensors[0].shape[d] for d in pattern.static]
        rows = [t.permute(dims).reshape(n, *static) for t, n in zip(tensors, grid.lengths.tolist())]
        return cls(torch.cat(rows), grid, pattern.order)

    @classmethod
    def _of_no_samples(cls, pattern: Pattern) -> PackedTensor:
        static = [pattern.tokens[d] for d in pattern.static]
        if None in static:
            raise ValueError(
                f"cannot pack an empty list with the pattern '{pattern}': write the sizes of '_'"
            )
        axes = {name: Axis([], name=name) for name in pattern.names}
        grid = Grid([axes[name] for name in pattern.names])
        return cls(torch.empty(0, *static), grid, pattern.order)  # type: ignore[arg-type]

    @classmethod
    def from_padded(cls, padded: Tensor, lengths: Any, pattern: str | Pattern | None = None) -> PackedTensor:
        """Pack the valid positions of a padded batch.

        Args:
            padded: (B, *sample dims), ragged dims padded at their end.
            lengths: [B], or for several axes a mapping from axis name to [B].
            pattern: of one sample; by default ``"n _ ..."``.

        Raises:
            ValueError: a length exceeds the padded size.
        """
        if pattern is None:
            pattern = " ".join(["n", *["_"] * (padded.dim() - 2)])
        pattern = _ragged_pattern(pattern)
        named = lengths if isinstance(lengths, dict) else {name: lengths for name in set(pattern.names)}
        axes = {name: Axis(named[name], name=name, device=padded.device) for name in pattern.names}
        grid = Grid([axes[name] for name in pattern.names])
        for d, axis in zip(pattern.ragged, grid.axes):
            if grid.batch_size != padded.shape[0] or axis.max_length > padded.shape[d + 1]:
                raise ValueError(
                    f"lengths of {grid.batch_size} samples up to {axis.max_length} do not fit the padded "
                    f"shape {tuple(padded.shape)} with the pattern '{pattern}'"
                )
        ragged = [d + 1 for d in pattern.ragged]
        dense = padded.permute(0, *ragged, *[d + 1 for d in pattern.static])
        flat = dense.reshape(-1, *dense.shape[1 + len(ragged) :])
        index = padded_index(grid, [padded.shape[d] for d in ragged])
        return cls(flat.index_select(0, index), grid, pattern.order)

    @classmethod
    def from_offsets(
        cls, values: Tensor, offsets: Tensor, lengths: Any = None, name: str | None = None
    ) -> PackedTensor:
        """Wrap an already packed buffer: tokens of all samples with ``cu_seqlens`` or row splits.

        Args:
            values: [total, *static]; shared, not copied.
            offsets: [B + 1], from 0 to ``total``.
            lengths: [B] on the host, if at hand; else ``offsets`` are read once.
            name: the axis' name.

        Raises:
            ValueError: the offsets do not start at 0, decrease, or do not end at ``values.shape[0]``.
        """
        host = offsets.detach().cpu().numpy()
        if host.ndim != 1 or not len(host) or host[0] != 0 or host[-1] != values.shape[0]:
            raise ValueError(
                f"offsets must run from 0 to {values.shape[0]} (the rows of values); got {host.tolist()[:8]}"
            )
        lengths = np.diff(host.astype(np.int64)) if lengths is None else lengths
        device_offsets = offsets.to(device=values.device, dtype=torch.int32)
        axis = Axis(lengths, device_offsets, name=name)
        return cls(values, Grid((axis,)), tuple(range(values.dim() + 1)))

    @classmethod
    def from_nested(cls, nested: Tensor, name: str | None = None) -> PackedTensor:
        """Pack a ``torch.nested`` tensor, of the jagged layout (shared) or the strided one (copied)."""
        if nested.layout != torch.jagged:
            parts = list(nested.unbind())
            return cls.from_list(parts, " ".join([name or "n", *["_"] * (parts[0].dim() - 1)]))
        ragged: int = nested._ragged_idx  # type: ignore[attr-defined]
        values = nested.values().movedim(ragged - 1, 0)
        packed = cls.from_offsets(values, nested.offsets(), name=name)  # type: ignore[attr-defined]
        order = [0, *range(2, values.dim() + 1)]
        order.insert(ragged, 1)
        return cls(packed.values, packed.grid, tuple(order))

    # -------------------------------------------------------------- structure

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The ragged axes, in the order of storage."""
        return self.grid.axes

    @property
    def batch_size(self) -> int:
        """Number of samples B."""
        return self.grid.batch_size

    @property
    def offsets(self) -> Tensor:
        """Where each sample's rows begin in ``values``, int32 [B + 1]."""
        return self.grid.offsets

    @property
    def sizes(self) -> Tensor:
        """The exact shape of every sample, int64 [B, dims of a sample], on the host."""
        k, columns = len(self.axes), []
        for c in self.order:
            if 1 <= c <= k:
                columns.append(self.axes[c - 1].lengths)
            elif c == ROWS:
                columns.append(self.grid.lengths)
            elif c > k:
                columns.append(torch.full_like(self.grid.lengths, self.values.shape[c - k]))
        return torch.stack(columns, 1)

    @property
    def shape(self) -> torch.Size:
        """The padded envelope (B, max, ...); a ragged entry knows its axis."""
        return torch.Size([self._extent(c) for c in self.order])

    def _extent(self, c: int) -> int:
        k = len(self.grid.axes)
        if c > k:
            return self.values.shape[c - k]
        if c == 0:
            return self.grid.batch_size
        if c == ROWS:
            return self.values.shape[0]
        axis = self.grid.axes[c - 1]
        return axis.max_length if torch.compiler.is_compiling() else Extent(axis)

    def size(self, dim: int | None = None) -> Any:
        """``shape``, or one entry of it."""
        return self.shape if dim is None else self._extent(self.order[self.dim_index(dim)])

    def dim(self) -> int:
        """Number of logical dims."""
        return len(self.order)

    ndim = property(dim)
    ndimension = dim

    def numel(self) -> int:
        """Number of valid entries."""
        return self.values.numel()

    nelement = numel

    def dim_index(self, dim: int) -> int:
        """A logical dim counted from the front.

        Raises:
            IndexError: out of range.
        """
        n = len(self.order)
        if not -n <= dim < n:
            raise IndexError(f"dim {dim} is out of range for a packed tensor of {n} dims")
        return dim % n

    def __getitem__(self, key: Any) -> Any:
        """Samples, positions, slices and new dims; see :mod:`ops.rules.indexing`."""
        return dispatch.PYTHON["__getitem__"](Tensor.__getitem__, (self, key), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        """In place on the payload; see :func:`ops.rules.indexing.setitem`."""
        dispatch.PYTHON["__setitem__"](Tensor.__setitem__, (self, key, value), {})

    def __len__(self) -> int:
        if not torch.compiler.is_compiling():
            _deny_subscripts(sys._getframe(1))
        return self._extent(self.order[0])

    def __iter__(self) -> Iterator[Any]:
        if self.order[0] == 0:
            return iter(self.to_list())
        if self.order[0] == ROWS or self.order[0] > len(self.axes):
            return (self[i] for i in range(len(self)))
        raise TypeError("cannot iterate over a ragged dim; put the batch first or use to_list()")

    def __bool__(self) -> bool:
        if self.values.numel() != 1:
            raise RuntimeError("the truth value of a packed tensor with more than one entry is ambiguous")
        return bool(self.values)

    def __contains__(self, item: Any) -> bool:
        return item in self.values

    # -------------------------------------------------------------- payload and autograd

    @property
    def dtype(self) -> torch.dtype:
        """The payload's dtype."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """The payload's device."""
        return self.values.device

    @property
    def is_cuda(self) -> bool:
        """Whether the payload lies on a CUDA device."""
        return self.values.is_cuda

    @property
    def requires_grad(self) -> bool:
        """Whether autograd records what happens to the payload."""
        return self.values.requires_grad

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        self.requires_grad_(flag)

    def requires_grad_(self, flag: bool = True) -> PackedTensor:
        """Make this packed tensor a leaf that collects gradients; the caller's tensors stay as they were."""
        if self.values.grad_fn is not None:
            self.values.requires_grad_(flag)
        elif self.values.requires_grad != flag:
            self.values = self.values.detach().requires_grad_(flag)
            self.__post_init__()
        return self

    @property
    def grad(self) -> PackedTensor | None:
        """The gradient, packed alike; None before backward."""
        grad = self.values.grad
        return None if grad is None else PackedTensor(grad, self.grid, self.order)

    @grad.setter
    def grad(self, grad: PackedTensor | None) -> None:
        self.values.grad = None if grad is None else grad.values

    @property
    def grad_fn(self) -> Any:
        """The payload's node in the autograd graph."""
        return self.values.grad_fn

    @property
    def is_leaf(self) -> bool:
        """Whether the payload is a leaf of the autograd graph."""
        return self.values.is_leaf

    @property
    def data(self) -> PackedTensor:
        """The payload without its history."""
        return self.detach()

    def retain_grad(self) -> None:
        """Keep the gradient of a tensor that is not a leaf."""
        self.values.retain_grad()

    def backward(self, gradient: Any = None, **kwargs: Any) -> None:
        """Backward from the payload; ``gradient`` packed alike, or for one entry None."""
        if isinstance(gradient, PackedTensor):
            gradient = gradient.values
        self.values.backward(gradient, **kwargs)

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """Call ``hook`` with the payload's gradient."""
        return self.values.register_hook(hook)

    def detach(self) -> PackedTensor:
        """The same payload, outside the autograd graph."""
        return PackedTensor(self.values.detach(), self.grid, self.order)

    def clone(self, **kwargs: Any) -> PackedTensor:
        """A copy of the payload; the structure is shared."""
        return PackedTensor(self.values.clone(**kwargs), self.grid, self.order)

    def contiguous(self, **kwargs: Any) -> PackedTensor:
        """The payload, contiguous in storage."""
        return PackedTensor(self.values.contiguous(), self.grid, self.order)

    def is_contiguous(self, **kwargs: Any) -> bool:
        """Whether the payload is contiguous and dims are in the order of storage."""
        return self.values.is_contiguous() and self.order == tuple(range(len(self.order)))

    def to(self, *args: Any, **kwargs: Any) -> PackedTensor:
        """Convert dtype and device as ``torch.Tensor.to`` does; the structure moves along.

        A copy from pinned memory does not block unless ``non_blocking=False`` is given.
        """
        args = tuple(a.values if isinstance(a, PackedTensor) else a for a in args)
        if "non_blocking" not in kwargs and not torch.compiler.is_compiling() and self.is_pinned():
            kwargs["non_blocking"] = True
        values = self.values.to(*args, **kwargs)
        if values is self.values:
            return self
        if values.device == self.values.device:
            return PackedTensor(values, self.grid, self.order)
        blocking = {"non_blocking": kwargs.get("non_blocking", False)}
        grid = map_grid(self.grid, lambda t: t.to(values.device, **blocking), {})
        return PackedTensor(values, grid, self.order)

    def cpu(self) -> PackedTensor:
        """On the host."""
        return self.to("cpu")

    def cuda(self, device: Any = None, non_blocking: bool = False) -> PackedTensor:
        """On a CUDA device."""
        return self.to("cuda" if device is None else device, non_blocking=non_blocking)

    def pin_memory(self) -> PackedTensor:
        """In pinned memory; a no-op without an accelerator."""
        if not torch.accelerator.is_available():
            return self
        return map_tensors(self, lambda t: t.pin_memory(), {})

    def is_pinned(self) -> bool:
        """Whether the payload lies in pinned memory."""
        return self.device.type == "cpu" and self.values.is_pinned()

    def record_stream(self, stream: Any) -> None:
        """Tell the allocator that ``stream`` uses the payload and the structure."""
        self.values.record_stream(stream)
        self.offsets.record_stream(stream)

    # -------------------------------------------------------------- views as samples, padded, nested

    def to_list(self) -> list[Tensor]:
        """One dense tensor a sample, in the logical order of dims (without the batch)."""
        if ROWS in self.order:
            raise ValueError("samples were flattened into rows; unflatten first: x.view(B, N, ...)")
        if not self.batch_size:
            return []
        static = self.values.shape[1:]
        dims = [c - 1 for c in self.order if c != 0]
        parts = self.values.split(self.grid.lengths.tolist())
        shapes = zip(*(axis.lengths.tolist() for axis in self.axes))
        return [part.reshape(*shape, *static).permute(dims) for part, shape in zip(parts, shapes)]

    def to_padded(self, fill: Any = 0) -> Tensor:
        """The padded envelope: ``shape``, with ``fill`` at positions that no sample has."""
        if ROWS in self.order:
            return self.values.permute([0 if c == ROWS else c - len(self.axes) for c in self.order])
        static = self.values.shape[1:]
        sizes = [axis.max_length for axis in self.axes]
        flat = self.values.new_full((self.batch_size * math.prod(sizes), *static), fill)
        flat = flat.index_copy(0, padded_index(self.grid, sizes), self.values)
        return flat.view(self.batch_size, *sizes, *static).permute(self.order)

    def mask(self) -> Tensor:
        """True at valid positions: bool over the batch and the ragged dims, in logical order."""
        k = len(self.axes)
        valid = torch.ones(self.grid.cells, dtype=torch.bool, device=self.device)
        order = tuple(c for c in self.order if c <= k)
        return PackedTensor(valid, self.grid, order).to_padded(False)

    def to_nested(self) -> Tensor:
        """A ``torch.nested`` tensor of the jagged layout, sharing the payload where the layout allows.

        Raises:
            ValueError: more than one ragged axis, or the batch is not the first dim.
        """
        if len(self.axes) != 1 or self.order[0] != 0:
            raise ValueError(
                "torch.nested holds one ragged dim after the batch; this packed tensor has the axes "
                f"{[axis.label for axis in self.axes]} and the order {self.order}"
            )
        place = self.order.index(1)
        order = [c - 1 for c in self.order if c > 1]
        values = self.values.permute(0, *order).movedim(0, place - 1)
        return torch.nested.nested_tensor_from_jagged(values, offsets=self.offsets.long(), jagged_dim=place)

    # -------------------------------------------------------------- printing, copying

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.grid.offsets.device != self.values.device:  # loaded to another device than saved from
            self.grid = map_grid(self.grid, lambda t: t.to(self.values.device), {})
        self.__post_init__()

    def __repr__(self) -> str:
        shape = ", ".join(self._describe(c) for c in self.order)
        lines = [f"PackedTensor(shape=({shape}), dtype={self.dtype}"]
        if self.device.type != "cpu":
            lines[0] += f", device='{self.device}'"
        if self.requires_grad:
            lines[0] += ", requires_grad=True"
        unique = {id(axis): axis for axis in self.axes}
        lines.append(f"  axes: {', '.join(repr(axis)[5:-1] for axis in unique.values())}")
        head = self.values.detach()[:3]
        text = str(head).replace("\n", "\n          ")
        more = ", ..." if self.values.shape[0] > len(head) else ""
        lines.append(f"  values: {text}{more} [{self.values.shape[0]} rows])")
        return "\n".join(lines)

    def _describe(self, c: int) -> str:
        if 1 <= c <= len(self.axes):
            axis = self.axes[c - 1]
            return f"{axis.label}<={axis.max_length}"
        return f"{self._extent(c)} rows" if c == ROWS else str(self._extent(c))


def _marks() -> dict[str, Any]:
    template = torch.empty(2, 2)
    mark_unbacked(template, 0)
    return dict(template.__dict__)


_MARKS = _marks()


def mark_rows(values: Tensor) -> None:
    """What ``mark_unbacked(values, 0)`` does, in a tenth of the time: it runs after every operator."""
    marks = values.__dict__
    if "_dynamo_unbacked_indices" not in marks:
        marks.update(_MARKS, _dynamo_unbacked_indices={0})


_SUBSCRIPTS = {dis.opmap.get(name) for name in ("BINARY_SUBSCR", "STORE_SUBSCR")}


def _deny_subscripts(frame: FrameType) -> None:
    """Have no length for ``dense[x]``.

    A dense tensor takes a key that has a length (below 32) for several indices, here for the samples, and
    else asks its ``__torch_function__``. It asks for the length in the caller's subscript instruction, from
    which no Python code does.
    """
    if frame.f_code.co_code[frame.f_lasti] in _SUBSCRIPTS:
        raise TypeError("a packed tensor is one index, not a sequence of indices")


def stored_dims(x: PackedTensor) -> list[int]:
    """The logical dims in the order in which they are stored."""
    return sorted(range(len(x.order)), key=lambda d: x.order[d])


def is_packed(x: Any) -> bool:
    """Whether ``x`` is a packed tensor."""
    return type(x) is PackedTensor


def like(x: PackedTensor, values: Tensor) -> PackedTensor:
    """The structure of ``x`` around another payload of as many dims."""
    return PackedTensor(values, x.grid, x.order)


def map_tensors(x: PackedTensor, fn: Callable[[Tensor], Tensor], memo: dict[Any, Any]) -> PackedTensor:
    """Apply ``fn`` to the payload and to the structure tensors that live on the device.

    Args:
        memo: one dict for all fields of a batch, so that fields that shared structure still do.
    """
    return PackedTensor(fn(x.values), map_grid(x.grid, fn, memo), x.order)


def sample_rows(x: PackedTensor, samples: Sequence[int]) -> PackedTensor:
    """A sub-batch: the given samples in the given order."""
    grid = x.grid.select(samples)
    starts = x.offsets[:-1].index_select(0, torch.tensor(list(samples), dtype=torch.int64, device=x.device))
    shift = (starts - grid.offsets[:-1]).index_select(0, grid.sample_ids)
    index = torch.arange(grid.cells, device=x.device) + shift
    return PackedTensor(x.values.index_select(0, index), grid, x.order)


def _ragged_pattern(pattern: str | Pattern) -> Pattern:
    parsed = parse(pattern) if isinstance(pattern, str) else pattern
    if not parsed.names:
        raise ValueError(f"pattern '{parsed}' names no ragged axis; stack the tensors instead")
    return parsed


def _check_list(tensors: Sequence[Tensor], pattern: Pattern) -> None:
    first = tensors[0]
    for i, tensor in enumerate(tensors):
        check_sample(pattern, tensor.shape, f"sample {i}")
        if tensor.dtype != first.dtype or tensor.device != first.device:
            raise ValueError(
                f"sample {i} is {tensor.dtype} on {tensor.device}, sample 0 {first.dtype} on {first.device}"
            )
        for d in pattern.static:
            if tensor.shape[d] != first.shape[d]:
                raise ValueError(
                    f"sample {i} has shape {tuple(tensor.shape)}, sample 0 {tuple(first.shape)}: dim {d} is "
                    f"static in the pattern '{pattern}'. Name it there if it varies."
                )


torch.serialization.add_safe_globals([PackedTensor])

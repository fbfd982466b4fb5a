"""Batch: the fields of a batch, by name."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from ops import PackedTensor, is_packed, map_tensors


@dataclass(eq=False, repr=False)
class Batch(Mapping[Any, Any]):
    """A mapping from field names to fields; ragged fields share their axes.

    A field is a :class:`~ops.PackedTensor`, a tensor [B, ...], a list of B, or a Batch where the samples
    are nested. It is reached as ``batch["tokens"]`` or ``batch.tokens`` (``[]`` also for names that a
    Batch has a method for, such as ``"keys"``). ``len(batch)`` is the number of fields,
    ``batch.batch_size`` the number of samples.

    A Batch of tuples or named tuples iterates over its fields, so that ``ids, label = batch`` works, and
    takes positions: ``batch[0]``, ``batch[-1]``. Any other iterates over its names, as mappings do.

    It is a dataclass, so that DDP and FSDP find the tensors of one that a module returns, and a pytree
    node whose children are the fields.

    Args:
        _contents: field names to fields, or pairs of these; copied.
        _ordered: whether the samples were tuples; by default whether the names are 0, 1, 2, ...
    """

    _contents: Mapping[Any, Any]
    _ordered: bool | None = None

    def __post_init__(self) -> None:
        self._contents = dict(self._contents)
        if self._ordered is None:
            names = list(self._contents)
            self._ordered = bool(names) and names == list(range(len(names)))

    @property
    def batch_size(self) -> int:
        """Number of samples B.

        Raises:
            ValueError: no field tells, because there is none.
        """
        for field in self._contents.values():
            if isinstance(field, Batch):
                return field.batch_size
            if is_packed(field):
                return field.batch_size
            if isinstance(field, Tensor) and field.ndim:
                return field.shape[0]
            if isinstance(field, list):
                return len(field)
        raise ValueError("a Batch without fields has no batch size")

    def __getitem__(self, name: Any) -> Any:
        if name in self._contents:
            return self._contents[name]
        if self._ordered and isinstance(name, int):
            return list(self._contents.values())[name]
        raise KeyError(f"{name!r}; the fields are {list(self._contents)}")

    def __getattr__(self, name: str) -> Any:
        contents = self.__dict__.get("_contents")
        if contents is not None and name in contents:
            return contents[name]
        shown = "" if contents is None else f"; the fields are {list(contents)}"
        raise AttributeError(f"{type(self).__name__!r} object has no field or attribute {name!r}{shown}")

    def __iter__(self) -> Iterator[Any]:
        return iter(self._contents.values() if self._ordered else self._contents)

    def __len__(self) -> int:
        return len(self._contents)

    def __contains__(self, name: object) -> bool:
        return name in self._contents

    def keys(self) -> KeysView[Any]:
        """The names of the fields."""
        return self._contents.keys()

    def values(self) -> ValuesView[Any]:
        """The fields."""
        return self._contents.values()

    def items(self) -> ItemsView[Any, Any]:
        """Pairs of name and field."""
        return self._contents.items()

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(name for name in self._contents if isinstance(name, str))]

    def to(
        self,
        device: torch.device | str | int | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool | None = None,
    ) -> Batch:
        """A Batch on another device, or of another floating-point type; axes that are shared move once.

        Args:
            device: where to; a dtype in this place is taken as ``dtype``.
            dtype: the type of floating-point fields; integers and booleans keep theirs.
            non_blocking: whether copies may run behind the host; by default where the source is pinned.
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device

        def move(tensor: Tensor) -> Tensor:
            kind = dtype if tensor.is_floating_point() else None
            behind = tensor.is_pinned() if non_blocking is None and device is not None else bool(non_blocking)
            return tensor.to(device=device, dtype=kind, non_blocking=behind)

        return self._map(move, {})

    def pin_memory(self) -> Batch:
        """A Batch in page-locked memory; without an accelerator this Batch itself."""
        if not torch.accelerator.is_available():
            return self
        return self._map(lambda t: t.pin_memory() if t.device.type == "cpu" else t, {})

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that a stream uses this batch, so that its memory is not reused too early."""

        def record(tensor: Tensor) -> Tensor:
            if tensor.device.type != "cpu":
                tensor.record_stream(stream)
            return tensor

        self._map(record, {})

    def _map(self, fn: Callable[[Tensor], Tensor], memo: dict[Any, Any]) -> Batch:
        def visit(field: Any) -> Any:
            if isinstance(field, Batch):
                return field._map(fn, memo)
            if is_packed(field):
                return map_tensors(field, fn, memo)
            return fn(field) if isinstance(field, Tensor) else field

        return Batch({name: visit(field) for name, field in self._contents.items()}, self._ordered)

    def __repr__(self) -> str:
        size = f"{self.batch_size} samples" if self._contents else "no fields"
        return "\n".join([f"Batch of {size}", *_lines(self, "  ")])


def _lines(batch: Batch, indent: str) -> list[str]:
    width = max((len(str(name)) for name, _ in batch.items()), default=0)
    lines = []
    for name, field in batch.items():
        lines.append(f"{indent}{str(name):<{width}}  {_describe(field)}")
        if isinstance(field, Batch):
            lines += _lines(field, indent + "  ")
    return lines


def _describe(field: Any) -> str:
    """One field in one line: ``packed int64 [tokens] tokens <= 31, 160 cells``."""
    if isinstance(field, Batch):
        return "Batch"
    if is_packed(field):
        return _describe_packed(field)
    if isinstance(field, Tensor):
        return f"dense  {_type(field)} {list(field.shape)}"
    return f"list   of {len(field)}" if isinstance(field, list) else repr(field)


def _describe_packed(field: PackedTensor) -> str:
    grid, static = field.grid, field.values.shape[1:]
    names = [axis.name or "n" for axis in grid.axes]
    logical = ["B", *names, *(str(size) for size in static)]
    dims = ", ".join(logical[d] for d in field.order if d)
    longest = ", ".join(f"{name} <= {axis.max_length}" for name, axis in dict(zip(names, grid.axes)).items())
    return f"packed {_type(field)} [{dims}] {longest}, {grid.cells} cells"


def _type(tensor: Any) -> str:
    device = "" if tensor.device.type == "cpu" else f" {tensor.device}"
    return str(tensor.dtype).removeprefix("torch.") + device


def _flatten(batch: Batch) -> tuple[list[Any], Any]:
    return list(batch.values()), (tuple(batch.keys()), batch._ordered)


def _flatten_with_keys(batch: Batch) -> tuple[list[tuple[Any, Any]], Any]:
    children, context = _flatten(batch)
    return [(pytree.MappingKey(name), child) for name, child in zip(context[0], children)], context


def _unflatten(children: Any, context: Any) -> Batch:
    names, ordered = context
    return Batch(dict(zip(names, children)), ordered)


pytree.register_pytree_node(
    Batch,
    _flatten,
    _unflatten,
    flatten_with_keys_fn=_flatten_with_keys,
    serialized_type_name="packload.Batch",
    to_dumpable_context=lambda context: [list(context[0]), context[1]],
    from_dumpable_context=lambda context: (tuple(context[0]), context[1]),
)
torch.serialization.add_safe_globals([Batch])

"""Batch: the fields of a batch, by name."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from ops import PackedTensor, is_packed, map_tensors

from .block import Block, Leaf, Node, parse_spec


@dataclass(eq=False, repr=False)
class Batch(Mapping[Any, Any]):
    """A mapping from field names to fields; ragged fields share their axes.

    A field is a :class:`~ops.PackedTensor`, a tensor [B, ...], a list of B, or a Batch where the samples
    are nested. It is reached as ``batch["tokens"]`` or ``batch.tokens`` (``[]`` also for names that a
    Batch has a method for, such as ``"keys"``). ``len(batch)`` is the number of fields,
    ``batch.batch_size`` the number of samples.

    A Batch of tuples or named tuples iterates over its fields, so that ``ids, label = batch`` works, and
    takes positions: ``batch[0]``, ``batch[-1]``. Any other iterates over its names, as mappings do.

    What :func:`~packload.collate` makes lies in one buffer: it is pickled as one tensor, pinned in one
    call and moved to a device in one copy, and fields are made from it when they are first asked for.
    A Batch of other fields moves them one by one.

    It is a dataclass, so that DDP and FSDP find the tensors of one that a module returns, and a pytree
    node whose children are the fields.

    Args:
        _contents: field names to fields, or pairs of these; copied.
        _ordered: whether the samples were tuples; by default whether the names are 0, 1, 2, ...
        _source: the buffer in which fields lie that were not asked for yet.
        _whole: whether these are all fields in the buffer.
    """

    _contents: Mapping[Any, Any]
    _ordered: bool | None = None
    _source: Block | None = None
    _whole: bool = False

    def __post_init__(self) -> None:
        self._contents = dict(self._contents)
        if self._ordered is None:
            names = list(self._contents)
            self._ordered = bool(names) and names == list(range(len(names)))

    @classmethod
    def over(cls, block: Block) -> Batch:
        """The Batch of what lies in a block."""
        tree = block.spec.tree
        if isinstance(tree, Leaf):
            tree = Node(False, ("",), (tree,))
        batch = _over(block, tree)
        batch._whole = True
        return batch

    @property
    def batch_size(self) -> int:
        """Number of samples B.

        Raises:
            ValueError: no field tells, because there is none.
        """
        if self._source is not None:
            return self._source.extents.batch_size
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

    def _field(self, name: Any) -> Any:
        field = self._contents[name]
        if isinstance(field, Leaf):
            field = self._source.make(field)  # type: ignore[union-attr]
            self._contents[name] = field  # type: ignore[index]
        return field

    def _made(self) -> Mapping[Any, Any]:
        """The contents, every field made."""
        if self._source is not None:
            for name in self._contents:
                self._field(name)
        return self._contents

    def __getitem__(self, name: Any) -> Any:
        if name in self._contents:
            return self._field(name)
        if self._ordered and isinstance(name, int):
            return self._field(list(self._contents)[name])
        raise KeyError(f"{name!r}; the fields are {list(self._contents)}")

    def __getattr__(self, name: str) -> Any:
        contents = self.__dict__.get("_contents")
        if contents is not None and name in contents:
            return self._field(name)
        shown = "" if contents is None else f"; the fields are {list(contents)}"
        raise AttributeError(f"{type(self).__name__!r} object has no field or attribute {name!r}{shown}")

    def __iter__(self) -> Iterator[Any]:
        return iter(self._made().values() if self._ordered else self._contents)

    def __len__(self) -> int:
        return len(self._contents)

    def __contains__(self, name: object) -> bool:
        return name in self._contents

    def keys(self) -> KeysView[Any]:
        """The names of the fields."""
        return self._contents.keys()

    def values(self) -> ValuesView[Any]:
        """The fields."""
        return self._made().values()

    def items(self) -> ItemsView[Any, Any]:
        """Pairs of name and field."""
        return self._made().items()

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(name for name in self._contents if isinstance(name, str))]

    # ------------------------------------------------------------------ as a whole

    @property
    def block(self) -> Block | None:
        """What the batch was made from: its spec, its sizes and its buffer, as they were then."""
        return self._source

    @property
    def buffer(self) -> Tensor | None:
        """What all fields lie in, uint8 [nbytes]; None if they do not, or not any more.

        They do not any more once a field's values were replaced or need a gradient, or its structure was
        marked for graphs or got maps of its own.
        """
        source = self._source
        return source.buffer if source is not None and self._whole and source.intact else None

    @property
    def nbytes(self) -> int:
        """Bytes of the fields and of what was delivered with them."""
        buffer = self.buffer
        if buffer is not None:
            return buffer.nbytes
        seen: dict[int, int] = {}

        def count(tensor: Tensor) -> Tensor:
            seen[tensor.data_ptr()] = max(tensor.nbytes, seen.get(tensor.data_ptr(), 0))
            return tensor

        self._map(count, {})
        return sum(seen.values())

    def header(self) -> tuple[str, list[Any]]:
        """What :meth:`from_buffer` needs besides the buffer; small, and can be pickled.

        Raises:
            ValueError: the fields do not lie in one buffer of host memory (see :attr:`buffer`).
        """
        header = self._header()
        if header is None:
            raise ValueError("this Batch does not lie in one buffer of host memory; pickle it instead")
        return header

    def _header(self) -> tuple[str, list[Any]] | None:
        buffer = self.buffer
        if buffer is None or buffer.device.type != "cpu":
            return None
        source: Block = self._source  # type: ignore[assignment]
        text = source.spec.text
        return None if text is None or any(map(_has_tensors, source.kept)) else (text, source.kept)

    @classmethod
    def from_buffer(cls, buffer: Tensor, header: tuple[str, list[Any]]) -> Batch:
        """The Batch that lies in a buffer of host memory, uint8 [nbytes]; see :meth:`header`."""
        text, kept = header
        return cls.over(Block.read(parse_spec(text), buffer, kept))

    def unwrap(self) -> Any:
        """The field alone, where samples were not containers but leaves; else this Batch."""
        alone = self._source is not None and self._whole and isinstance(self._source.spec.tree, Leaf)
        return self._field("") if alone else self

    def to(
        self,
        device: torch.device | str | int | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool | None = None,
    ) -> Batch:
        """A Batch on another device, or of another floating-point type; one copy if it lies in one buffer.

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

        return self._map(move, {}) if dtype is not None else self._transfer(move)

    def pin_memory(self) -> Batch:
        """A Batch in page-locked memory; without an accelerator this Batch itself."""
        if not torch.accelerator.is_available():
            return self
        return self._transfer(lambda t: t.pin_memory() if t.device.type == "cpu" else t)

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that a stream uses this batch, so that its memory is not reused too early."""

        def record(tensor: Tensor) -> Tensor:
            if tensor.device.type != "cpu":
                tensor.record_stream(stream)
            return tensor

        buffer = self.buffer
        if buffer is None:
            self._map(record, {})
        else:
            record(buffer)

    def _transfer(self, fn: Callable[[Tensor], Tensor]) -> Batch:
        """Apply what copies bytes and does not look at them."""
        buffer = self.buffer
        source = self._source
        if buffer is None or source is None or any(map(_has_tensors, source.kept)):
            return self._map(fn, {})
        moved = fn(buffer)
        return self if moved is buffer else Batch.over(source.on(moved))

    def _map(self, fn: Callable[[Tensor], Tensor], memo: dict[Any, Any]) -> Batch:
        def visit(field: Any) -> Any:
            if isinstance(field, Batch):
                return field._map(fn, memo)
            if is_packed(field):
                return map_tensors(field, fn, memo)
            return fn(field) if isinstance(field, Tensor) else field

        return Batch({name: visit(field) for name, field in self.items()}, self._ordered)

    def __getstate__(self) -> dict[str, Any]:
        header = self._header()
        if header is not None:
            return {"buffer": self.buffer, "header": header}
        return {"contents": dict(self._made()), "ordered": self._ordered}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "header" in state:
            state = Batch.from_buffer(state["buffer"], state["header"]).__dict__
        else:
            state = Batch(state["contents"], state["ordered"]).__dict__
        self.__dict__.update(state)

    def __repr__(self) -> str:
        size = f"{self.batch_size} samples" if self._contents else "no fields"
        return "\n".join([f"Batch of {size}", *_lines(self, "  ")])


def _over(block: Block, node: Node) -> Batch:
    contents = {
        name: _over(block, part) if isinstance(part, Node) else part
        for name, part in zip(node.names, node.parts)
    }
    return Batch(contents, node.ordered, block)


def _has_tensors(field: Any) -> bool:
    return isinstance(field, Tensor) or is_packed(field)


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

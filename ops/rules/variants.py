"""Forms that follow from other rows by name: ``NAME_`` in place, ``NAME_copy`` with memory of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from ..kernels.define import recorded
from ..tensor import PackedTensor, is_packed, like
from .shape import on_tensor, slice_of

#: In-place forms that change the structure of their operand and share its memory ...
RESTRUCTURED = "squeeze unsqueeze transpose swapaxes swapdims t detach"
#: ... and those that write into its memory.
OVERWRITTEN = "cumsum cumprod tril triu masked_scatter"


def in_place(handler: dispatch.Handler, function: Any, writes: bool) -> dispatch.Handler:
    """``handler`` of ``function``, its result put into the first operand."""

    def inplace(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PackedTensor:
        x = args[0]
        if not is_packed(x):
            raise RuntimeError(f"'{dispatch.name_of(func)}' would write packed values into a dense tensor")
        writing = writes and not torch.compiler.is_compiling()
        source = like(x, x.values.clone()) if writing and recorded(x.values) else x  # backward may read it
        out = handler(function, (source, *args[1:]), kwargs)
        if writing:
            x.values.copy_(out.values)
        else:
            x.values, x.grid, x.order = out.values, out.grid, out.order
        return x

    return inplace


def copied(handler: dispatch.Handler, function: Any = None) -> dispatch.Handler:
    """``handler`` of ``function``, its results copied."""

    def copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _copies(handler(function, args, kwargs))

    return copy


def _copies(out: Any) -> Any:
    if isinstance(out, (tuple, list)):
        return tuple(_copies(part) for part in out)
    if is_packed(out):
        return like(out, out.values.clone())
    return out.clone() if isinstance(out, Tensor) else out


def _itself(x: PackedTensor) -> PackedTensor:
    return x


for _forms, _writes in ((RESTRUCTURED, False), (OVERWRITTEN, True)):
    for _name in _forms.split():
        _row, _function = dispatch.ROWS[_name], getattr(torch, _name)
        dispatch.register(_row.kind, in_place(_row.handler, _function, _writes), f"{_name}_")
for _name, _rule in {"alias": _itself, "detach": PackedTensor.detach, "slice": slice_of}.items():
    dispatch.register("shape", copied(on_tensor(_rule)), f"{_name}_copy")
for _row in list(dispatch.ROWS.values()):
    _name = f"{_row.name}_copy"
    if _name not in dispatch.ROWS and list(dispatch.spellings(_name)):
        _handler = copied(_row.handler, next(dispatch.spellings(_row.name)))
        dispatch.register(_row.kind, _handler, _name, _row.mode, _row.compiles)

"""Operators without a packed form that work on each sample by itself: in eager, one sample at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from ..statistics import ValuesIndices
from ..tensor import PackedTensor, is_packed, like, stored_dims


def per_sample(result: Callable[..., Any]) -> dispatch.Handler:
    """A handler that runs the dense operator on each sample, as a batch of one.

    Args:
        result: ``result(x, parts, args, kwargs)`` puts the samples' results together.
    """

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, rest = args[0], args[1:]
        if any(is_packed(a) for a in (*rest, *kwargs.values())):
            raise NotImplementedError(f"{dispatch.name_of(func)} takes one packed operand")
        place = x.order.index(0)
        parts = [func(sample.unsqueeze(place), *rest, **kwargs) for sample in x.to_list()]
        if not parts:
            raise ValueError(f"{dispatch.name_of(func)}: a batch of no samples has no result")
        if isinstance(parts[0], Tensor):
            return result(x, parts, rest, kwargs)
        return ValuesIndices(*(result(x, list(column), rest, kwargs) for column in zip(*parts)))

    return handler


def along_dim(x: PackedTensor, parts: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One dim, the first argument, was reduced to one entry: the others stay what they are."""
    dim = args[0] if args else kwargs.get("dim", -1)
    keepdim = args[1] if len(args) > 1 else kwargs.get("keepdim", False)
    kept = parts if keepdim else [part.unsqueeze(dim) for part in parts]
    shaped: Any = like(x, x.values.detach()).amax(dim, keepdim=True)
    if not is_packed(shaped):
        out: Any = torch.cat(kept, x.order.index(0))
    else:
        storage = stored_dims(shaped)
        rows = [part.permute(storage).flatten(0, len(shaped.grid.axes)) for part in kept]
        out = PackedTensor(torch.cat(rows), shaped.grid, shaped.order)
    return out if keepdim else out.squeeze(dim)


dispatch.register_fallback(per_sample(along_dim), "mode")

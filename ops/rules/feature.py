"""Feature-wise operators: they work on static dims and leave every axis as it is."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .. import dispatch
from ..cells import static_dim
from ..tensor import PackedTensor, like
from .shape import on_tensor


def trailing(x: PackedTensor, count: int, func: Any) -> PackedTensor:
    """``x`` with its last ``count`` logical dims stored last, in order.

    Raises:
        ValueError: one of them is not static.
    """
    n = len(x.order)
    if n - count > len(x.grid.axes) and (
        x.order[-1] == n - 1 if count == 1 else x.order[n - count :] == tuple(range(n - count, n))
    ):
        return x
    last = [static_dim(x, d, dispatch.name_of(func)) for d in range(n - count, n)]
    dims = [d for d in range(x.values.dim()) if d not in last] + last
    k = len(x.grid.axes)
    place = {old + k: new + k for new, old in enumerate(dims) if old}
    return PackedTensor(x.values.permute(dims), x.grid, tuple(place.get(c, c) for c in x.order))


def last_dim(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Operators on the last dim: ``linear`` and the like."""
    return _trailing_call(func, args, kwargs, 1)


def _trailing_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> Any:
    x, rest = _operand(func, args, kwargs)
    x = trailing(x, count, func)
    values = func(x.values, *rest, **kwargs)
    if values.dim() != x.values.dim():
        raise ValueError(f"{dispatch.name_of(func)} must keep the last dim of a packed tensor (of any size)")
    return PackedTensor(values, x.grid, x.order)


def along_dim(position: int, default: int | None) -> dispatch.Handler:
    """Operators along one static dim, which is argument number ``position`` or ``dim=``."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, rest = _operand(func, args, kwargs)
        name = dispatch.name_of(func)
        given = rest[position - 1] if len(rest) >= position else kwargs.get("dim", default)
        if given is None:
            raise ValueError(f"{name} on a packed tensor needs an explicit dim=")
        dim = static_dim(x, given, name)
        if len(rest) >= position:
            rest = (*rest[: position - 1], dim, *rest[position:])
        else:
            kwargs = {**kwargs, "dim": dim}
        return like(x, func(x.values, *rest, **kwargs))

    return handler


def append_dim(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Operators whose result has one more static dim, at the end: ``embedding``."""
    x, rest = _operand(func, args, kwargs)
    k, n = len(x.grid.axes), len(x.order)
    values = func(x.values, *rest, **kwargs)
    return PackedTensor(values, x.grid, (*x.order, k + values.dim() - 1 if n else 0))


def _operand(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[PackedTensor, tuple[Any, ...]]:
    if kwargs.get("out") is not None:
        dispatch.refuse_out(dispatch.name_of(func), kwargs)
    x, rest = (args[0], args[1:]) if args else (kwargs.pop("input"), ())
    if type(x) is not PackedTensor:
        raise TypeError(f"{dispatch.name_of(func)}: the input must be packed where a parameter is")
    return x, rest


def prelu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``F.prelu``: one slope, or one for each entry of dim 1, which then is static."""
    x, (weight,) = _operand(func, args, kwargs)
    if weight.numel() == 1:
        return like(x, func(x.values, weight))
    place = static_dim(x, 1, "prelu with several slopes")
    slopes = weight.view(*[-1 if d == place else 1 for d in range(x.values.dim())])
    return like(x, torch.where(x.values > 0, x.values, slopes * x.values))


def _query(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(args[0].values, *args[1:], **kwargs)


def _is_signed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return args[0].values.dtype.is_signed  # Dynamo does not know the method


def _numel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return args[0].numel()


def view_as_complex(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PackedTensor:
    """Pairs in the last dim, which is static, as complex numbers."""
    x, _ = _operand(func, args, kwargs)
    x = trailing(x, 1, func)
    return PackedTensor(func(x.values), x.grid, x.order[:-1])


def one_hot(x: PackedTensor, num_classes: int = -1) -> PackedTensor:
    """A new static last dim with 1 at each entry's number."""
    if num_classes < 1:
        raise ValueError("one_hot of a packed tensor needs num_classes=: a batch does not show all classes")
    return append_dim(F.one_hot, (x, num_classes), {})


def lookup(position: int) -> dispatch.Handler:
    """Entry by entry operators whose other operand, a dense table, has no part in the structure."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dispatch.refuse_out(dispatch.name_of(func), kwargs)
        operands = [*args, *kwargs.values()]
        x = args[position]
        packed = [a for a in operands if type(a) is PackedTensor]
        table = args[1 - position]
        if len(packed) != 1 or packed[0] is not x or (position and table.dim() != 1):
            raise ValueError(
                f"{dispatch.name_of(func)}: the table must be dense, and of one dim for searchsorted"
            )
        return like(x, func(*(x.values if a is x else a for a in args), **kwargs))

    return handler


def _same(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """``equal`` and ``allclose``: of one structure, and of equal values."""
    x, y, *rest = args
    if type(x) is not type(y) or x.order != y.order or x.grid.batch_size != y.grid.batch_size:
        return False
    pairs = zip(x.grid.axes, y.grid.axes)
    return all(torch.equal(a.lengths, b.lengths) for a, b in pairs) and func(
        x.values, y.values, *rest, **kwargs
    )


def _is_same_size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return torch.equal(args[0].sizes, args[1].sizes)


def _method(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return getattr(args[0], dispatch.name_of(func))(*args[1:], **kwargs)


dispatch.register("feature", last_dim, "linear")
dispatch.register("feature", along_dim(1, -1), "glu")
dispatch.register("feature", prelu, "prelu")
dispatch.register("feature", append_dim, "view_as_real")
dispatch.register("feature", view_as_complex, "view_as_complex")
dispatch.register_function("feature", append_dim, "embedding", F.embedding)
dispatch.register_function("feature", on_tensor(one_hot), "one_hot", F.one_hot)
dispatch.register("feature", lookup(0), "isin bucketize")
dispatch.register("feature", lookup(1), "searchsorted")
dispatch.register("query", _same, "equal allclose", compiles=False)  # a truth value read from data
dispatch.register("query", _is_same_size, "is_same_size", compiles=False)  # the same, from lengths
dispatch.register("query", _method, "clone detach contiguous")
dispatch.register("query", _query, "is_floating_point is_complex")
dispatch.register("query", _query, "is_conj is_neg", compiles=False)  # of views, which a graph has not
dispatch.register("query", _is_signed, "is_signed")
dispatch.register("query", _numel, "numel nelement")

"""The registry of operators and the door through which PyTorch reaches it.

An operator is a row: its name, its kind and the handler of its kind. ``register`` files a row under
every spelling that PyTorch has for the name: ``torch.add``, ``torch.Tensor.add``, ``F.relu`` and so
on. Nothing is ever applied to the raw payload by accident: a function without a row raises.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

NAMESPACES: tuple[ModuleType | type, ...] = (torch, F, torch.Tensor, torch.special)


@dataclass(frozen=True)
class Row:
    """One operator.

    Attributes:
        handler: the handler of its ``kind``.
        mode: ``"packed"``, or ``"fallback"``: one sample at a time.
        compiles: whether it works inside a graph.
    """

    name: str
    kind: str
    handler: Handler
    mode: str = "packed"
    compiles: bool = True


class Covered(NamedTuple):
    """A row of :func:`coverage`."""

    operator: str
    kind: str
    mode: str
    compiles: bool


class FallbackWarning(UserWarning):
    """An operator runs one sample at a time."""


#: Every function that PyTorch may hand us -> the handler of its kind.
TABLE: dict[Any, Handler] = {}
#: Dense tensors' methods for Python's operators, by name: Dynamo's stand-ins for the reflected ones are
#: not found in ``TABLE``.
PYTHON: dict[str, Handler] = {}
#: Operator name -> its row.
ROWS: dict[str, Row] = {}


def spellings(name: str) -> Iterator[Any]:
    """Every function of PyTorch that has this name."""
    for namespace in NAMESPACES:
        function = getattr(namespace, name, None)
        if callable(function):
            yield function


def register(
    kind: str,
    handler: Handler,
    names: Iterable[str] | str,
    mode: str = "packed",
    compiles: bool = True,
) -> None:
    """File rows of one kind.

    Raises:
        ValueError: PyTorch has no function of that name, or the name already has a row.
    """
    for name in names.split() if isinstance(names, str) else names:
        functions = list(spellings(name))
        if not functions:
            raise ValueError(f"PyTorch has no operator '{name}'")
        if name in ROWS:
            raise ValueError(f"operator '{name}' has a row already, of kind '{ROWS[name].kind}'")
        ROWS[name] = Row(name, kind, handler, mode, compiles)
        for function in functions:
            TABLE[function] = handler


def register_function(kind: str, handler: Handler, name: str, *functions: Any, compiles: bool = True) -> None:
    """File a row under functions that are found elsewhere than in :data:`NAMESPACES`."""
    ROWS.setdefault(name, Row(name, kind, handler, compiles=compiles))
    for function in functions:
        TABLE[function] = handler


def register_fallback(handler: Handler, names: str) -> None:
    """File rows of operators that work on each sample by itself and have no packed form.

    They run in eager only, with one :class:`FallbackWarning` an operator; under :class:`strict` they raise.
    """

    def warned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = name_of(func)
        refuse_out(name, kwargs)
        if torch.compiler.is_compiling() or strict.enabled:
            raise NotImplementedError(
                f"'{name}' has no packed form: it runs one sample at a time, which a graph and ops.strict() "
                "do not allow; apply it to each of x.to_list()"
            )
        if name not in _WARNED:
            _WARNED.add(name)
            warnings.warn(f"'{name}' runs one sample at a time", FallbackWarning, stacklevel=3)
        return handler(func, args, kwargs)

    register("fallback", warned, names, "fallback", compiles=False)


_WARNED: set[str] = set()


class strict:
    """Make operators that run one sample at a time raise: for good, or inside a ``with`` block.

    >>> with ops.strict():
    ...     model(batch)
    """

    enabled = False

    def __init__(self, enabled: bool = True) -> None:
        self.before = strict.enabled
        strict.enabled = enabled

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        strict.enabled = self.before


def coverage() -> list[Covered]:
    """Every operator by name, without module paths and overloads; in-place forms end in ``_``."""
    return sorted(Covered(row.name, row.kind, row.mode, row.compiles) for row in ROWS.values())


#: Python's operators: method name -> (function applied to payloads, operands swapped).
OPERATORS: dict[str, tuple[Callable[..., Any], bool]] = {
    **{
        f"__{name}__": (getattr(operator, f"__{name}__"), False)
        for name in "add sub mul truediv floordiv mod pow and or xor eq ne lt le gt ge neg".split()
    },
    "__abs__": (torch.abs, False),
    "__pos__": (torch.positive, False),
    "__invert__": (torch.bitwise_not, False),
    **{
        f"__r{name}__": (getattr(operator, f"__{name}__"), True)
        for name in "add sub mul truediv floordiv mod pow and or xor".split()
    },
}
#: The in-place ones.
INPLACE_OPERATORS = {
    f"__i{name}__": getattr(operator, f"__i{name}__")
    for name in "add sub mul truediv floordiv mod pow and or xor".split()
}


#: What to write instead of functions that know no batch.
INSTEAD = {
    "trace": "sum the diagonal: x.diagonal(dim1=1, dim2=2).sum(-1)",
    "diag": "x.diagonal(dim1=-2, dim2=-1) reads a diagonal, x.diag_embed() makes a matrix of one",
    "diagflat": "x.diag_embed() makes a matrix of each sample's diagonal",
    "put": "x.scatter(dim, index, source) writes at positions of every sample",
}


def call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """What ``__torch_function__`` does: look the function up and hand it to its kind."""
    handler = TABLE.get(function) or PYTHON.get(name_of(function))
    if handler is None:
        name = name_of(function)
        general = "apply it to each of x.to_list(), or to x.values if it works on each position by itself"
        raise NotImplementedError(
            f"packed tensors do not support '{name}' yet; {INSTEAD.get(name.rstrip('_'), general)}"
        )
    return handler(function, args, kwargs or {})


def refuse_out(name: str, kwargs: dict[str, Any]) -> None:
    """Raise where ``out=`` is given."""
    if kwargs.get("out") is not None:
        raise TypeError(f"'{name}' on packed tensors has no 'out=': use its result, or the in-place form")


def name_of(function: Any) -> str:
    """What errors call a function."""
    return getattr(function, "__name__", None) or str(function)


def install_methods(cls: type) -> None:
    """Give ``cls`` every registered operator that ``torch.Tensor`` has as a method."""
    for row in ROWS.values():
        function = getattr(torch.Tensor, row.name, None)
        if function is None or row.name in cls.__dict__:
            continue
        if callable(function):
            setattr(cls, row.name, _method(row.name, function, row.handler))
        else:
            setattr(cls, row.name, property(_method(row.name, getattr(torch, row.name), row.handler)))


def _method(name: str, function: Any, handler: Handler) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return handler(function, (self, *args), kwargs)

    method.__name__ = method.__qualname__ = name
    method.__doc__ = f"``torch.Tensor.{name}`` on valid positions."
    return method

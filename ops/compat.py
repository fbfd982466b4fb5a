"""Mends for what PyTorch's compiler cannot trace. Everything that depends on torch's version is here.

All of these were seen on 2.11 to 2.14:

* Marks are attributes of tensors, and what a graph returns has none. Where Dynamo meets a packed tensor or a
  structure that was marked, its tensors are marked again; it costs nothing at run time.
* Dynamo looks for ``__torch_function__`` in lists of operands, as ``torch.cat`` takes, but not in tuples.
  Both are looked through.
* Dynamo asks ``__torch_function__`` only for functions on a list of PyTorch's test suite, on which
  ``torch.rand_like``, ``torch.fill``, ``torch.abs_`` and other in-place functions do not stand. Every
  function with a row is put on it.
* ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`` inside a graph hands its arguments to an
  operator of Dynamo's, ``tag_activation_checkpoint``, which asks ``__torch_function__`` of packed ones. It
  gets their payloads, and a function that wraps them again.
* ``F.l1_loss`` does not hand its ``weight`` to ``__torch_function__``: it would be ignored in silence.
* ``nn.SyncBatchNorm`` across processes calls an ``autograd.Function``, which sees no tensor in a packed one:
  it gets the payload.
* ``x @ dense`` with something else than a tensor before it is traced as ``dense @ x``; before 2.14 ``@`` of
  two objects is not traced at all.
* ``F.hardswish`` and ``F.hardsigmoid`` stand in Dynamo's list of functions that go into a graph as they
  are, so their ``__torch_function__`` check never runs. Off that list they are traced into like every
  other activation.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch._dynamo import trace_rules
from torch._dynamo.variables import TupleVariable, builtin, torch_function
from torch._dynamo.variables import torch as dynamo_torch
from torch._dynamo.variables.builder import VariableBuilder
from torch.nn.modules import batchnorm

from . import dispatch
from .axis import Partition
from .tensor import PackedTensor, is_packed, mark_rows

#: Rows that compile from a version of torch on; before it PyTorch asks for a size that a graph does not know.
COMPILES_SINCE = {"quantile": (2, 13), "nanquantile": (2, 13)}
TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])

TRACED_INTO = ("torch.nn.functional.hardswish", "torch.nn.functional.hardsigmoid")


def trace_into(names: tuple[str, ...]) -> None:
    """Take functions off Dynamo's list of those that go into a graph as they are."""
    tables = [getattr(trace_rules, "torch_non_c_binding_in_graph_functions", {})]
    tables += getattr(trace_rules, "torch_name_rule_map", [])
    found = [table.pop(name, None) for table in tables for name in names]
    rebuild = getattr(trace_rules.get_torch_obj_rule_map, "cache_clear", None)
    if any(found) and rebuild is not None:
        rebuild()


def make_overridable(functions: Iterable[Any]) -> None:
    """Have Dynamo ask ``__torch_function__`` for these functions."""
    known = getattr(dynamo_torch, "get_overridable_functions", None)
    if known is not None:
        known().update(functions)


def look_into_tuples() -> None:
    """Have Dynamo ask ``__torch_function__`` of the items of tuples, too."""
    flatten_lists = getattr(torch_function, "_flatten_vts", None)
    if flatten_lists is None:
        return

    def flatten(operands: Iterable[Any]) -> list[Any]:
        found: list[Any] = []
        for operand in flatten_lists(operands):
            if operand.is_realized() and isinstance(operand, TupleVariable):
                found += flatten(operand.items)
            else:
                found.append(operand)
        return found

    torch_function._flatten_vts = flatten  # type: ignore[assignment]


def mark_again() -> None:
    """Have Dynamo restore the marks of packed tensors and structures that it is about to trace."""
    build = VariableBuilder.__call__

    @functools.wraps(build)
    def call(self: VariableBuilder, value: Any) -> Any:
        kind = type(value)
        if kind is PackedTensor and "grid" in value.__dict__ and value.grid.dynamic:
            mark_rows(value.values)
        elif issubclass(kind, Partition) and value.dynamic:
            value.mark_dynamic(value.dynamic)
        return build(self, value)

    VariableBuilder.__call__ = call  # type: ignore[method-assign]


def tag_checkpoint(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``tag_activation_checkpoint`` of a function of packed tensors, by way of their payloads."""
    body, *operands = args
    payloads = [x.values if is_packed(x) else x for x in operands]

    def on_payloads(*given: Any) -> Any:
        wrapped = [
            PackedTensor(values, x.grid, x.order) if is_packed(x) else values
            for values, x in zip(given, operands)
        ]
        return body(*wrapped)

    return func(on_payloads, *payloads, **kwargs)


class _Given:
    """Tells which keywords a function hands to ``__torch_function__``."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return kwargs or {}


def pass_weight() -> None:
    """Have ``F.l1_loss`` of packed tensors know its ``weight``."""
    l1_loss: Any = F.l1_loss
    if "weight" in l1_loss(_Given(), _Given(), weight=1):
        return

    @functools.wraps(l1_loss)
    def weighted(input: Any, target: Any, *rest: Any, **kwargs: Any) -> Any:
        if is_packed(input) or is_packed(target) or is_packed(kwargs.get("weight")):
            return dispatch.call(weighted, (input, target, *rest), kwargs)
        return l1_loss(input, target, *rest, **kwargs)

    F.l1_loss = weighted


class Synchronised:
    """What ``nn.SyncBatchNorm`` calls across processes, for dense inputs and for payloads."""

    function: Any = batchnorm.sync_batch_norm

    @classmethod
    def apply(cls, input: Any, *rest: Any) -> Any:
        """``SyncBatchNorm``'s function."""
        if not is_packed(input):
            return cls.function.apply(input, *rest)
        return dispatch.PYTHON["sync_batch_norm"](cls.function.apply, (input, *rest), {})


def trace_matmul() -> None:
    """Have Dynamo treat ``@`` as it does every other operator.

    In ``x @ dense`` with something else than a tensor before it, it swaps the two and then forgets to call
    the reflected form. Before 2.14 it does not know ``@`` of two objects.
    """
    builtin.populate_builtin_to_tensor_fn_map()
    builtin.BUILTIN_TO_TENSOR_RFN_MAP[operator.matmul] = torch.Tensor.__rmatmul__
    table = getattr(builtin.BuiltinVariable, "_binops", None)
    if table is not None:
        names = ["__matmul__", "__rmatmul__", "__imatmul__"]
        table().setdefault(operator.matmul, (names, operator.imatmul))
        builtin.BuiltinVariable._binop_handlers.cache_clear()


trace_into(TRACED_INTO)
trace_matmul()
look_into_tuples()
mark_again()
pass_weight()
batchnorm.sync_batch_norm = Synchronised  # type: ignore[misc, assignment]
dispatch.PYTHON["tag_activation_checkpoint"] = tag_checkpoint  # in a graph it is found by its name alone

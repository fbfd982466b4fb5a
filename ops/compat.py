"""Mends for what PyTorch's compiler cannot trace. Everything that depends on torch's version is here.

* Dynamo asks ``__torch_function__`` only for functions on a list of PyTorch's test suite, on which
  ``torch.rand_like``, ``torch.fill``, ``torch.abs_`` and other in-place functions do not stand. Every
  function with a row is put on it. Seen on 2.11 to 2.14.
* ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`` inside a graph hands its arguments to an
  operator of Dynamo's, ``tag_activation_checkpoint``, which asks ``__torch_function__`` of packed ones. It
  gets their payloads, and a function that wraps them again. Seen on 2.11 to 2.14.

* ``F.hardswish`` and ``F.hardsigmoid`` stand in Dynamo's list of functions that go into a graph as they
  are, so their ``__torch_function__`` check never runs. Off that list they are traced into like every
  other activation. Seen on 2.11 to 2.14.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._dynamo import trace_rules
from torch._dynamo.variables import torch as dynamo_torch

from . import dispatch
from .tensor import PackedTensor, is_packed

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


trace_into(TRACED_INTO)


def make_overridable(functions: Iterable[Any]) -> None:
    """Have Dynamo ask ``__torch_function__`` for these functions."""
    known = getattr(dynamo_torch, "get_overridable_functions", None)
    if known is not None:
        known().update(functions)


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


dispatch.PYTHON["tag_activation_checkpoint"] = tag_checkpoint  # in a graph it is found by its name alone

"""Mends for what PyTorch's compiler cannot trace. Everything that depends on torch's version is here.

* ``F.hardswish`` and ``F.hardsigmoid`` stand in Dynamo's list of functions that go into a graph as they
  are, so their ``__torch_function__`` check never runs. Off that list they are traced into like every
  other activation. Seen on 2.11 to 2.14.
"""

from __future__ import annotations

from torch._dynamo import trace_rules

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

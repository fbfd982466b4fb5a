"""Attention in a graph: one for all lengths and batch sizes, for each kind of mask and each module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import ops
from ops import is_packed
from ops.testing import pack
from tests.strategies import make

HEADS = 2
LENGTHS = ([3, 5, 2], [4, 4], [6, 0, 3, 7], [2], [8, 8, 8])
sdpa = F.scaled_dot_product_attention


def by_head(x: Any) -> Any:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def square(x: Any) -> Any:
    return torch.zeros(x.shape[1], x.shape[1]) + torch.arange(x.shape[1])


ATTENTION: dict[str, Callable[[Any, Any, Any], Any]] = {
    "pair_bias": lambda x, y, p: sdpa(*[by_head(x)] * 3, attn_mask=p.movedim(-1, 1)),
    "pair_bias_of_all_heads": lambda x, y, p: sdpa(*[by_head(x)] * 3, attn_mask=p[..., 0][:, None]),
    "pair_mask": lambda x, y, p: sdpa(*[by_head(x)] * 3, attn_mask=p.movedim(-1, 1) > -0.3),
    "causal_with_bias": lambda x, y, p: sdpa(*[by_head(x)] * 3, attn_mask=p.movedim(-1, 1), is_causal=True),
    "by_position": lambda x, y, p: sdpa(*[by_head(x)] * 3, attn_mask=square(x)),
    "by_key": lambda x, y, p: sdpa(*[by_head(x)] * 3, attn_mask=(x[..., 0] > -0.3)[:, None, None]),
    "grouped": lambda x, y, p: sdpa(by_head(x), *[by_head(y)[:, :1]] * 2, enable_gqa=True),
    "two_axes": lambda x, y, p: sdpa(by_head(x), *[by_head(y)] * 2),
    "window": lambda x, y, p: ops.nn.attention(*[by_head(x)] * 3, window=(2, 0)),
}
_module = nn.MultiheadAttention(4, HEADS, batch_first=True)
_adding = nn.MultiheadAttention(4, HEADS, batch_first=True, add_bias_kv=True, add_zero_attn=True)
MODULES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "output_and_weights": lambda x, y, p: _module(x, x, x),
    "weights_by_head": lambda x, y, p: _module(x, y, y, average_attn_weights=False),
    "a_mask": lambda x, y, p: _module(x, x, x, attn_mask=square(x), need_weights=False)[0],
    "padding": lambda x, y, p: _module(x, y, y, key_padding_mask=~y.mask(), need_weights=False)[0],
    "more_keys": lambda x, y, p: _adding(x, y, y),
    "more_keys_and_padding": lambda x, y, p: _adding(x, y, y, key_padding_mask=~y.mask())[0],
    "packed_padding": lambda x, y, p: _module(x, x, x, key_padding_mask=x[..., 0] < -1)[0],
}


def found(fn: Callable[..., Any], lengths: list[int]) -> list[torch.Tensor]:
    x, p = pack(make(lengths, dtype=torch.float32), make(lengths, "n n 2", dtype=torch.float32, seed=1))
    (y,) = pack(make({"m": [n + 1 for n in lengths]}, "m 4", dtype=torch.float32, seed=2))
    operands = [t.requires_grad_() for t in (x, y, p)]
    ops.mark_dynamic(operands)
    out = fn(*operands)
    values = [o.values if is_packed(o) else o for o in (out if isinstance(out, tuple) else (out,))]
    sum(v.square().sum() for v in values).backward()
    return [v.detach() for v in values] + [t.grad.values for t in operands if t.grad is not None]


@pytest.mark.parametrize("name", [*ATTENTION, *MODULES])
def test_one_graph_that_gives_what_eager_gives(name: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    fn = {**ATTENTION, **MODULES}[name]
    compiled = torch.compile(fn, backend="aot_eager", fullgraph=True)
    for lengths in LENGTHS:
        torch.testing.assert_close(found(compiled, lengths), found(fn, lengths), rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1


def test_the_setting_is_read_in_a_graph() -> None:
    """A backend that cannot raises there too, and after it was changed back the graph runs."""
    torch._dynamo.reset()
    compiled = torch.compile(ATTENTION["two_axes"], backend="eager", fullgraph=True)
    with ops.attention_backend("varlen"), pytest.raises(Exception, match="'varlen' cannot do this"):
        found(compiled, [3, 5])
    found(compiled, [3, 5])

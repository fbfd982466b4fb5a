"""Random programs: rules composed in any order have to agree with the same program per sample."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ops
from ops import PackedTensor
from ops.testing import check, pack
from tests.strategies import batches, dim_orders, subsets

Step = Callable[[Any], Any]
PATTERNS = ("n 4", "4 n", "n 3 2", "n n 2", "n m 2", "2 n m")
MANY = 2000 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 150


@dataclass(frozen=True)
class State:
    """What a program knows about its value: one token a dim: ``batch``, an axis' name, or a size."""

    tokens: tuple[str, ...]
    steps: tuple[tuple[str, Step], ...] = ()

    def then(self, name: str, step: Step, tokens: tuple[str, ...] | None = None) -> State:
        return replace(
            self, steps=(*self.steps, (name, step)), tokens=self.tokens if tokens is None else tokens
        )

    def dims(self, kind: Callable[[str], bool]) -> list[int]:
        return [d for d, token in enumerate(self.tokens) if kind(token)]

    @property
    def ragged(self) -> list[int]:
        return self.dims(lambda token: token != "batch" and not token.isdigit())

    @property
    def static(self) -> list[int]:
        return self.dims(str.isdigit)

    @property
    def batch_dim(self) -> int:
        return self.tokens.index("batch")


def run(state: State, x: Any) -> Any:
    for _, step in state.steps:
        x = step(x)
    return x


# Each grows a program by one step, or gives None where it does not apply.


def grow_permute(draw: Any, s: State) -> State | None:
    order = draw(dim_orders(len(s.tokens)))
    return s.then(f"permute {order}", lambda x: x.permute(order), tuple(s.tokens[d] for d in order))


def grow_unsqueeze(draw: Any, s: State) -> State | None:
    d = draw(st.integers(0, len(s.tokens)))
    return s.then(f"unsqueeze {d}", lambda x: x.unsqueeze(d), (*s.tokens[:d], "1", *s.tokens[d:]))


def grow_squeeze(draw: Any, s: State) -> State | None:
    ones = s.dims(lambda token: token == "1")
    if not ones:
        return None
    d = draw(st.sampled_from(ones))
    return s.then(f"squeeze {d}", lambda x: x.squeeze(d), (*s.tokens[:d], *s.tokens[d + 1 :]))


def grow_reduce(draw: Any, s: State) -> State | None:
    dims = draw(subsets([d for d in range(len(s.tokens)) if d != s.batch_dim]))
    if set(s.ragged) <= set(dims):
        return None
    name, keepdim = draw(st.sampled_from(["sum", "mean"])), draw(st.booleans())
    if keepdim:
        tokens = tuple("1" if d in dims else token for d, token in enumerate(s.tokens))
    else:
        tokens = tuple(token for d, token in enumerate(s.tokens) if d not in dims)
    return s.then(f"{name} {dims} {keepdim}", lambda x: getattr(x, name)(dims, keepdim=keepdim), tokens)


def grow_slice(draw: Any, s: State) -> State | None:
    if not s.ragged:
        return None
    d = draw(st.sampled_from(s.ragged))
    cut = draw(
        st.sampled_from(
            [slice(1, None), slice(None, -1), slice(None, 2), slice(None, None, 2), slice(-2, None)]
        )
    )
    tokens = (*s.tokens[:d], f"{s.tokens[d]}[{cut.start}:{cut.stop}:{cut.step}]", *s.tokens[d + 1 :])
    return s.then(f"slice {d} {cut}", lambda x: x[(slice(None),) * d + (cut,)], tokens)


def grow_pointwise(draw: Any, s: State) -> State | None:
    return s.then("tanh product", lambda x: x * torch.tanh(x) + 0.5)


def grow_pair(draw: Any, s: State) -> State | None:
    if not s.ragged or len(s.tokens) > 5 or len(s.ragged) > 2:
        return None
    d = draw(st.sampled_from(s.ragged))
    tokens = (*s.tokens[:d], s.tokens[d], s.tokens[d], *s.tokens[d + 1 :])
    return s.then(f"pair {d}", lambda x: x.unsqueeze(d) - x.unsqueeze(d + 1) * 0.5, tokens)


def grow_transposed_sum(draw: Any, s: State) -> State | None:
    pairs = [(a, b) for a in s.ragged for b in s.ragged if a < b and s.tokens[a] == s.tokens[b]]
    if not pairs:
        return None
    a, b = draw(st.sampled_from(pairs))
    return s.then(f"transposed sum {a} {b}", lambda x: x + 2 * x.transpose(a, b))


def grow_softmax(draw: Any, s: State) -> State | None:
    if not s.static:
        return None
    d = draw(st.sampled_from(s.static))
    return s.then(f"softmax {d}", lambda x: x.softmax(d))


def grow_position(draw: Any, s: State) -> State | None:
    d = draw(st.sampled_from([d for d in range(len(s.tokens)) if d != s.batch_dim]))
    lead = (-1, *[1] * (len(s.tokens) - d - 1))
    return s.then(f"position {d}", lambda x: x + torch.arange(x.shape[d], dtype=torch.float64).view(lead))


def grow_centre(draw: Any, s: State) -> State | None:
    dims = draw(subsets([d for d in range(len(s.tokens)) if d != s.batch_dim]))
    return s.then(f"centre {dims}", lambda x: x - x.mean(dims, keepdim=True))


def grow_flatten_static(draw: Any, s: State) -> State | None:
    pairs = [d for d in s.static if d + 1 in s.static]
    if not pairs:
        return None
    d = draw(st.sampled_from(pairs))
    merged = str(int(s.tokens[d]) * int(s.tokens[d + 1]))
    return s.then(f"flatten {d}", lambda x: x.flatten(d, d + 1), (*s.tokens[:d], merged, *s.tokens[d + 2 :]))


def grow_same_shape(draw: Any, s: State) -> State | None:
    return s.then("reshape to itself", lambda x: x.reshape(x.shape))


def grow_in_place(draw: Any, s: State) -> State | None:
    return s.then("in place", lambda x: (x * 1).mul_(x).add_(1))


GROWTH = [
    grow_permute,
    grow_unsqueeze,
    grow_squeeze,
    grow_reduce,
    grow_slice,
    grow_pointwise,
    grow_pair,
    grow_transposed_sum,
    grow_softmax,
    grow_position,
    grow_centre,
    grow_flatten_static,
    grow_same_shape,
    grow_in_place,
]


def program_for(draw: Any, pattern: str, most: int = 6) -> State:
    state = State(("batch", *pattern.split()))
    for _ in range(draw(st.integers(1, most))):
        grown = draw(st.sampled_from(GROWTH))(draw, state)
        state = grown or state
    return state


@settings(max_examples=MANY)
@given(batches(patterns=PATTERNS, most=3), st.data())
def test_random_programs_match_per_sample(batch: Any, data: st.DataObject) -> None:
    state = program_for(data.draw, batch.pattern)
    check(lambda x: run(state, x), batch, batch_dim=state.batch_dim, rtol=1e-6, atol=1e-8)


@settings(max_examples=MANY)
@given(batches(patterns=("n m 2", "n n 2"), most=3), st.data())
def test_random_programs_of_two_operands_match_per_sample(batch: Any, data: st.DataObject) -> None:
    """Two results of one program, through different layouts, meet again."""
    state = program_for(data.draw, batch.pattern, most=3)
    order = data.draw(dim_orders(len(state.tokens)))

    def fn(x: Any, y: Any) -> Any:
        a, b = run(state, x), run(state, y)
        back = [order.index(d) for d in range(len(order))]
        return a * b.permute(order).clone().permute(back) + run(state, x + y)

    for share in (True, False):
        check(fn, batch, batch, batch_dim=state.batch_dim, share=share, rtol=1e-6, atol=1e-8)


@given(batches(patterns=PATTERNS, most=3), st.data())
@pytest.mark.slow
def test_random_programs_compile_to_what_they_are_in_eager(batch: Any, data: st.DataObject) -> None:
    state = program_for(data.draw, batch.pattern, most=4)
    torch._dynamo.reset()
    program = torch.compile(lambda x: run(state, x), fullgraph=True, backend="aot_eager")
    (x,) = pack(batch)
    want = run(state, x)
    got = program(ops.mark_dynamic(pack(batch)[0]))
    if isinstance(want, PackedTensor):
        assert got.order == want.order
        assert got.sizes.tolist() == want.sizes.tolist()
        got, want = got.values, want.values
    torch.testing.assert_close(got, want, equal_nan=True)

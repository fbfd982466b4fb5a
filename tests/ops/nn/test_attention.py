from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel

import ops
import ops.nn
from ops.testing import Dense, Ragged, check, pack, per_sample
from tests.strategies import PROFILES, make

HEADS = 2
LENGTHS = pytest.mark.parametrize("lengths", list(PROFILES.values()), ids=list(PROFILES))


def check_attention(fn: Callable, *operands: Any, **kwargs: Any) -> Any:
    def reference(*args: Any) -> list[Tensor]:
        with sdpa_kernel(SDPBackend.MATH):
            return per_sample(fn, *args)

    return check(fn, *operands, reference=reference, **kwargs)


@LENGTHS
@pytest.mark.parametrize("window", [(None, None), (1, None), (None, 0), (1, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_the_function(lengths: list[int], window: Any, causal: bool) -> None:
    q, k, v = (make(lengths, "2 n 4", seed=s) for s in range(3))
    check_attention(lambda q, k, v: ops.nn.attention(q, k, v, causal=causal, window=window), q, k, v)


def by_hand(x: Tensor, slopes: Tensor) -> Tensor:
    """(1, H, n, D): linear biases, pair by pair."""
    n = x.shape[2]
    bias = torch.zeros(len(slopes), n, n, dtype=x.dtype)
    for i in range(n):
        for j in range(n):
            bias[:, i, j] = -slopes * abs(i - j)
    return F.scaled_dot_product_attention(x, x, x, attn_mask=bias)


@LENGTHS
def test_linear_biases(lengths: list[int]) -> None:
    slopes = torch.tensor([2.0**-4, 2.0**-8], dtype=torch.float64)

    def fn(x: Any) -> Any:
        return (
            by_hand(x, slopes)
            if isinstance(x, Tensor)
            else ops.nn.attention(x, x, x, position_bias=ops.nn.alibi(2))
        )

    check_attention(fn, make(lengths, "2 n 4"))


@LENGTHS
def test_a_learned_relative_bias(lengths: list[int]) -> None:
    bias = ops.nn.RelativeBias(HEADS, 2).double()
    torch.nn.init.normal_(bias.table)
    check_attention(
        lambda x: ops.nn.attention(x, x, x, position_bias=bias),
        make(lengths, "2 n 4"),
        params=bias.parameters(),
    )
    assert bias(torch.arange(9)[:, None], torch.arange(9)[None])[1, 8, 0] == bias.table[0, 1]


def test_biases_and_masks_together() -> None:
    lengths = [3, 0, 5]
    x, pair = make(lengths, "2 n 4"), make(lengths, "2 n n", seed=1)
    mask = Ragged([s > -1 for s in make(lengths, "1 n n", seed=2).samples], "1 n n")
    matrix = Dense(torch.randn(2, 5, 5, dtype=torch.float64), "2 n n")
    alibi = ops.nn.alibi(2)
    attention = ops.nn.attention
    check_attention(lambda x, b: attention(x, x, x, bias=b, position_bias=alibi), x, pair)
    check_attention(lambda x, b, m: attention(x, x, x, bias=b, mask=m), x, pair, mask)
    check_attention(lambda x, b, m: attention(x, x, x, bias=b, mask=m), x, matrix, mask)
    check_attention(lambda x, m: attention(x, x, x, mask=m, position_bias=alibi), x, mask)
    check_attention(lambda x, m: attention(x, x, x, mask=m), x, mask)


def module(**options: Any) -> ops.nn.Attention:
    torch.manual_seed(0)
    return ops.nn.Attention(4, HEADS, **options).double()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"gated": False},
    "gated": {},
    "pair": {"pair_dim": 3},
    "rotary": {"rotary": True, "head_dim": 4},
}


@LENGTHS
@pytest.mark.parametrize("name", list(OPTIONS))
def test_the_module(lengths: list[int], name: str) -> None:
    model = module(**OPTIONS[name])
    operands = [make(lengths)] + ([make(lengths, "n n 3", seed=1)] if name == "pair" else [])
    check_attention(lambda x, p=None: model(x, pair=p), *operands, params=model.parameters())


def test_the_module_over_two_axes() -> None:
    model = module(pair_dim=3, context_dim=5)
    x, y = make({"n": [2, 3, 0]}), make({"m": [0, 4, 2]}, "m 5", seed=1)
    pair = make({"n": [2, 3, 0], "m": [0, 4, 2]}, "n m 3", seed=2)
    check_attention(lambda x, y, p: model(x, y, p), x, y, pair, params=model.parameters())


def test_what_the_module_computes() -> None:
    """By the formula, head by head."""
    model = module(pair_dim=3)
    x, pair = make([5]).samples[0], make([5], "n n 3", seed=1).samples[0]
    q, k, v = (linear(x) for linear in (model.query, model.key, model.value))
    bias = F.linear(
        F.layer_norm(pair, (3,), model.pair_norm.weight, model.pair_norm.bias), model.pair_bias.weight
    )
    heads = []
    for h in range(HEADS):
        part = slice(2 * h, 2 * h + 2)
        weights = (q[:, part] @ k[:, part].T / 2**0.5 + bias[..., h]).softmax(-1)
        heads.append(weights @ v[:, part])
    want = model.out(torch.cat(heads, 1) * model.gate(x).sigmoid())
    (one, both) = pack(Ragged([x], "n 4"), Ragged([pair], "n n 3"))
    torch.testing.assert_close(model(one, pair=both).values, want)


@pytest.mark.parametrize("recorded", [False, True])
def test_one_graph_for_any_lengths(recorded: bool) -> None:
    """The module with pair bias, gates, rotary embedding and a window, forward and backward."""
    torch._dynamo.reset()
    counters.clear()
    model = ops.nn.Attention(4, HEADS, pair_dim=3, rotary=True)
    compiled = torch.compile(
        lambda x, p: model(x, pair=p, window=(2, 2), position_bias=ops.nn.alibi(2)),
        backend="aot_eager",
        fullgraph=True,
    )
    for lengths in ([3, 5, 2], [4, 4], [6, 0, 3, 7], [2]):
        found = []
        for run in (compiled, lambda x, p: model(x, pair=p, window=(2, 2), position_bias=ops.nn.alibi(2))):
            x, p = pack(
                make(lengths, dtype=torch.float32), make(lengths, "n n 3", dtype=torch.float32, seed=1)
            )
            ops.mark_dynamic([x, p])
            if recorded:
                x.requires_grad_(), p.requires_grad_()
            out = run(x, p)
            found.append([out.values])
            if recorded:
                out.values.square().sum().backward()
                found[-1] = [out.values.detach(), x.grad.values, p.grad.values]
        for a, b in zip(*found):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1


MISTAKES: dict[str, tuple[Any, str]] = {
    "a_negative_window": (lambda x, p, m: ops.nn.attention(x, x, x, window=(-1, 2)), "counts of positions"),
    "pair_without_pair_dim": (lambda x, p, m: module()(m, pair=p), "without pair_dim"),
    "positions_with_context": (lambda x, p, m: module(rotary=True)(m, m, positions=m), "without context"),
    "pair_of_other_lengths": (
        lambda x, p, m: module(pair_dim=3)(m, pair=pack(make([2, 2], "n n 3"))[0]),
        "sample 0",
    ),
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_a_mistake_is_named(name: str) -> None:
    call, message = MISTAKES[name]
    x, p, m = pack(make([3, 5], "2 n 4"), make([3, 5], "n n 3"), make([3, 5]))
    with pytest.raises((ValueError, RuntimeError), match=message):
        call(x, p, m)

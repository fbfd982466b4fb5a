from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ops.nn
from ops import PackedTensor
from ops.testing import check, pack
from tests.strategies import PROFILES, make

LENGTHS = pytest.mark.parametrize("lengths", list(PROFILES.values()), ids=list(PROFILES))


def by_complex_numbers(x: Tensor, positions: Tensor, base: float, interleaved: bool) -> Tensor:
    """(n, D): features as complex numbers, multiplied by those of their angles."""
    half = x.shape[-1] // 2
    parts = x.unflatten(-1, (half, 2)) if interleaved else x.unflatten(-1, (2, half)).transpose(-1, -2)
    rates = torch.tensor([base ** (-2 * i / x.shape[-1]) for i in range(half)], dtype=torch.float64)
    turned = torch.exp(1j * positions.double()[:, None] * rates)
    out = torch.view_as_real(torch.complex(*parts.double().unbind(-1)) * turned)
    return (out if interleaved else out.transpose(-1, -2)).flatten(-2).to(x.dtype)


@LENGTHS
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_turns_each_sample_from_its_own_first_position(lengths: list[int], interleaved: bool) -> None:
    batch = make(lengths, "n 6")
    (x,) = pack(batch)
    out = ops.nn.rotary(x, interleaved=interleaved, base=100.0)
    for one, sample in zip(out.to_list(), batch.samples):
        want = by_complex_numbers(sample, torch.arange(len(sample)), 100.0, interleaved)
        torch.testing.assert_close(one, want)


@LENGTHS
@pytest.mark.parametrize(
    ("pattern", "dim"), [("2 n 4", -2), ("n 2 4", 1), ("n 4", -2), ("n n 4", 1), ("n n 4", 2)]
)
def test_rotary_on_any_layout(lengths: list[int], pattern: str, dim: int) -> None:
    check(lambda x: ops.nn.rotary(x, dim=dim), make(lengths, pattern))


def test_given_positions() -> None:
    batch, where = make([3, 0, 2], "2 n 4"), make([3, 0, 2], "n", dtype=torch.int64)
    check(lambda x, p: ops.nn.rotary(x, p), batch, where)
    x, p = pack(batch, where)
    want = ops.nn.rotary(x, p).values
    padded = p.to_padded()
    assert torch.equal(ops.nn.rotary(x, padded).values, want)
    assert torch.equal(ops.nn.rotary(x, torch.arange(3)).values, ops.nn.rotary(x).values)
    assert torch.equal(ops.nn.rotary(x, p * 0).values, x.values)


def test_scores_depend_on_distance_alone() -> None:
    q, k = (make([4], "n 8", seed=s).samples[0][:1].expand(6, 8)[None] for s in (0, 1))
    scores = ops.nn.rotary(q) @ ops.nn.rotary(k).mT
    for d in range(-5, 6):
        line = scores[0].diagonal(d)
        torch.testing.assert_close(line, line[:1].expand_as(line))


def test_half_precision_stays() -> None:
    (x,) = pack(make([300], "n 8", dtype=torch.bfloat16))
    out = ops.nn.rotary(x)
    assert out.dtype == torch.bfloat16
    want = ops.nn.rotary(x.float()).values.bfloat16()
    assert torch.equal(out.values, want)


MISTAKES: dict[str, tuple[Any, str]] = {
    "odd": (lambda x, p: ops.nn.rotary(x[..., :3]), "static and even"),
    "static": (lambda x, p: ops.nn.rotary(x, dim=1), "not a ragged axis"),
    "ragged_features": (lambda x, p: ops.nn.rotary(x.transpose(-1, -2)), "static and even"),
    "other_positions": (lambda x, p: ops.nn.rotary(x, p), "sample 0"),
    "positions_of_three_dims": (lambda x, p: ops.nn.rotary(x, torch.zeros(2, 2, 5)), r"\(n,\) or \(B, n\)"),
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_a_mistake_is_named(name: str) -> None:
    call, message = MISTAKES[name]
    x, p = pack(make([4, 4], "2 n 4"), make({"m": [2, 3]}, "m", dtype=torch.int64))
    with pytest.raises((ValueError, RuntimeError), match=message):
        call(x, p)


def test_as_a_module() -> None:
    (x,) = pack(make([3, 5], "n 2 4"))
    module = ops.nn.RotaryEmbedding(base=50.0, dim=1)
    out = module(x)
    assert isinstance(out, PackedTensor)
    assert torch.equal(out.values, ops.nn.rotary(x, base=50.0, dim=1).values)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ops import PackedTensor
from ops.axis import same_axis
from ops.testing import Dense, Ragged, assert_matches, check, pack
from tests.strategies import PROFILES, laid_out, make

PATTERNS = ("n", "n 4", "4 n", "n m 4", "n 4 m", "n n", "n n 4")
EACH_PATTERN = pytest.mark.parametrize("pattern", PATTERNS)
ERRORS = (ValueError, RuntimeError, IndexError, NotImplementedError, TypeError)


def dims(pattern: str) -> range:
    return range(1, len(pattern.split()) + 1)


# ---------------------------------------------------------------- cat and stack


@EACH_PATTERN
def test_cat_and_stack_along_every_dim(pattern: str) -> None:
    for lengths in ([3, 0, 5], [4, 4], [6]):
        x, y = make(lengths, pattern), make(lengths, pattern, seed=1)
        for d in dims(pattern):
            check(lambda x, y, d=d: torch.cat([x, y], d), x, y)
            check(lambda x, y, d=d: torch.concat((x, y, x), dim=d), x, y)
            check(lambda x, y, d=d: torch.stack([x, y], d), x, y)
        check(lambda x, y: torch.stack((x, y), -1), x, y)


@pytest.mark.parametrize("lengths", list(PROFILES.values()), ids=list(PROFILES))
def test_cat_under_every_condition(lengths: list[int]) -> None:
    x, y = make(lengths), make(lengths, seed=1)
    for share in (True, False):
        check(lambda x, y: torch.cat([x, y], 1), x, y, share=share)
        check(lambda x, y: torch.cat([x, y], 2), x, y, share=share)
        check(lambda x, y: torch.stack([x, y], 2), x, y, share=share)


@given(laid_out(), st.data())
def test_cat_on_any_layout(case: tuple[Ragged, tuple[int, ...]], data: st.DataObject) -> None:
    batch, order = case
    where, dim = order.index(0), data.draw(st.sampled_from([i for i, d in enumerate(order) if d != 0]))
    check(lambda x: torch.cat([x.permute(order), x.permute(order) * 2], dim), batch, batch_dim=where)
    check(lambda x: torch.stack([x.permute(order)] * 2, -1), batch, batch_dim=where)


def test_lengths_of_different_axes_add_up() -> None:
    a, b = make({"n": [3, 0, 5]}, "n 4"), make({"m": [1, 2, 0]}, "m 4")
    check(lambda a, b: torch.cat([a, b], 1), a, b)
    check(lambda a, b: torch.cat([a, b, a, a], 1), a, b)
    p, q = make({"n": [3, 0, 5], "m": [1, 2, 3]}, "n m 4"), make({"n": [3, 0, 5], "k": [2, 2, 1]}, "n k 4")
    check(lambda p, q: torch.cat([p, q], 2), p, q)
    check(lambda p, q: torch.cat([p.transpose(1, 2), q.transpose(1, 2)], 1), p, q)
    s = make({"n": [3, 0, 5]}, "n 2 4")
    check(lambda p, s: torch.cat([s, p, s], 2), p, s)


def test_joined_axes_have_identity() -> None:
    x, y, z = pack(make([3, 1, 5]), make([3, 1, 5], seed=1), make({"m": [2, 2, 0]}, "m 4"))
    assert torch.cat([x, z], 1).axes[0] is torch.cat([y, z], 1).axes[0]
    assert torch.cat([x, y], 1).axes[0] is torch.cat([y, x], 1).axes[0]
    assert_matches(torch.cat([x, z], 1) + torch.cat([y, z], 1), torch.cat([x + y, z + z], 1).to_list())


@pytest.mark.parametrize("lengths", list(PROFILES.values()), ids=list(PROFILES))
def test_a_class_token_stands_before_every_sample(lengths: list[int]) -> None:
    cls, x = torch.randn(1, 1, 4, dtype=torch.float64), make(lengths)
    check(lambda c, x: torch.cat([c.expand(x.shape[0], -1, -1), x], 1), cls, x)
    check(lambda c, x: torch.cat([x, c.expand(x.shape[0], 2, -1)], dim=1), cls, x)
    check(lambda c, x: torch.cat([c.expand(x.shape[0], -1, -1), x], 1)[:, 1:] + x, cls, x)


def test_parts_of_a_fixed_size_shift_the_axis() -> None:
    (x,) = pack(make([3, 0, 5]))
    token = torch.zeros(3, 1, 4, dtype=torch.float64)
    front, back = torch.cat([token, x], 1), torch.cat([x, token], 1)
    assert same_axis(front.axes[0], back.axes[0])
    assert same_axis(front[:, 1:].axes[0], x.axes[0])


def test_a_dense_part_of_a_sample_and_of_features() -> None:
    x = make([3, 0, 5])
    check(lambda x, t: torch.cat([x, t], 1), x, Dense(torch.randn(3, 2, 4, dtype=torch.float64), "batch _ _"))
    check(lambda x, t: torch.cat([x, t], 2), x, Dense(torch.randn(3, 5, 2, dtype=torch.float64), "batch n _"))


@pytest.mark.parametrize("pattern", ["n 4", "n n 4", "n m"])
def test_batches_follow_each_other(pattern: str) -> None:
    (x,), (y,) = pack(make([3, 0, 5], pattern)), pack(make([1, 2], pattern, seed=3))
    for joined in (torch.cat([x, y]), torch.vstack([x, y]), torch.cat((x, y), dim=0)):
        assert_matches(joined, x.to_list() + y.to_list())
    (torch.cat([x.requires_grad_(), y]) * 2).sum().backward()
    assert x.grad is not None and (x.grad.values == 2).all()
    joined = torch.cat([x.transpose(0, 1), y.transpose(0, 1)], 1)
    assert_matches(joined, x.to_list() + y.to_list(), batch_dim=1)
    assert (joined.axes[0] is joined.axes[-1]) == (x.axes[0] is x.axes[-1])


def test_stacks_by_other_names() -> None:
    x, y = make([3, 0, 5]), make([3, 0, 5], seed=1)
    check(lambda x, y: torch.hstack([x, y]), x, y)
    check(lambda x, y: torch.column_stack([x, y]), x, y)
    check(lambda x, y: torch.dstack([x, y]), x, y)


# ---------------------------------------------------------------- split


@pytest.mark.parametrize("pattern", ["n 4", "4 n", "n m 4"])
def test_static_dims_are_split_as_dense_ones(pattern: str) -> None:
    dim = pattern.split().index("4") + 1
    batch = make([3, 0, 5], pattern)
    for fn in (
        lambda x: x.split(3, dim),
        lambda x: torch.split(x, [1, 3], dim),
        lambda x: x.chunk(3, dim),
        lambda x: torch.tensor_split(x, 3, dim),
        lambda x: torch.tensor_split(x, [1, 2], dim),
        lambda x: x.unbind(dim),
    ):
        parts = fn(pack(batch)[0])
        for i in range(len(parts)):
            check(lambda x, fn=fn, i=i: fn(x)[i], batch)


def test_samples_are_split_as_a_dense_batch() -> None:
    (x,) = pack(make([3, 0, 5, 2, 1]))
    numbers, samples = torch.arange(5), x.to_list()
    for fn in (
        lambda t: t.split(2),
        lambda t: t.split([1, 4]),
        lambda t: t.chunk(2),
        lambda t: torch.tensor_split(t, 3),
        lambda t: torch.tensor_split(t, [1, 4]),
    ):
        for part, which in zip(fn(x), fn(numbers), strict=True):
            assert_matches(part, [samples[i] for i in which])
    for got, want in zip(x.unbind(), samples, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("pattern", ["n 4", "n m", "4 n"])
def test_a_ragged_axis_is_cut_in_as_many_parts_in_every_sample(pattern: str) -> None:
    for dim, token in enumerate(pattern.split(), 1):
        for i in range(3 if not token.isdigit() else 0):
            check(lambda x, dim=dim, i=i: torch.tensor_split(x, 3, dim)[i], make([3, 0, 5, 7], pattern))


# ---------------------------------------------------------------- repeats and padding


@EACH_PATTERN
def test_repeats_along_every_dim(pattern: str) -> None:
    rank = len(pattern.split())
    for d in dims(pattern):
        times = [3 if i == d else 1 for i in range(rank + 1)]
        check(lambda x, times=times: x.repeat(times), make([3, 0, 5], pattern))
        check(lambda x, d=d: x.repeat_interleave(2, d), make([3, 0, 5], pattern))
    check(lambda x: torch.tile(x, (2,)), make([3, 0, 5], pattern))


def test_repeated_samples() -> None:
    (x,) = pack(make([3, 0, 5]))
    samples = x.to_list()
    assert_matches(x.repeat(2, 1, 1), samples * 2)
    assert_matches(x.repeat_interleave(2, 0), [s for s in samples for _ in range(2)])


@EACH_PATTERN
def test_padding_every_dim(pattern: str) -> None:
    rank = len(pattern.split())
    for d in dims(pattern):
        for low, high in ((1, 2), (0, 1), (-1, 1), (1, -1)):
            sizes = [0, 0] * (rank - d) + [low, high]
            check(lambda x, sizes=sizes: F.pad(x, sizes, value=1.5), make([3, 2, 5], pattern))


def test_other_modes_pad_static_dims() -> None:
    check(lambda x: F.pad(x, (1, 2), mode="reflect"), make([3, 5], "n 4"))


# ---------------------------------------------------------------- broadcasting


def test_operands_are_brought_to_one_structure() -> None:
    x = make([3, 0, 5])
    check(lambda x: x[..., :1].expand_as(x), x)
    check(lambda x: torch.broadcast_tensors(x[:, :, None], x[:, None])[1], x)
    check(lambda x: torch.atleast_3d(x[..., 0])[..., 0], x)


# ---------------------------------------------------------------- mistakes


def parts() -> tuple[PackedTensor, PackedTensor, Tensor]:
    (x,), (y,) = pack(make([3, 0, 5])), pack(make([2, 4, 1], seed=1))
    return x, y, torch.zeros(3, 2, 4, dtype=torch.float64)


MISTAKES: dict[str, tuple[Callable[..., Any], str]] = {
    "ranks": (lambda x, y, d: torch.cat([x, x[..., 0]], 1), "cat: tensors of 3 and 2 dims"),
    "structures": (lambda x, y, d: torch.cat([x, y], 2), "cat.*sample 0 has 3 and 2"),
    "stacked_structures": (lambda x, y, d: torch.stack([x, y]), "cat.*sample 0 has 3 and 2"),
    "dense_with_the_batch": (lambda x, y, d: torch.cat([x, d]), "along the batch takes packed tensors only"),
    "features": (lambda x, y, d: torch.cat([x, x[..., :2]], 1), "[Ss]izes of tensors must match"),
    "broadcast": (lambda x, y, d: torch.cat([x[:, :, None], x[:, None]], 3), "cat does not broadcast"),
    "chunks_of_an_axis": (lambda x, y, d: x.chunk(2, 1), "chunk of the ragged axis 'n'.*tensor_split"),
    "splits_of_an_axis": (lambda x, y, d: x.split(2, 1), "split of the ragged axis 'n'.*slice it"),
    "unbind_of_an_axis": (lambda x, y, d: x.unbind(1), "unbind needs a static dim; dim 1"),
    "repeat_of_too_few": (lambda x, y, d: x.repeat(2), "repeat: 1 numbers .* 3 dims"),
    "pad_of_the_batch": (lambda x, y, d: F.pad(x, (0, 0, 0, 0, 1, 0)), "pad: .*dim 0"),
    "reflected_axis": (
        lambda x, y, d: F.pad(x, (0, 0, 1, 0), mode="reflect"),
        "'reflect' does not pad dim 1",
    ),
}


@pytest.mark.parametrize(("fn", "message"), list(MISTAKES.values()), ids=list(MISTAKES))
def test_mistakes_are_named(fn: Callable, message: str) -> None:
    with pytest.raises(ERRORS, match=message):
        fn(*parts())

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.testing import Dense, Ragged, assert_matches, check, pack
from tests.strategies import NONEMPTY, PROFILES, make

LENGTHS = pytest.mark.parametrize("lengths", list(PROFILES.values()), ids=list(PROFILES))
NONEMPTY_LENGTHS = pytest.mark.parametrize("lengths", list(NONEMPTY.values()), ids=list(NONEMPTY))
PAIR = {"n": [3, 0, 5], "m": [4, 2, 1]}


# ---------------------------------------------------------------- gather and scatter


LAYOUTS = pytest.mark.parametrize("pattern", ["n", "n 4", "4 n", "n m 4", "n 4 m", "n n"])


def places(batch: Ragged, dim: int, seed: int = 0) -> Ragged:
    """Random positions along one dim, for every entry."""
    generator = torch.Generator().manual_seed(seed)
    samples = [torch.randint(0, s.shape[dim - 1], s.shape, generator=generator) for s in batch.samples]
    return Ragged(samples, batch.pattern)


@LAYOUTS
def test_gather_and_scatter_along_every_dim(pattern: str) -> None:
    for lengths in ([3, 2, 5], [4, 4]):
        x, y = make(lengths, pattern), make(lengths, pattern, seed=1)
        for d in range(1, len(pattern.split()) + 1):
            i = places(x, d)
            once = Ragged([s.argsort(d - 1) for s in x.samples], pattern)
            check(lambda x, i, d=d: torch.gather(x, d, i), x, i)
            check(lambda x, i, d=d: torch.take_along_dim(x, i, d), x, i)
            check(lambda x, i, y, d=d: x.scatter(d, i, y), x, once, y)
            check(lambda x, i, d=d: torch.scatter(x, d, i, 2.0), x, i)
            check(lambda x, i, y, d=d: torch.scatter_add(x, d, i, y), x, i, y)
            check(lambda x, i, y, d=d: (x * 1).scatter_add_(d, i, y), x, i, y)
            for how in ("sum", "amax", "mean"):
                check(lambda x, i, y, d=d, how=how: x.scatter_reduce(d, i, y, how), x, i, y)


def test_gather_of_another_length() -> None:
    x, i = make([3, 2, 5]), make({"m": [4, 0, 1]}, "m 4", dtype=torch.int64)
    i = Ragged([t % 2 for t in i.samples], i.pattern)
    check(lambda x, i: torch.gather(x, 1, i), x, i)
    dense = torch.randint(0, 2, (3, 2, 4))
    result = check(lambda x, i: torch.gather(x, 1, i), x, Dense(dense, "batch _ _"))
    assert type(result) is Tensor
    check(lambda x: torch.take_along_dim(x, x.argsort(1)[..., :1], 1), x)


@LAYOUTS
def test_the_same_positions_of_every_sample(pattern: str) -> None:
    index = torch.tensor([1, 0])
    for d in range(1, len(pattern.split()) + 1):
        before = (slice(None),) * d
        check(lambda x, before=before: x[(*before, [1, 0, -1])], make([3, 2, 5], pattern))
        check(lambda x, d=d: torch.index_select(x, d, index), make([3, 2, 5], pattern))
        check(lambda x, d=d: x.index_fill(d, index, 3.0), make([3, 2, 5], pattern))


def test_sources_by_number() -> None:
    x, rows = make([3, 2, 5]), Dense(torch.randn(3, 2, 4, dtype=torch.float64), "batch _ _")
    index = torch.tensor([1, 0])
    check(lambda x, s: torch.index_add(x, 1, index, s), x, rows)
    check(lambda x, s: torch.index_add(x, 1, index, s, alpha=2), x, rows)
    check(lambda x, s: x.index_copy(1, index, s), x, rows)
    check(lambda x, y: x.index_add(2, index, y[..., :2]), x, make([3, 2, 5], seed=1))


# ---------------------------------------------------------------- assignment


def assigned(x: Any, key: Any, value: Any) -> Any:
    out = x * 1
    out[key] = value
    return out


KEYS: dict[str, Any] = {
    "position": (slice(None), 0),
    "last": (slice(None), -1),
    "head": (slice(None), slice(0, 2)),
    "tail": (slice(None), slice(1, None)),
    "feature": (Ellipsis, 2),
    "features": (Ellipsis, [3, 0]),
    "positions": (slice(None), [1, 0]),
    "corner": (slice(None), slice(1, None), slice(2, None)),
    "all": Ellipsis,
}


@pytest.mark.parametrize("key", list(KEYS.values()), ids=list(KEYS))
def test_assignment_for_every_key(key: Any) -> None:
    x, y = make([3, 2, 5]), make([3, 2, 5], seed=1)
    check(lambda x: assigned(x, key, 2.5), x)
    check(lambda x, y: assigned(x, key, y[key] * 2), x, y)


def test_assignment_of_features_samples_and_new_structures() -> None:
    x = make([3, 2, 5])
    check(lambda x, w: assigned(x, (slice(None), slice(1, None)), w), x, torch.randn(4, dtype=torch.float64))
    check(lambda x: assigned(x, (slice(None), 0), x[:, -1]), x)
    (p,) = pack(x)
    p[1] = 7.0
    p[[0, 2], :, 1] = 9.0
    first, second, third = p.to_list()
    assert (second == 7).all() and (first[:, 1] == 9).all() and (third[:, 1] == 9).all()
    assert torch.equal(third[:, 0], x.samples[2][:, 0])


@pytest.mark.parametrize("pattern", ["n", "n 4", "n m 4"])
def test_assignment_under_a_mask(pattern: str) -> None:
    names = " ".join(token for token in pattern.split() if not token.isdigit())
    x, m = make([3, 0, 5], pattern), make([3, 0, 5], names, dtype=torch.bool)

    def changed(change: Callable) -> list[Tensor]:
        return [
            torch.where(c.view(*c.shape, *[1] * (s.dim() - c.dim())), change(s), s)
            for s, c in zip(x.samples, m.samples)
        ]

    a, b = pack(x)[0], pack(m)[0]
    assert_matches(assigned(a, b, 0.5), changed(lambda s: torch.full_like(s, 0.5)))
    assert_matches(assigned(a, b, a[b] * 2), changed(lambda s: s * 2))
    assert_matches(a.index_put((b,), torch.tensor(1.0).double()), changed(torch.ones_like))


def test_copies_with_a_part_replaced() -> None:
    x = make([3, 2, 5])
    check(lambda x: torch.slice_scatter(x, x[:, :-1] * 2, 1, 1), x)
    check(lambda x: torch.select_scatter(x, x[..., 0] * 2, 2, 1), x)


def test_assignment_changes_the_tensor_that_shares_the_payload() -> None:
    (x,) = pack(make([3, 2, 5]))
    view = x.transpose(0, 1)
    x[:, 0] = 0.0
    assert (view[0] == 0).all()


# ---------------------------------------------------------------- sources in order, flat positions


@pytest.mark.parametrize("pattern", ["n", "n 4", "n m 4"])
def test_entries_under_a_mask_are_filled_in_order(pattern: str) -> None:
    x, mask = make([3, 0, 5], pattern), make([3, 0, 5], pattern, dtype=torch.bool)
    counts = [int(m.sum()) for m in mask.samples]
    own = make(counts, "k", seed=2)
    check(lambda x, m, s: x.masked_scatter(m, s), x, mask, own)
    whole = torch.cat(list(own.samples))
    a, b = pack(x)[0].requires_grad_(), pack(mask)[0]
    source = whole.clone().requires_grad_()
    out = a.masked_scatter(b, source)
    wanted = [s.masked_scatter(m, o) for s, m, o in zip(x.samples, mask.samples, own.samples)]
    assert_matches(out.detach(), wanted)
    (out * out).sum().backward()
    torch.testing.assert_close(source.grad, 2 * whole)


def test_rows_under_a_mask_are_filled() -> None:
    mask = make([3, 0, 5], "n 1", dtype=torch.bool)
    rows = make([int(m.sum()) for m in mask.samples], "k 4", seed=1)
    check(lambda x, m, s: x.masked_scatter(m, s), make([3, 0, 5]), mask, rows)


def test_entries_at_flat_positions() -> None:
    i = make([3, 0, 2], "k", dtype=torch.int64)
    check(torch.take, make([3, 0, 5]), i)
    check(lambda x, i: x.take(-1 - i), make([3, 4, 5], "n n 4"), make([3, 0, 2], "k 2", dtype=torch.int64))
    check(lambda i, t: torch.take(t, i), i, torch.arange(30.0).view(5, 6))


@pytest.mark.parametrize(
    "key", [(slice(None), slice(None), torch.tensor([0, 2, 0])), (slice(None), [1, 0, 1])]
)
def test_positions_that_are_named_twice_add_up(key: tuple) -> None:
    batch, value = make([3, 2, 5]), torch.tensor(2.5, dtype=torch.float64)
    x = pack(batch)[0].requires_grad_()
    out = x.index_put(key, value, accumulate=True)
    wanted = []
    for s in batch.samples:
        where = torch.arange(s.numel()).view(s.shape)[key[1:]]
        wanted.append(s.clone().put_(where, value.expand(where.shape), accumulate=True))
    assert_matches(out.detach(), wanted)
    out.sum().backward()
    assert_matches(x.grad, [torch.ones_like(s) for s in batch.samples])
    y = pack(batch)[0]
    assert y.index_put_(key, value, accumulate=True) is y
    assert_matches(y, wanted)


def test_a_mask_accumulates() -> None:
    value = torch.tensor(2.0, dtype=torch.float64)
    check(lambda x: x.index_put((x > 0,), value, accumulate=True), make([3, 0, 5]))


MISTAKES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a_source_of_other_counts": (
        lambda x: x.masked_scatter(x == x, pack(make([3, 1, 5]))[0]),
        "masked_scatter, entries that the mask chooses.*sample 1 has 8 and 4",
    ),
    "a_source_too_short": (lambda x: x.masked_scatter(x == x, torch.zeros(3, dtype=x.dtype)), "source"),
    "fills_across_dims": (
        lambda x: x.transpose(1, 2).masked_scatter(x.transpose(1, 2) > 0, torch.zeros(99, dtype=x.dtype)),
        "masked_scatter fills in the order of dims: permute",
    ),
    "dense_positions": (lambda x: x.take(torch.tensor([0])), "take.*index_select"),
    "a_position_too_far": (lambda x: x.take(x.long() * 0 + 8), "take: position 8 in sample 1, which has 8"),
    "positions_of_another_batch": (
        lambda x: x.take(pack(make([1, 2], "n", dtype=torch.int64))[0]),
        "take: batches of 3 and 2 samples",
    ),
}


@pytest.mark.parametrize(("fn", "message"), list(MISTAKES.values()), ids=list(MISTAKES))
def test_mistakes_are_named(fn: Callable, message: str) -> None:
    with pytest.raises((ValueError, IndexError, RuntimeError), match=message):
        fn(pack(make([3, 2, 5]))[0])

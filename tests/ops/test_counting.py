"""Counts over valid entries, bags of embeddings, covariances of each sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn

from ops import PackedTensor, is_packed
from ops.testing import Ragged, assert_matches, check, pack
from tests.strategies import PROFILES, laid_out, make


def entries(batch: Ragged) -> Tensor:
    """All entries of dense samples, one after the other, in the order of their dims."""
    return torch.cat([sample.flatten() for sample in batch.samples])


# ------------------------------------------------------------------ unique


@settings(max_examples=40, deadline=None)
@given(laid_out(dtype=torch.int64))
def test_distinct_entries(drawn: tuple[Ragged, tuple[int, ...]]) -> None:
    batch, order = drawn
    (x,) = pack(batch)
    x = x.permute(order)
    want, counts = torch.unique(entries(batch), return_counts=True)
    assert torch.equal(x.unique(), want)
    values, inverse, got_counts = torch.unique(x, return_inverse=True, return_counts=True)
    assert torch.equal(values, want) and torch.equal(got_counts, counts)
    assert inverse.order == x.order and inverse.grid is x.grid
    assert torch.equal(want[inverse.values], x.values)


@pytest.mark.parametrize("pattern", ["n", "n 4", "n 3 4", "n n", "n n 4", "n m", "n m k"])
def test_runs_of_equal_entries(pattern: str) -> None:
    batch = make([3, 1, 5, 2], pattern, dtype=torch.int64)
    (x,) = pack(batch)
    want = torch.unique_consecutive(entries(batch), return_inverse=True, return_counts=True)
    got = torch.unique_consecutive(x, return_inverse=True, return_counts=True)
    assert torch.equal(got[0], want[0]) and torch.equal(got[2], want[2])
    assert is_packed(got[1]) and torch.equal(got[1].values.flatten(), want[1])
    assert torch.equal(x.unique_consecutive(), want[0])


def test_distinct_rows() -> None:
    batch = make([3, 0, 5], "n 2", dtype=torch.int64)
    (x,) = pack(batch)
    rows = x.flatten(0, 1)
    want = torch.unique(torch.cat(list(batch.samples)), dim=0, return_inverse=True, return_counts=True)
    values, inverse, counts = rows.unique(dim=0, return_inverse=True, return_counts=True)
    assert torch.equal(values, want[0]) and torch.equal(counts, want[2])
    assert torch.equal(inverse.view(x.shape[:2]).values, want[1])
    turned = rows.transpose(0, 1).unique(dim=1)
    assert torch.equal(turned, want[0].T)


def test_distinct_entries_of_a_static_dim() -> None:
    batch = Ragged([torch.tensor([[1, 2, 1], [0, 3, 0]]), torch.tensor([[5, 4, 5]])], "n 3")
    (x,) = pack(batch)
    got, counts = x.unique(dim=2, return_counts=True)
    assert_matches(got, [torch.tensor([[1, 2], [0, 3]]), torch.tensor([[5, 4]])])
    assert counts.tolist() == [2, 1]
    assert_matches(x.unique_consecutive(dim=2), list(batch.samples))


# ------------------------------------------------------------------ histograms


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("pattern", ["n", "n 4", "4 n", "n m"])
def test_histograms(profile: str, pattern: str) -> None:
    batch, weights = make(PROFILES[profile], pattern), make(PROFILES[profile], pattern, seed=1)
    x, w = pack(batch, weights)
    flat, heavy = entries(batch), entries(weights)
    assert torch.equal(torch.histc(x, 5, -2, 2), torch.histc(flat, 5, -2, 2))
    assert torch.equal(x.histc(bins=3, min=-1, max=1), flat.histc(bins=3, min=-1, max=1))
    got = torch.histogram(x, 4, range=(-2.0, 2.0), weight=w)
    want = torch.histogram(flat, 4, range=(-2.0, 2.0), weight=heavy)
    torch.testing.assert_close(got.hist, want.hist)
    edges = torch.tensor([-1.0, 0, 2], dtype=torch.float64)
    assert torch.equal(torch.histogram(x, edges).hist, torch.histogram(flat, edges).hist)


@pytest.mark.parametrize("pattern", ["n", "n 4", "n m"])
def test_counts_of_numbers(pattern: str) -> None:
    batch, weights = make([3, 0, 5], pattern, dtype=torch.int64), make([3, 0, 5], pattern, seed=1)
    x, w = pack(batch, weights)
    flat = entries(batch)
    assert torch.equal(torch.bincount(x, minlength=9), torch.bincount(flat, minlength=9))
    assert torch.equal(x.bincount(), flat.bincount())
    torch.testing.assert_close(torch.bincount(x, w), torch.bincount(flat, entries(weights)))
    torch.testing.assert_close(x.bincount(weights=w), flat.bincount(weights=entries(weights)))


def test_weights_in_another_order_of_dims() -> None:
    batch, weights = make([3, 1, 5], "n 2", dtype=torch.int64), make([3, 1, 5], "2 n", seed=1)
    x, w = pack(batch, weights)
    want = torch.cat([t.T.flatten() for t in weights.samples])
    torch.testing.assert_close(torch.bincount(x, w.transpose(1, 2)), torch.bincount(entries(batch), want))


# ------------------------------------------------------------------ bags


@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("profile", [name for name, lengths in PROFILES.items() if min(lengths) > 0])
def test_bags_of_embeddings(profile: str, mode: str, padding: int | None) -> None:
    bag = nn.EmbeddingBag(6, 3, mode=mode, padding_idx=padding, dtype=torch.float64)
    out = check(bag, make(PROFILES[profile], "n", dtype=torch.int64), params=bag.parameters())
    assert isinstance(out, Tensor)


def test_weighted_bags() -> None:
    table = torch.randn(6, 3, dtype=torch.float64)

    def fn(i: Any, w: Any, table: Tensor) -> Any:
        return F.embedding_bag(i, table, mode="sum", per_sample_weights=w)

    check(fn, make([3, 1, 5], "n", dtype=torch.int64), make([3, 1, 5], "n"), table)


def test_the_bag_of_an_empty_sample_is_zero() -> None:
    (x,) = pack(make([3, 0, 2], "n", dtype=torch.int64))
    for mode in ("sum", "mean", "max"):
        out = nn.EmbeddingBag(6, 3, mode=mode)(x)
        assert out.shape == (3, 3) and not out[1].any() and out[0].any()


def test_bags_of_32_bit_indices_and_sparse_gradients() -> None:
    (x,) = pack(make([3, 2], "n", dtype=torch.int64))
    bag = nn.EmbeddingBag(6, 3, sparse=True)
    torch.testing.assert_close(bag(x.int()), bag(x))
    bag(x).sum().backward()
    assert bag.weight.grad.is_sparse


# ------------------------------------------------------------------ covariances


@pytest.mark.filterwarnings("ignore:cov.*degrees of freedom")
@pytest.mark.parametrize("pattern", ["3 n", "n 4", "n m", "n n"])
def test_covariances(pattern: str) -> None:
    batch = make([3, 2, 5], pattern)
    for fn in (torch.cov, torch.corrcoef, lambda x: torch.cov(x, correction=0)):
        check(lambda x, fn=fn: fn(x) if is_packed(x) else fn(x[0])[None], batch)


def test_covariances_under_batch_dims() -> None:
    batch = make([3, 2, 4], "k 2 n")

    def fn(x: Any) -> Any:
        return torch.cov(x) if is_packed(x) else torch.stack([torch.cov(part) for part in x[0]])[None]

    check(fn, batch)


# ------------------------------------------------------------------ mistakes


def mistakes() -> dict[str, tuple[Callable[[], Any], type[Exception], str]]:
    x, i, j = pack(make([3, 2], "n 4"), *[make([3, 2], "n", dtype=torch.int64, seed=k) for k in (0, 1)])
    (other,) = pack(make([2, 3], "n"))
    table = torch.randn(6, 3)
    return {
        "unique of a ragged dim": (
            lambda: x.unique(dim=1),
            ValueError,
            "needs a static dim.*ragged axis 'n'",
        ),
        "unique of the batch": (lambda: x.unique(dim=0), ValueError, "needs a static dim.*the batch dim"),
        "runs out of order": (lambda: x.transpose(1, 2).unique_consecutive(), ValueError, "read.*permute"),
        "dense weights": (lambda: torch.bincount(i, torch.ones(5)), TypeError, "bincount: .*packed"),
        "dense numbers": (lambda: torch.bincount(torch.ones(5).long(), i), TypeError, "bincount: .*packed"),
        "dense weight": (lambda: torch.histogram(x, 4, weight=torch.ones(5)), TypeError, "have to be packed"),
        "other weights": (lambda: torch.bincount(i, other), ValueError, "sample 0 has 2 and 3|3 and 2"),
        "weights of more dims": (lambda: torch.bincount(i, x), ValueError, "have to be of one structure"),
        "bags with offsets": (
            lambda: F.embedding_bag(i, table, torch.zeros(1).long()),
            ValueError,
            "without off",
        ),
        "bags of rows": (lambda: F.embedding_bag(i.flatten(0, 1), table), ValueError, r"indices \(B, n\)"),
        "bags along the batch": (
            lambda: F.embedding_bag(i.transpose(0, 1), table),
            ValueError,
            r"indices \(B, n\)",
        ),
        "dense bags": (
            lambda: F.embedding_bag(torch.ones(2, 3).long(), table, per_sample_weights=other),
            TypeError,
            "packed alike",
        ),
        "dense bag weights": (
            lambda: F.embedding_bag(i, table, mode="sum", per_sample_weights=torch.ones(2, 3)),
            TypeError,
            "packed alike",
        ),
        "cov of vectors": (lambda: torch.cov(other), ValueError, "no 2 matrix dims"),
        "cov with weights": (
            lambda: torch.cov(x, aweights=torch.ones(4)),
            NotImplementedError,
            "no weights.*to_list",
        ),
        "out": (lambda: torch.histc(x, out=torch.empty(100)), TypeError, "no 'out='"),
    }


@pytest.mark.parametrize("name", mistakes())
def test_mistakes(name: str) -> None:
    call, kind, message = mistakes()[name]
    with pytest.raises(kind, match=f"(?s){message}"):
        call()


def test_no_entry_is_counted_that_is_none() -> None:
    x = PackedTensor.from_padded(torch.tensor([[1, 2, 9], [3, 9, 9]]), [2, 1])
    assert x.unique().tolist() == [1, 2, 3]
    assert x.bincount().tolist() == [0, 1, 1, 1]


def test_whole_channels_in_place() -> None:
    (x,) = pack(make([3, 2], "4 n"))
    torch.manual_seed(0)
    out = torch.feature_dropout_(x, 0.5, True)
    assert out is x
    for sample in x.to_list():
        assert ((sample == 0).all(1) | (sample != 0).all(1)).all()
    assert torch.feature_alpha_dropout_(x, 0.5, True) is x

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ops.testing import Ragged, assert_matches, pack
from tests.strategies import PROFILES, make

NEW: dict[str, Callable] = {
    "zeros": lambda x, size: x.new_zeros(size),
    "ones": lambda x, size: x.new_ones(*size),
    "full": lambda x, size: x.new_full(size, 2.5),
}


@pytest.mark.parametrize("lengths", list(PROFILES.values()), ids=list(PROFILES))
@pytest.mark.parametrize("fn", list(NEW.values()), ids=list(NEW))
def test_sizes_of_the_shape_give_the_structure(fn: Callable, lengths: list[int]) -> None:
    (x,) = pack(make(lengths))
    new = fn(x, x.shape)
    assert new.grid is x.grid and new.dtype == x.dtype
    assert_matches(new, [fn(s, s.shape) for s in x.to_list()])
    batch, longest, _ = x.shape
    assert_matches(fn(x, (batch, longest)), [fn(s, s.shape[:1]) for s in x.to_list()])
    assert_matches(fn(x, (batch, 3, longest)), [fn(s, (3, len(s))) for s in x.to_list()])
    assert_matches(fn(x, (batch, longest, longest, 2)), [fn(s, (len(s), len(s), 2)) for s in x.to_list()])


def test_plain_sizes_give_a_dense_tensor() -> None:
    (x,) = pack(make([3, 5]))
    for new in (x.new_zeros(2, 5), x.new_empty((2, 5)), x.new_full((2, 5), 1), x.new_tensor([1, 2])):
        assert type(new) is Tensor
    assert x.new_zeros(2, dtype=torch.int64).dtype == torch.int64


LIKE: dict[str, Callable] = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 5),
    "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x)),
    "normal": lambda x: torch.normal(x, 1.0),
    "poisson": lambda x: torch.poisson(x.abs()),
    "dropout": lambda x: F.dropout(x, 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel": lambda x: F.gumbel_softmax(x, dim=1),
    "normal_": lambda x: (x * 1).normal_(),
    "uniform_": lambda x: (x * 1).uniform_(),
    "exponential_": lambda x: (x * 1).exponential_(),
}


@pytest.mark.parametrize("fn", list(LIKE.values()), ids=list(LIKE))
def test_random_tensors_keep_the_structure_and_repeat_by_seed(fn: Callable) -> None:
    (x,) = pack(make([3, 0, 5]))
    results = []
    for _ in range(2):
        torch.manual_seed(7)
        results.append(fn(x))
    first, second = results
    assert first.grid is x.grid and first.order == x.order
    assert torch.equal(first, second) and not torch.equal(first, fn(x))


@pytest.mark.parametrize("name", ["dropout1d", "dropout2d", "dropout3d"])
def test_whole_channels_of_samples_are_dropped(name: str) -> None:
    fn, pattern = getattr(F, name), "64 " + " ".join(["n", "n", "n"][: int(name[-2])])
    ones = Ragged([torch.ones_like(s) for s in make([3, 2, 4], pattern).samples], pattern)
    (x,) = pack(ones)
    torch.manual_seed(1)
    out = fn(x, 0.25, training=True)
    kept = []
    for sample in out.to_list():
        flat = sample.flatten(1)
        assert (flat == flat[:, :1]).all(), "a channel is dropped whole"
        assert set(flat[:, 0].tolist()) == {0.0, 1 / 0.75}
        kept.append(flat[:, 0])
    assert not torch.equal(kept[0], kept[1]), "samples are drawn apart"
    torch.manual_seed(1)
    assert torch.equal(fn(x, 0.25, training=True), out)
    assert torch.equal(fn(x, 0.25, training=False), x)


def test_feature_alpha_dropout_sets_channels_to_one_limit() -> None:
    (x,) = pack(Ragged([torch.ones(64, n) for n in (3, 2)], "64 n"))
    out = F.feature_alpha_dropout(x, 0.5, training=True)
    dense = F.feature_alpha_dropout(torch.ones(2, 64, 3), 0.5, training=True)
    torch.testing.assert_close(out.values.unique(), dense.unique())
    for sample in out.to_list():
        assert (sample == sample[:, :1]).all()
    assert F.feature_alpha_dropout(x, 0.5) is x


def test_positions_are_drawn_with_the_weights_of_their_sample() -> None:
    weights = Ragged([torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0.0, 0.0, 0.0, 2.0, 3.0])], "n")
    (x,) = pack(weights)
    drawn = torch.multinomial(x, 200, replacement=True)
    assert type(drawn) is Tensor and drawn.shape == (2, 200)
    assert set(drawn[0].tolist()) == {1} and set(drawn[1].tolist()) == {3, 4}
    features = torch.multinomial(pack(make([3, 0, 5]))[0].exp(), 2)
    assert features.shape[2] == 2 and (features.values[:, 0] != features.values[:, 1]).all()


MISTAKES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no_batch": (lambda x: x.new_zeros(x.shape[1], 7), "name a ragged axis, but not the batch"),
    "channels_last": (lambda x: F.dropout1d(x), "dropout1d needs a static dim; dim 1 .* ragged axis 'n'"),
    "too_many_draws": (lambda x: torch.multinomial(x[..., 0].abs(), 4), "multinomial.*sample 1 has 2"),
    "more_draws_than_features": (lambda x: torch.multinomial(x.abs(), 5), "multinomial|sample|categories"),
    "strides": (lambda x: x.new_empty_strided(x.shape, (20, 4, 1)), "takes no strides; use x.new_empty"),
    "no_batch_of_pairs": (lambda x: x.new_ones((x.shape[1], x.shape[1])), "but not the batch"),
    "channels_of_rows": (lambda x: F.dropout2d(x.flatten(0, 1)), "dropout2d needs the batch in dim 0"),
    "no_share": (lambda x: F.dropout(x, 1.5), "probability"),
    "no_probability": (lambda x: torch.bernoulli(x + 3), "Expected p_in|probab"),
    "a_negative_rate": (lambda x: torch.poisson(-x.abs() - 1), "rate|invalid"),
    "classes_unknown": (lambda x: F.one_hot(x.long()), "one_hot of a packed tensor needs num_classes"),
}


@pytest.mark.parametrize(("fn", "message"), list(MISTAKES.values()), ids=list(MISTAKES))
def test_mistakes_are_named(fn: Callable, message: str) -> None:
    (x,) = pack(make([5, 2, 4]))
    with pytest.raises((ValueError, IndexError, RuntimeError), match=message):
        fn(x)

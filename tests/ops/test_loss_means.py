from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ops
from ops.testing import Ragged, check, pack
from tests.ops.test_loss import (
    CLASSES,
    LENGTHS,
    logits_of,
    targets_of,
)
from tests.strategies import make

# ---------------------------------------------------------------- the two means


@LENGTHS
def test_the_mean_of_sample_means(lengths: list[int]) -> None:
    """Case 9: against each dense sample's own mean, in float64."""
    filled = [n for n in lengths if n]
    for pattern in ("n", "n 4", "4 n m"):
        x = make(filled, pattern)
        check(
            ops.per_sample_mean,
            x,
            reference=lambda x: torch.stack([s.mean() for s in x.samples]).mean(),
        )
    x, t = logits_of(filled), targets_of(filled)
    check(
        lambda x, t: ops.per_sample_mean(F.cross_entropy(x, t, reduction="none")),
        x,
        t,
        reference=lambda x, t: torch.stack(
            [F.cross_entropy(s, u) for s, u in zip(x.samples, t.samples)]
        ).mean(),
    )
    check(
        lambda x, t: ops.per_sample_mean(F.cross_entropy(x.view(-1, CLASSES), t.view(-1), reduction="none")),
        x,
        t,
        reference=lambda x, t: torch.stack(
            [F.cross_entropy(s, u) for s, u in zip(x.samples, t.samples)]
        ).mean(),
    )


def test_the_two_means_differ() -> None:
    """Case 9: samples of 7 and 2 positions."""
    x, t = pack(logits_of([7, 2]), targets_of([7, 2]))
    loss = F.cross_entropy(x, t, reduction="none")
    seven, two = (each.mean() for each in loss.to_list())
    torch.testing.assert_close(loss.mean(), (7 * seven + 2 * two) / 9)
    torch.testing.assert_close(ops.per_sample_mean(loss), (seven + two) / 2)


@pytest.mark.parametrize("empty", [math.nan, 0.0, 2.5, None])
def test_a_sample_in_which_nothing_counts(empty: float | None) -> None:
    x, t = logits_of([3, 4, 0, 2]), targets_of([3, 4, 0, 2])
    t.samples[3].fill_(1)

    def by_hand(x: Ragged, t: Ragged) -> Tensor:
        means = []
        for s, u in zip(x.samples, t.samples):
            if (u != 1).any():
                means.append(F.cross_entropy(s, u, ignore_index=1))
            elif empty is not None:
                means.append(s.new_tensor(empty))
        return torch.stack(means).mean()

    def loss(x: Any, t: Any) -> Any:
        each = F.cross_entropy(x, t, reduction="none", ignore_index=1)
        return ops.per_sample_mean(each, t != 1, empty=empty)

    check(loss, x, t, reference=by_hand)


def test_masked_entries_do_not_count_whatever_they_are() -> None:
    samples = [torch.tensor([1.0, math.nan, 3.0]), torch.tensor([math.inf, 5.0])]
    (x,) = pack(Ragged(samples, "n"))
    x.requires_grad_()
    mean = ops.per_sample_mean(x, x.isfinite())
    mean.backward()
    assert mean == 3.5
    assert x.grad.values.tolist() == [0.25, 0, 0.25, 0, 0.5]


def test_a_mask_broadcasts() -> None:
    (x,) = pack(make([3, 5]))
    columns = torch.tensor([True, False, True, True])
    torch.testing.assert_close(ops.per_sample_mean(x, columns), ops.per_sample_mean(x[..., [0, 2, 3]]))
    (mask,) = pack(Ragged([torch.tensor([[True], [False], [True]]), torch.ones(5, 1).bool()], "n 1"))
    expected = (x.to_list()[0][[0, 2]].mean() + x.to_list()[1].mean()) / 2
    torch.testing.assert_close(ops.per_sample_mean(x, mask), expected)


def test_means_of_half_precision_are_exact() -> None:
    samples = [torch.ones(70_000, dtype=torch.bfloat16), torch.full((3,), 2, dtype=torch.bfloat16)]
    mean = ops.per_sample_mean(pack(Ragged(samples, "n"))[0])
    assert mean == 1.5 and mean.dtype == torch.bfloat16


# ---------------------------------------------------------------- mistakes


def some(pattern: str = "n 4", lengths: tuple[int, ...] = (3, 5), **kwargs: Any) -> Any:
    return pack(make(list(lengths), pattern, **kwargs))[0]


def ids(lengths: tuple[int, ...] = (3, 5), pattern: str = "n") -> Any:
    return some(pattern, lengths, dtype=torch.int64) % 4


MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "packed targets of a dense input": (
        lambda: F.cross_entropy(torch.randn(2, 4, 5), ids()),
        TypeError,
        "cross_entropy: the input must be packed where the target or a weight is",
    ),
    "targets of other samples": (
        lambda: F.cross_entropy(some(), ids((5, 3))),
        ValueError,
        "cross_entropy, dim 1.*sample 0 has 3 and 5",
    ),
    "targets of too few dims": (
        lambda: F.cross_entropy(some("n m 4"), ids()),
        ValueError,
        r"cross_entropy: a target of shape \(2, 5\) for positions \(2, 5, 5\)",
    ),
    "one target a sample for all its positions": (
        lambda: F.nll_loss(some(), torch.tensor([1, 2])),
        ValueError,
        r"nll_loss: a target of shape \(2,\) for positions \(2, 5\): it has one entry for each position",
    ),
    "probabilities of other classes": (
        lambda: F.cross_entropy(some(), some("n 3")),
        ValueError,
        r"cross_entropy: a target of shape \(2, 5, 3\) does not fit",
    ),
    "other static dims": (
        lambda: F.cross_entropy(some("n 3 4"), ids(pattern="n 2")),
        ValueError,
        r"cross_entropy: a target of shape \(2, 5, 2\) does not fit an input of \(2, 5, 3\)",
    ),
    "no static dim for classes": (
        lambda: F.cross_entropy(some("n"), ids()),
        ValueError,
        "cross_entropy: the classes need a static dim, and neither dim 1 nor the last dim is",
    ),
    "ragged features": (
        lambda: F.triplet_margin_loss(some("4 n"), some("4 n"), some("4 n")),
        ValueError,
        "triplet_margin_loss: the features need a static dim, and the last dim is not; transpose",
    ),
    "a weight for each position": (
        lambda: F.cross_entropy(some(), ids(), some("n")),
        ValueError,
        r'cross_entropy: the weight has one entry for each class, shape \(C,\); to weigh positions.*"none"',
    ),
    "a class that is not": (
        lambda: F.cross_entropy(some(), ids() + 4),
        IndexError,
        "Target [4-7] is out of bounds",
    ),
    "a batch mean without the batch in front": (
        lambda: F.kl_div(some().transpose(0, 1), some().transpose(0, 1), reduction="batchmean"),
        ValueError,
        '"batchmean" needs the batch in dim 0',
    ),
    "an unknown reduction": (
        lambda: F.mse_loss(some(), some(), reduction="average"),
        ValueError,
        "average is not a valid value for reduction",
    ),
    "another unknown reduction": (
        lambda: F.triplet_margin_with_distance_loss(some(), some(), some(), reduction="average"),
        ValueError,
        "reduction is one of .*got 'average'",
    ),
    "ranks of fewer dims": (
        lambda: F.margin_ranking_loss(some(), some(), torch.ones(4)),
        ValueError,
        r"margin_ranking_loss: operands of \[3, 3, 1\] dims",
    ),
    "a negative of fewer dims": (
        lambda: F.triplet_margin_loss(some(), some(), torch.ones(4)),
        ValueError,
        r"triplet_margin_loss: operands of \[3, 3, 1\] dims",
    ),
    "no margin": (
        lambda: F.triplet_margin_with_distance_loss(some(), some(), some(), margin=0),
        ValueError,
        "margin must be greater than 0",
    ),
    "a negative variance": (
        lambda: F.gaussian_nll_loss(some(), some(), -some().abs()),
        ValueError,
        "var has negative",
    ),
    "ranks of other samples": (
        lambda: F.margin_ranking_loss(some(), some("n 4", (5, 3)), some()),
        ValueError,
        "margin_ranking_loss, dim 1.*sample 0 has 3 and 5",
    ),
    "lengths that are not the structure's": (
        lambda: F.ctc_loss(some(), ids((2, 2)), torch.tensor([5, 5]), None),
        ValueError,
        "ctc_loss: input_lengths against the packed operand's: the structures differ: sample 0 has 5 and 3",
    ),
    "dense targets without lengths": (
        lambda: F.ctc_loss(some(), torch.ones(2, 2).long(), None, None),
        ValueError,
        "ctc_loss: target_lengths are needed where that operand is dense",
    ),
    "pairs in place of logarithms": (
        lambda: F.ctc_loss(some("n m 4"), ids((2, 2)), None, None),
        ValueError,
        "ctc_loss: packed log_probs have a batch, a ragged and a class dim; got",
    ),
    "targets of other batches": (
        lambda: F.ctc_loss(some(), ids((2, 2, 1)), None, None),
        (RuntimeError, ValueError),
        "target_lengths|batch",
    ),
    "the sample mean of a dense loss": (
        lambda: ops.per_sample_mean(torch.ones(3)),
        TypeError,
        "per_sample_mean: values must be packed; .*loss.mean",
    ),
    "a mask of numbers": (
        lambda: ops.per_sample_mean(some(), some()),
        TypeError,
        "per_sample_mean: the mask must be a bool tensor",
    ),
    "a mask of too few dims": (
        lambda: ops.per_sample_mean(some(), ids() > 1),
        ValueError,
        "per_sample_mean: packed operands of 3 and 2 dims",
    ),
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistakes_are_told(name: str) -> None:
    call, kind, message = MISTAKES[name]
    with pytest.raises(kind, match=message):
        call()

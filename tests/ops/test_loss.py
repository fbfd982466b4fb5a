from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops.testing import Dense, Ragged, assert_matches, check, pack
from tests.strategies import PROFILES, make

CLASSES = 5
SOME = {name: lengths for name, lengths in PROFILES.items() if sum(lengths)}
LENGTHS = pytest.mark.parametrize("lengths", list(SOME.values()), ids=list(SOME))
REDUCTION = pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
STRUCTURE_ERROR = (ValueError, RuntimeError)

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ignore": {"ignore_index": 2},
    "weight": {"weight": torch.linspace(0.5, 2, CLASSES, dtype=torch.float64)},
    "smooth": {"label_smoothing": 0.2},
    "all": {
        "ignore_index": 1,
        "weight": torch.linspace(0.5, 2, CLASSES, dtype=torch.float64),
        "label_smoothing": 0.1,
    },
}
EACH_OPTION = pytest.mark.parametrize("options", list(OPTIONS.values()), ids=list(OPTIONS))


def logits_of(lengths: list[int], pattern: str = f"n {CLASSES}") -> Ragged:
    return make(lengths, pattern)


def targets_of(lengths: list[int], pattern: str = "n") -> Ragged:
    ids = make(lengths, pattern, dtype=torch.int64, seed=1)
    return Ragged([s % CLASSES for s in ids.samples], pattern)


def rows(batch: Ragged) -> Tensor:
    """By hand: all valid positions of a batch, stacked; classes last."""
    return torch.cat([s.reshape(-1, *s.shape[-1:]) if s.dim() > 1 else s for s in batch.samples])


def over_tokens(loss: Callable, **options: Any) -> Callable[[Ragged, Ragged], Tensor]:
    return lambda x, t: loss(rows(x), rows(t), **options)


# ---------------------------------------------------------------- cross entropy


@LENGTHS
@EACH_OPTION
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_entropy_of_flattened_tokens(
    lengths: list[int], options: dict[str, Any], reduction: str
) -> None:
    def loss(x: Any, t: Any) -> Any:
        return F.cross_entropy(x.view(-1, CLASSES), t.view(-1), reduction=reduction, **options)

    reference = over_tokens(F.cross_entropy, reduction=reduction, **options)
    result = check(loss, logits_of(lengths), targets_of(lengths), reference=reference)
    assert type(result) is Tensor


@LENGTHS
@EACH_OPTION
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_entropy_with_classes_second(
    lengths: list[int], options: dict[str, Any], reduction: str
) -> None:
    def loss(x: Any, t: Any) -> Any:
        return F.cross_entropy(x.transpose(1, 2), t, reduction=reduction, **options)

    reference = over_tokens(F.cross_entropy, reduction=reduction, **options)
    check(loss, logits_of(lengths), targets_of(lengths), reference=reference)


@LENGTHS
@EACH_OPTION
def test_unreduced_cross_entropy_is_packed(lengths: list[int], options: dict[str, Any]) -> None:
    def loss(x: Any, t: Any) -> Any:
        return F.cross_entropy(x.transpose(1, 2), t, reduction="none", **options)

    check(loss, logits_of(lengths), targets_of(lengths))
    check(
        lambda x, t: F.cross_entropy(x.flatten(0, 1), t.flatten(), reduction="none", **options).view(
            *t.shape
        ),
        logits_of(lengths),
        targets_of(lengths),
    )


@REDUCTION
def test_cross_entropy_over_pairs(reduction: str) -> None:
    x, t = logits_of([3, 0, 5], f"{CLASSES} n m"), targets_of([3, 0, 5], "n m")

    def reference(x: Ragged, t: Ragged) -> Any:
        each = [F.cross_entropy(s[None], u[None], reduction="none")[0] for s, u in zip(x.samples, t.samples)]
        if reduction == "none":
            return each
        return getattr(torch.cat([e.flatten() for e in each]), reduction)()

    check(lambda x, t: F.cross_entropy(x, t, reduction=reduction), x, t, reference=reference)


def test_cross_entropy_with_class_probabilities() -> None:
    x = logits_of([3, 0, 5])
    t = Ragged([s.softmax(-1) for s in make([3, 0, 5], f"n {CLASSES}", seed=1).samples], f"n {CLASSES}")
    check(
        lambda x, t: F.cross_entropy(x.view(-1, CLASSES), t.view(-1, CLASSES)),
        x,
        t,
        reference=over_tokens(F.cross_entropy),
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_module_is_the_function(reduction: str) -> None:
    criterion = nn.CrossEntropyLoss(reduction=reduction, ignore_index=0)
    reference = over_tokens(F.cross_entropy, reduction=reduction, ignore_index=0)
    check(
        lambda x, t: criterion(x.view(-1, CLASSES), t.view(-1)),
        logits_of([3, 0, 5]),
        targets_of([3, 0, 5]),
        reference=reference,
    )


def test_the_mean_over_tokens_and_the_mean_of_means_are_both_to_be_had() -> None:
    """Case 9: samples of 7 and 2 positions."""
    x, t = logits_of([7, 2]), targets_of([7, 2])

    def token_mean(x: Any, t: Any) -> Any:
        return F.cross_entropy(x.view(-1, CLASSES), t.view(-1))

    def mean_of_means(x: Any, t: Any) -> Any:
        return F.cross_entropy(x.transpose(1, 2), t, reduction="none").mean(1).mean()

    def by_hand(x: Ragged, t: Ragged) -> Tensor:
        return torch.stack([F.cross_entropy(s, u) for s, u in zip(x.samples, t.samples)]).mean()

    over_all = check(token_mean, x, t, reference=over_tokens(F.cross_entropy))
    over_samples = check(mean_of_means, x, t, reference=by_hand)
    assert not torch.allclose(over_all, over_samples)


@pytest.mark.parametrize("lengths", [[7, 2], [3, 1, 0, 5], [4, 4]], ids=str)
def test_a_next_token_loss_stays_inside_its_sample(lengths: list[int]) -> None:
    """Case 9, last part."""

    def loss(x: Any, t: Any) -> Any:
        return F.cross_entropy(x[:, :-1].flatten(0, 1), t[:, 1:].flatten())

    def by_hand(x: Ragged, t: Ragged) -> Tensor:
        shifted = [(s[:-1], u[1:]) for s, u in zip(x.samples, t.samples)]
        return F.cross_entropy(*(torch.cat(list(part)) for part in zip(*shifted)))

    check(loss, logits_of(lengths), targets_of(lengths), reference=by_hand)


def test_tokens_of_another_structure_are_refused() -> None:
    x, t = pack(logits_of([2, 4]))[0], pack(targets_of([3, 3]))[0]
    with pytest.raises(STRUCTURE_ERROR):
        F.cross_entropy(x.view(-1, CLASSES), t.view(-1))
    with pytest.raises(STRUCTURE_ERROR):
        F.cross_entropy(x.transpose(1, 2), t)
    with pytest.raises(STRUCTURE_ERROR):
        F.cross_entropy(x.transpose(1, 2), pack(targets_of([4, 2]))[0])


def test_equal_structures_built_apart_are_accepted() -> None:
    check(
        lambda x, t: F.cross_entropy(x.view(-1, CLASSES), t.view(-1)),
        logits_of([3, 0, 5]),
        targets_of([3, 0, 5]),
        reference=over_tokens(F.cross_entropy),
        share=False,
    )


def test_no_tokens_give_what_dense_gives() -> None:
    x, t = pack(logits_of([0, 0]), targets_of([0, 0]))
    assert F.cross_entropy(x.view(-1, CLASSES), t.view(-1)).isnan()
    assert F.cross_entropy(x.view(-1, CLASSES), t.view(-1), reduction="sum") == 0


def test_a_classifier_on_reduced_rows_uses_the_plain_loss() -> None:
    labels = torch.tensor([0, 2, 4])
    check(
        lambda x: F.cross_entropy(x.mean(1), labels),
        logits_of([3, 1, 5]),
        reference=lambda b: F.cross_entropy(torch.stack([s.mean(0) for s in b.samples]), labels),
    )


# ---------------------------------------------------------------- mean squared error


@LENGTHS
@REDUCTION
@pytest.mark.parametrize("share", [True, False], ids=["shared_axes", "built_apart"])
def test_mse_loss(lengths: list[int], reduction: str, share: bool) -> None:
    x, y = make(lengths), make(lengths, seed=1)
    reference = None if reduction == "none" else over_tokens(F.mse_loss, reduction=reduction)
    check(lambda a, b: F.mse_loss(a, b, reduction=reduction), x, y, reference=reference, share=share)


def test_mse_loss_of_pairs_and_module() -> None:
    x, y = make([3, 0, 5], "n m 4"), make([3, 0, 5], "n m 4", seed=1)
    check(nn.MSELoss(), x, y, reference=lambda a, b: F.mse_loss(entries(a), entries(b)))
    check(
        lambda a, b: F.mse_loss(a, b.transpose(1, 2)),
        make([3, 0, 5], "n n 4"),
        make([3, 0, 5], "n n 4", seed=1),
        reference=lambda a, b: F.mse_loss(
            entries(a), torch.cat([s.transpose(0, 1).reshape(-1) for s in b.samples])
        ),
    )


def entries(batch: Ragged) -> Tensor:
    return torch.cat([s.reshape(-1) for s in batch.samples])


def test_mse_loss_of_other_structures_raises() -> None:
    with pytest.raises(STRUCTURE_ERROR):
        F.mse_loss(pack(make([2, 4]))[0], pack(make([3, 3]))[0])


# ---------------------------------------------------------------- the rest of the family


def positive(batch: Ragged) -> Ragged:
    return Ragged([s.sigmoid() + 0.1 for s in batch.samples], batch.pattern)


def signs(batch: Ragged) -> Ragged:
    return Ragged([s.sign() for s in batch.samples], batch.pattern)


def labels(batch: Ragged) -> Ragged:
    return Ragged([(s.abs() * 10).long() % 4 for s in batch.samples], batch.pattern)


def same(batch: Ragged) -> Ragged:
    return batch


#: name -> what its second operand holds.
ELEMENTWISE: dict[str, Callable[[Ragged], Ragged]] = {
    **dict.fromkeys(("l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss"), same),
    **dict.fromkeys(("soft_margin_loss", "hinge_embedding_loss"), signs),
    **dict.fromkeys(("binary_cross_entropy_with_logits", "kl_div", "poisson_nll_loss"), positive),
}


@REDUCTION
@LENGTHS
@pytest.mark.parametrize("name", list(ELEMENTWISE))
@pytest.mark.parametrize("pattern", ["n 4", "4 n m"])
@pytest.mark.filterwarnings("ignore")
def test_losses_of_one_value_per_entry(name: str, lengths: list[int], pattern: str, reduction: str) -> None:
    def fn(a: Any, b: Any, **kwargs: Any) -> Any:
        return getattr(F, name)(a, b.detach() if name == "soft_margin_loss" else b, **kwargs)

    x, y = make(lengths, pattern), ELEMENTWISE[name](make(lengths, pattern, seed=1))
    reference = None
    if reduction != "none":

        def reference(a: Ragged, b: Ragged) -> Tensor:
            return fn(entries(a), entries(b), reduction=reduction)

    check(lambda a, b: fn(a, b, reduction=reduction), x, y, reference=reference)


@REDUCTION
@pytest.mark.parametrize("lengths", [[3, 1, 5], [3, 0, 5], [4, 4]], ids=str)
def test_losses_of_three_operands(lengths: list[int], reduction: str) -> None:
    x, y = make(lengths), make(lengths, seed=1)
    for fn, third in (
        (F.margin_ranking_loss, signs(make(lengths, seed=2))),
        (F.gaussian_nll_loss, positive(make(lengths, seed=2))),
    ):
        by_hand = None
        if reduction != "none":

            def by_hand(a: Ragged, b: Ragged, c: Ragged, fn: Callable = fn) -> Tensor:
                return fn(entries(a), entries(b), entries(c), reduction=reduction)

        check(lambda a, b, c, fn=fn: fn(a, b, c, reduction=reduction), x, y, third, reference=by_hand)


def test_variances_of_fewer_entries() -> None:
    x, y = make([3, 0, 5]), make([3, 0, 5], seed=1)
    check(lambda a, b: F.gaussian_nll_loss(a, b, 0.3, reduction="none"), x, y)
    by_position = positive(make([3, 0, 5], "n", seed=2))
    check(lambda a, b, v: F.gaussian_nll_loss(a, b, v, True, reduction="none"), x, y, by_position)
    by_sample = Dense(torch.rand(3, 1, 4, dtype=torch.float64) + 0.1, "batch _ _")
    expanded = torch.ones(8, 4, dtype=torch.float64)
    check(
        lambda a, b, v: F.gaussian_nll_loss(a, b, v, reduction="none"),
        x,
        y,
        by_sample,
        reference=lambda a, b, v: [
            F.gaussian_nll_loss(s, t, v.tensor[i] * expanded[: len(s)], reduction="none")
            for i, (s, t) in enumerate(zip(a.samples, b.samples))
        ],
    )


WEIGHTED = {
    "mse_loss": same,
    "l1_loss": same,
    "huber_loss": same,
    "binary_cross_entropy": positive,
    "binary_cross_entropy_with_logits": positive,
}


@REDUCTION
@pytest.mark.parametrize("name", list(WEIGHTED))
@pytest.mark.parametrize("lengths", [[3, 1, 5], [3, 0, 5], [4, 4]], ids=str)
def test_weights_of_entries(name: str, lengths: list[int], reduction: str) -> None:
    """Packed, by sample, and where PyTorch broadcasts them by feature."""
    fn = getattr(F, name)

    def probabilities(seed: int) -> Ragged:
        return Ragged([s.sigmoid() for s in make(lengths, seed=seed).samples], "n 4")

    of = probabilities if name.startswith("binary") else lambda seed: make(lengths, seed=seed)
    x, y = of(0), of(1)
    by_sample = torch.rand(len(lengths), 1, 4, dtype=torch.float64)
    feature = torch.rand(4, dtype=torch.float64)
    for weight, rows_of in [
        (positive(make(lengths, seed=2)), lambda w: rows(w)),
        (
            Dense(by_sample, "batch _ _"),
            lambda w: torch.cat([v.expand(n, 4) for n, v in zip(lengths, w.tensor)]),
        ),
        (feature, lambda w: w.expand(sum(lengths), 4)),
    ][: 3 if name.startswith("binary") else 2]:

        def by_hand(a: Ragged, b: Ragged, w: Any, rows_of: Callable = rows_of) -> Any:
            loss = fn(rows(a), rows(b), weight=rows_of(w), reduction=reduction)
            return list(loss.split(lengths)) if reduction == "none" else loss

        differentiable = not (name.startswith("binary") and not isinstance(weight, Tensor))
        check(
            lambda a, b, w: fn(a, b, weight=w, reduction=reduction),
            x,
            y,
            weight,
            reference=by_hand,
            grad=differentiable and not isinstance(weight, Tensor),
        )


def test_weights_of_positive_answers() -> None:
    x, y = make([3, 0, 5]), positive(make([3, 0, 5], seed=1))
    weight = torch.rand(4, dtype=torch.float64)
    module = nn.BCEWithLogitsLoss(pos_weight=weight)
    check(
        module,
        x,
        y,
        reference=lambda a, b: F.binary_cross_entropy_with_logits(rows(a), rows(b), pos_weight=weight),
    )


@pytest.mark.parametrize("lengths", [[3, 1, 5], [3, 0, 5], [6]], ids=str)
@pytest.mark.parametrize("log_target", [False, True])
def test_a_batch_mean_divides_by_samples(lengths: list[int], log_target: bool) -> None:
    x, y = make(lengths), positive(make(lengths, seed=1))
    module = nn.KLDivLoss(reduction="batchmean", log_target=log_target)

    def by_hand(a: Ragged, b: Ragged) -> Tensor:
        return F.kl_div(rows(a), rows(b), reduction="sum", log_target=log_target) / len(lengths)

    check(module, x, y, reference=by_hand)
    check(
        lambda a, b: module(a.flatten(0, 1), b.flatten(0, 1)),
        x,
        y,
        reference=lambda a, b: by_hand(a, b) * len(lengths) / sum(lengths),
    )


# ---------------------------------------------------------------- precision, and older ways to write it


def test_losses_of_half_precision_match_dense() -> None:
    x = make([300, 1, 50], "n 4", dtype=torch.bfloat16)
    y = make([300, 1, 50], "n 4", dtype=torch.bfloat16, seed=1)
    a, b = pack(x, y)
    exact = F.mse_loss(rows(x).double(), rows(y).double())
    torch.testing.assert_close(F.mse_loss(a, b).double(), exact, rtol=2e-2, atol=0)


def test_a_weighted_sum_of_packed_losses() -> None:
    x, t = pack(logits_of([3, 0, 5]), targets_of([3, 0, 5]))
    each = F.cross_entropy(x.transpose(1, 2), t, reduction="none")
    assert_matches(each.sum(1) / 2, [s.sum() / 2 for s in each.to_list()])


def test_a_reduction_given_by_position_or_in_the_old_way_is_respected() -> None:
    x, y = make([3, 1, 5]), make([3, 1, 5], seed=1)
    check(lambda a, b: F.mse_loss(a, b, None, None, "none"), x, y)
    check(
        lambda a, b: F.l1_loss(a, b, None, None, "sum"),
        x,
        y,
        reference=over_tokens(F.l1_loss, reduction="sum"),
    )
    a, b = pack(x, y)
    with pytest.warns(UserWarning):
        assert_matches(F.mse_loss(a, b, reduce=False), [(s - t) ** 2 for s, t in zip(x.samples, y.samples)])


@pytest.mark.parametrize("lengths", [[5, 5], [5], [3, 5], [3, 0, 5]], ids=str)
@pytest.mark.parametrize("probabilities", [False, True], ids=["classes", "probabilities"])
@REDUCTION
def test_classes_stand_last_where_dim_one_is_ragged(
    lengths: list[int], probabilities: bool, reduction: str
) -> None:
    """(B, n, V) holds V classes at each position, as the sample (n, V) does by itself; also where n is V."""
    x = logits_of(lengths)
    soft = Ragged([s.softmax(-1) for s in make(lengths, x.pattern, seed=1).samples], x.pattern)
    t = soft if probabilities else targets_of(lengths)

    def reference(x: Ragged, t: Ragged) -> Any:
        if reduction == "none":
            return [F.cross_entropy(s, u, reduction="none") for s, u in zip(x.samples, t.samples)]
        return F.cross_entropy(rows(x), rows(t), reduction=reduction)

    check(lambda x, t: F.cross_entropy(x, t, reduction=reduction), x, t, reference=reference)

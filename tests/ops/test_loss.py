from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import ops
from ops.testing import Dense, Ragged, assert_matches, check, pack
from tests.strategies import PROFILES, batches, make

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


# ---------------------------------------------------------------- losses of vectors


def class_sets(batch: Ragged) -> Ragged:
    """For each position some classes, then -1, as multilabel_margin_loss has them: along the last dim."""
    samples = [s.argsort(-1).masked_fill(s.cummin(-1).values < -0.7, -1) for s in batch.samples]
    return Ragged(samples, batch.pattern)


WEIGHT = torch.linspace(0.5, 2, 4, dtype=torch.float64)
TABLE = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

#: name -> (loss, its operands from a function of (pattern, seed); patterns with 4 features last).
VECTORS: dict[str, tuple[Callable, Callable[[Callable, str], list[Ragged]]]] = {
    "cross_entropy": (
        lambda x, t, **k: F.cross_entropy(x, t, WEIGHT, label_smoothing=0.1, ignore_index=2, **k),
        lambda of, p: [of(p, 0), labels(of(p[:-2], 1))],
    ),
    "cross_entropy_of_probabilities": (
        lambda x, t, **k: F.cross_entropy(x, t, WEIGHT, **k),
        lambda of, p: [of(p, 0), Ragged([s.softmax(-1) for s in of(p, 1).samples], p)],
    ),
    "nll_loss": (
        lambda x, t, **k: F.nll_loss(x, t, WEIGHT, ignore_index=1, **k),
        lambda of, p: [of(p, 0), labels(of(p[:-2], 1))],
    ),
    "multi_margin_loss": (
        lambda x, t, **k: F.multi_margin_loss(x, t, 2, 0.7, WEIGHT, **k),
        lambda of, p: [of(p, 0), labels(of(p[:-2], 1))],
    ),
    "multilabel_margin_loss": (
        F.multilabel_margin_loss,
        lambda of, p: [of(p, 0), class_sets(of(p, 1))],
    ),
    "multilabel_soft_margin_loss": (
        lambda x, t, **k: F.multilabel_soft_margin_loss(x, t, WEIGHT, **k),
        lambda of, p: [of(p, 0), Ragged([(s > 0).double() for s in of(p, 1).samples], p)],
    ),
    "cosine_embedding_loss": (
        lambda x, y, t, **k: F.cosine_embedding_loss(x, y, t, 0.2, **k),
        lambda of, p: [of(p, 0), of(p, 1), signs(of(p[:-2], 2))],
    ),
    "triplet_margin_loss": (
        lambda a, b, c, **k: F.triplet_margin_loss(a, b, c, 1.5, 3, swap=True, **k),
        lambda of, p: [of(p, 0), of(p, 1), of(p, 2)],
    ),
    "triplet_margin_with_distance_loss": (
        lambda a, b, c, **k: F.triplet_margin_with_distance_loss(
            a, b, c, margin=2.0, swap=True, distance_function=lambda u, v: (u - v).abs().sum(-1), **k
        ),
        lambda of, p: [of(p, 0), of(p, 1), of(p, 2)],
    ),
    "triplet_margin_of_the_default_distance": (
        F.triplet_margin_with_distance_loss,
        lambda of, p: [of(p, 0), of(p, 1), of(p, 2)],
    ),
}
if hasattr(F, "linear_cross_entropy"):
    VECTORS["linear_cross_entropy"] = (
        lambda x, t, **k: F.linear_cross_entropy(x, TABLE, t, ignore_index=1, **k),
        lambda of, p: [of(p, 0), labels(of(p[:-2], 1))],
    )


def labels(batch: Ragged) -> Ragged:
    return Ragged([(s.abs() * 10).long() % 4 for s in batch.samples], batch.pattern)


def flat(batch: Ragged, features: bool) -> Tensor:
    """By hand: every position a row."""
    return torch.cat([s.reshape(-1, s.shape[-1]) if features else s.reshape(-1) for s in batch.samples])


def on_rows(loss: Callable, operands: tuple[Ragged, ...], reduction: str) -> Any:
    """The dense loss on the rows of all samples."""
    rank = len(operands[0].pattern.split())
    dense = [flat(op, len(op.pattern.split()) == rank) for op in operands]
    out = loss(*dense, reduction=reduction)
    if reduction != "none":
        return out
    shapes = [s.shape[:-1] for s in operands[0].samples]
    return [
        part.reshape(shape) for part, shape in zip(out.split([shape.numel() for shape in shapes]), shapes)
    ]


@REDUCTION
@LENGTHS
@pytest.mark.parametrize("name", list(VECTORS))
@pytest.mark.parametrize("pattern", ["n 4", "n m 4", "n 3 4"])
def test_losses_of_vectors(name: str, lengths: list[int], pattern: str, reduction: str) -> None:
    loss, operands = VECTORS[name]
    check(
        lambda *ops: loss(*ops, reduction=reduction),
        *operands(lambda p, seed: make(lengths, p, seed=seed), pattern),
        reference=lambda *ops: on_rows(loss, ops, reduction),
    )


@pytest.mark.parametrize("name", list(VECTORS))
@given(batches(patterns=("n 4", "n m 4", "n n 4", "n 3 4", "n 2 m 4")))
def test_losses_of_vectors_of_any_batch(name: str, batch: Ragged) -> None:
    loss, operands = VECTORS[name]
    lengths = {token: [s.shape[d] for s in batch.samples] for d, token in enumerate(batch.pattern.split())}
    check(
        loss,
        *operands(lambda p, seed: make(lengths, p, seed=seed), batch.pattern),
        reference=lambda *ops: on_rows(loss, ops, "mean"),
        share=False,
    )


@REDUCTION
@pytest.mark.parametrize("name", ["cross_entropy", "nll_loss", "multi_margin_loss", "multilabel_margin_loss"])
@pytest.mark.parametrize("lengths", [[3, 1, 5], [3, 0, 5], [4, 4], [4]], ids=str)
def test_classes_may_stand_in_dim_one(name: str, lengths: list[int], reduction: str) -> None:
    """(B, C, h, w) with (B, h, w)."""
    loss, operands = VECTORS[name]

    def to_dim_one(x: Any, ndim: int) -> Any:
        return x.movedim(-1, 1) if x.dim() == ndim else x

    for pattern in ("n 4", "n m 4", "n 3 4"):
        ndim = len(pattern.split()) + 1
        check(
            lambda *ops, ndim=ndim: loss(*(to_dim_one(x, ndim) for x in ops), reduction=reduction),
            *operands(lambda p, seed: make(lengths, p, seed=seed), pattern),
            reference=lambda *ops: on_rows(loss, ops, reduction),
        )


@pytest.mark.parametrize("name", list(VECTORS))
def test_rows_are_positions(name: str) -> None:
    """The idiom of dense code: x.view(-1, C) with t.view(-1)."""
    loss, operands = VECTORS[name]
    check(
        lambda *ops: loss(*(x.flatten(0, 1) for x in ops)),
        *operands(lambda p, seed: make([3, 0, 5], p, seed=seed), "n 4"),
        reference=lambda *ops: on_rows(loss, ops, "mean"),
    )


def test_dense_operands_are_read_by_sample_and_position() -> None:
    x = make([3, 0, 5])
    targets = torch.randint(0, 4, (3, 5))
    check(
        lambda x, t: F.cross_entropy(x, t, reduction="none"),
        x,
        Dense(targets, "batch n"),
        reference=lambda x, t: [
            F.cross_entropy(s, t.tensor[i, : len(s)], reduction="none") for i, s in enumerate(x.samples)
        ],
    )
    anchor = torch.randn(3, 1, 4, dtype=torch.float64)
    check(
        lambda a, x, y: F.triplet_margin_loss(a, x, y, reduction="none"),
        Dense(anchor, "batch _ _"),
        x,
        make([3, 0, 5], seed=1),
        reference=lambda a, x, y: [
            F.triplet_margin_loss(a.tensor[i].expand_as(s), s, t, reduction="none")
            for i, (s, t) in enumerate(zip(x.samples, y.samples))
        ],
    )


MODULES: dict[str, tuple[nn.Module, str]] = {
    "cross_entropy": (nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1, ignore_index=2), "cross_entropy"),
    "nll": (nn.NLLLoss(WEIGHT, ignore_index=1), "nll_loss"),
    "multi_margin": (nn.MultiMarginLoss(2, 0.7, WEIGHT), "multi_margin_loss"),
    "multilabel_margin": (nn.MultiLabelMarginLoss(), "multilabel_margin_loss"),
    "multilabel_soft_margin": (nn.MultiLabelSoftMarginLoss(WEIGHT), "multilabel_soft_margin_loss"),
    "cosine": (nn.CosineEmbeddingLoss(0.2), "cosine_embedding_loss"),
    "triplet": (nn.TripletMarginLoss(1.5, 3, swap=True), "triplet_margin_loss"),
    "triplet_with_distance": (nn.TripletMarginWithDistanceLoss(), "triplet_margin_of_the_default_distance"),
}


@pytest.mark.parametrize("name", list(MODULES))
def test_modules_are_the_functions(name: str) -> None:
    module, row = MODULES[name]
    loss, operands = VECTORS[row]
    check(
        module,
        *operands(lambda p, seed: make([3, 0, 5], p, seed=seed), "n 4"),
        reference=lambda *ops: on_rows(loss, ops, "mean"),
    )


def test_modules_of_entries() -> None:
    x, y, z = make([3, 0, 5]), make([3, 0, 5], seed=1), make([3, 0, 5], seed=2)
    p, q, s = Ragged([t.sigmoid() for t in x.samples], "n 4"), positive(z), signs(z)
    for module, operands in (
        (nn.L1Loss(), (x, y)),
        (nn.SmoothL1Loss(beta=0.5), (x, y)),
        (nn.HuberLoss(delta=0.5), (x, y)),
        (nn.BCELoss(), (p, Ragged([t.sigmoid() for t in y.samples], "n 4"))),
        (nn.PoissonNLLLoss(full=True), (x, q)),
        (nn.HingeEmbeddingLoss(0.7), (x, s)),
        (nn.MarginRankingLoss(0.3), (x, y, s)),
        (nn.GaussianNLLLoss(full=True), (x, y, q)),
    ):
        check(module, *operands, reference=lambda *ops, m=module: m(*(rows(op) for op in ops)))
    check(nn.LogSigmoid(), x)
    soft = nn.SoftMarginLoss()
    check(lambda a, b: soft(a, b.detach()), x, s, reference=lambda a, b: soft(rows(a), rows(b).detach()))


def test_spellings_in_torch_give_the_reduction_by_number() -> None:
    x, y = make([3, 0, 5]), make([3, 0, 5], seed=1)
    s, t = signs(make([3, 0, 5], seed=2)), signs(make([3, 0, 5], "n", seed=2))
    for fn, operands in (
        (lambda a, b: torch.kl_div(a, b, 2), (x, y)),
        (lambda a, b: torch.poisson_nll_loss(a, b, True, False, 1e-8, 1), (x, y)),
        (lambda a, b: torch.hinge_embedding_loss(a, b, 0.5, 1), (x, s)),
        (lambda a, b, c: torch.margin_ranking_loss(a, b, c, 0.1, 2), (x, y, s)),
        (lambda a, b: torch.binary_cross_entropy_with_logits(a, b, None, None, 1), (x, y)),
        (lambda a, b, c: torch.cosine_embedding_loss(a, b, c, 0.1, 2), (x, y, t)),
        (lambda a, b, c: torch.triplet_margin_loss(a, b, c, 1.0, 2, 1e-6, False, 2), (x, y, s)),
    ):
        check(fn, *operands, reference=lambda *ops, fn=fn: fn(*(rows(op) for op in ops)))


# ---------------------------------------------------------------- connectionist temporal classification

CTC = pytest.mark.parametrize(
    "lengths, targets",
    [([6, 9, 4], [2, 3, 1]), ([5, 5], [2, 2]), ([7], [3]), ([6, 4], [0, 2]), ([3, 8, 6], [3, 1, 0])],
    ids=str,
)


def speech(lengths: list[int], targets: list[int], classes: int = 5) -> tuple[Ragged, Ragged]:
    x = Ragged([s.log_softmax(-1) for s in make(lengths, f"n {classes}").samples], f"n {classes}")
    generator = torch.Generator().manual_seed(0)
    return x, Ragged([torch.randint(1, classes, (n,), generator=generator) for n in targets], "s")


def ctc_by_hand(x: Ragged, t: Ragged, reduction: str, **options: Any) -> Tensor:
    each = torch.stack(
        [
            F.ctc_loss(s[:, None], u[None], [len(s)], [len(u)], reduction="none", **options)[0]
            for s, u in zip(x.samples, t.samples)
        ]
    )
    if reduction == "mean":
        return (each / torch.tensor([max(len(u), 1) for u in t.samples])).mean()
    return each if reduction == "none" else each.sum()


@CTC
@REDUCTION
def test_ctc_loss_takes_lengths_from_structure(
    lengths: list[int], targets: list[int], reduction: str
) -> None:
    x, t = speech(lengths, targets)
    check(
        lambda x, t: F.ctc_loss(x, t, None, None, reduction=reduction),
        x,
        t,
        reference=lambda x, t: ctc_by_hand(x, t, reduction),
    )
    given = torch.tensor(lengths), tuple(targets)
    check(
        lambda x, t: nn.CTCLoss(reduction=reduction)(x.transpose(0, 1), t, *given),
        x,
        t,
        reference=lambda x, t: ctc_by_hand(x, t, reduction),
    )


@CTC
def test_ctc_loss_takes_dense_targets_and_dense_logarithms(lengths: list[int], targets: list[int]) -> None:
    x, t = speech(lengths, targets)
    padded = nn.utils.rnn.pad_sequence(list(t.samples), batch_first=True)
    for dense in (padded, torch.cat(list(t.samples))):
        check(
            lambda x, dense=dense: F.ctc_loss(x, dense, None, torch.tensor(targets)),
            x,
            reference=lambda x: ctc_by_hand(x, t, "mean"),
        )
    logs = nn.utils.rnn.pad_sequence(list(x.samples))
    (packed,) = pack(t)
    torch.testing.assert_close(F.ctc_loss(logs, packed, lengths, None), ctc_by_hand(x, t, "mean"))


def test_ctc_loss_of_targets_that_do_not_fit() -> None:
    """Two positions cannot spell three labels: infinite, or 0 on request."""
    x, t = speech([2, 8], [3, 2])
    assert F.ctc_loss(*pack(x, t), None, None).isinf()
    check(
        lambda x, t: F.ctc_loss(x, t, None, None, zero_infinity=True),
        x,
        t,
        reference=lambda x, t: ctc_by_hand(x, t, "mean", zero_infinity=True),
    )


def test_ctc_loss_knows_its_blank_and_its_spelling_in_torch() -> None:
    x, t = speech([6, 4], [2, 1])
    shifted = Ragged([u - 1 for u in t.samples], "s")
    check(
        lambda x, t: torch.ctc_loss(x, t, (6, 4), (2, 1), 4, 2),
        x,
        shifted,
        reference=lambda x, t: ctc_by_hand(x, t, "sum", blank=4),
    )


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


# ---------------------------------------------------------------- compiled


def every_loss(x: Any, y: Any, z: Any, t: Any) -> Tensor:
    each = F.cross_entropy(x, t, reduction="none", ignore_index=1)
    parts = [
        *(F.mse_loss(x, y), F.kl_div(x, y.sigmoid(), reduction="batchmean"), F.nll_loss(x, t)),
        *(F.triplet_margin_loss(x, y, z), F.cosine_embedding_loss(x, y, t % 2 * 2 - 1)),
        *(F.multi_margin_loss(x, t), F.multilabel_soft_margin_loss(x, z.sigmoid())),
        *(
            F.gaussian_nll_loss(x, y, z.sigmoid() + 0.1),
            F.logsigmoid(x).mean(),
            F.huber_loss(x, y, weight=z.sigmoid()),
        ),
        F.triplet_margin_with_distance_loss(x, y, z, swap=True),
        ops.per_sample_mean(each, t != 1, empty=0.0),
        F.ctc_loss(x.log_softmax(-1), t[:, 1:] % 3 + 1, None, None, zero_infinity=True),
    ]
    return torch.stack(parts)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.filterwarnings("ignore")
def test_losses_compile_to_one_graph(backend: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(every_loss, fullgraph=True, backend=counter)
    for lengths in ([3, 5, 2], [4, 4], [6], [2, 1, 7, 3]):
        operands = [make(lengths, seed=k) for k in range(3)]
        fields = [pack(*operands, labels(make(lengths, "n", seed=4))) for _ in range(2)]
        for field in fields:
            for x in field[:3]:
                x.requires_grad_()
        ops.mark_dynamic(fields[0])
        results = compiled(*fields[0]), every_loss(*fields[1])
        torch.testing.assert_close(*results)
        for result in results:
            (result * torch.arange(1.0, len(result) + 1)).sum().backward()
        for a, b in zip(fields[0][:3], fields[1][:3]):
            torch.testing.assert_close(a.grad.values, b.grad.values)
    assert counter.frame_count == 1


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

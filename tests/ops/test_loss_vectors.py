from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import ops
from ops.testing import Dense, Ragged, check, pack
from tests.ops.test_loss import (
    LENGTHS,
    REDUCTION,
    labels,
    positive,
    rows,
    signs,
)
from tests.strategies import batches, make

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

"""Whole programs compiled once for batches of any lengths and any size."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import ops
from ops import PackedTensor
from ops.testing import Ragged, check, pack
from tests.ops.programs import (
    BATCH_SIZES,
    PATTERNS,
    PROGRAMS,
    Program,
    SquarePair,
    operands,
    results,
    train,
)
from tests.strategies import make

EACH_PROGRAM = pytest.mark.parametrize("program", list(PROGRAMS.values()), ids=list(PROGRAMS))
FEW = ("square", "gpt")
CLOSE = {"rtol": 1e-4, "atol": 1e-4, "equal_nan": True}

#: Every pattern once, every batch size three times.
SOME = [make_lengths(BATCH_SIZES[i % 4]) for i, make_lengths in enumerate(PATTERNS.values())]
ALL = [make_lengths(size) for make_lengths in PATTERNS.values() for size in BATCH_SIZES]


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def compiled(fn: Any, backend: Any = "aot_eager") -> Any:
    return torch.compile(fn, fullgraph=True, backend=backend)


def marked(program: Program, lengths: list[int]) -> list[PackedTensor]:
    return ops.mark_dynamic(operands(program, lengths))


def exact(operands: list[PackedTensor]) -> list[PackedTensor]:
    """In double precision, where a difference is a mistake and not the order of a sum."""
    return [
        x.detach().to(torch.float64).requires_grad_(x.requires_grad) if x.values.is_floating_point() else x
        for x in operands
    ]


def sweep(program: Program, backend: str, batches: list[list[int]], training: bool) -> None:
    """Batch after batch through one compiled model, compared with eager; then the graphs are counted."""
    model = program.model().train(training).double()
    fn = compiled(model, backend)
    for lengths in batches:
        if max(lengths) < program.least:
            continue
        if training:
            got = train(fn, model, ops.mark_dynamic(exact(operands(program, lengths))))
            want = train(model, model, exact(operands(program, lengths)))
        else:
            with torch.no_grad():
                got, want = (
                    results(fn(*ops.mark_dynamic(exact(operands(program, lengths))))),
                    results(model(*exact(operands(program, lengths)))),
                )
        torch.testing.assert_close(got, want, **CLOSE)
    assert graphs() == 1
    assert not counters["recompiles"] and not counters["graph_break"]


# ---------------------------------------------------------------- one graph


@EACH_PROGRAM
def test_one_graph_trains_batches_of_any_lengths_and_sizes(program: Program) -> None:
    sweep(program, "aot_eager", SOME, training=True)


@EACH_PROGRAM
def test_one_graph_infers_batches_of_any_lengths_and_sizes(program: Program) -> None:
    sweep(program, "eager", SOME, training=False)


@EACH_PROGRAM
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.slow
def test_one_graph_of_the_default_backend_serves_every_pattern_at_every_batch_size(
    program: Program, training: bool
) -> None:
    sweep(program, "inductor", ALL, training)


@EACH_PROGRAM
@pytest.mark.parametrize("first", ["equal", "every_other_empty", "one_long"])
@pytest.mark.slow
def test_the_batch_that_comes_first_does_not_matter(program: Program, first: str) -> None:
    for size in (1, 2, 3):
        torch._dynamo.reset()
        counters.clear()
        sweep(program, "aot_eager", [PATTERNS[first](size), *SOME], training=True)


@pytest.mark.parametrize(
    "program",
    [pytest.param(p, marks=() if name in FEW else pytest.mark.slow) for name, p in PROGRAMS.items()],
    ids=list(PROGRAMS),
)
def test_a_maximum_of_one_costs_a_second_graph_at_most(program: Program) -> None:
    model = program.model()
    fn = compiled(model)
    for longest in (program.least, program.least - 1, program.least + 2):
        for lengths in ([longest, 1, longest], [longest] * 2):
            got = train(fn, model, marked(program, lengths))
            torch.testing.assert_close(got, train(model, model, operands(program, lengths)), **CLOSE)
    assert graphs() <= 2


@EACH_PROGRAM
def test_eager_equals_every_sample_by_itself_in_values_and_gradients(program: Program) -> None:
    """What the compiled results are compared with, compared with dense tensors."""
    lengths = [3, 5, 4]
    model = program.model().double()
    samples = [_double(op) for op in program.operands(lengths)]
    outputs = 2 if program is PROGRAMS["rectangular"] else 1
    for k in range(outputs):

        def fn(*arguments: Any, k: int = k) -> Any:
            out = model(*arguments)
            return out[k] if isinstance(out, tuple) else out

        reference = _mean_over_tokens(fn) if program is PROGRAMS["gpt"] else None
        check(fn, *samples, reference=reference, params=model.parameters())


def _double(op: Ragged) -> Ragged:
    return Ragged([s.double() if s.is_floating_point() else s for s in op.samples], op.pattern)


def _mean_over_tokens(fn: Callable[..., Tensor]) -> Callable[[Ragged], Tensor]:
    def loss(ids: Ragged) -> Tensor:
        counts = [len(sample) - 1 for sample in ids.samples]
        losses = [fn(sample[None]) * n for sample, n in zip(ids.samples, counts)]
        return torch.stack(losses).sum() / sum(counts)

    return loss


# ---------------------------------------------------------------- marks


EAGER_STEPS: dict[str, Callable[[PackedTensor], Any]] = {
    "to": lambda x: x.to(torch.float64).to(torch.float32),
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "requires_grad": lambda x: x.detach().requires_grad_(),
    "arithmetic": lambda x: x * 2 + 1,
    "linear": lambda x: nn.functional.linear(x, torch.ones(4, 4)),
    "transpose": lambda x: x.transpose(0, 1).transpose(0, 1),
    "slice": lambda x: x[:, 1:],
    "stride": lambda x: x[:, ::2],
    "pair_and_back": lambda x: (x[:, :, None] + x[:, None]).mean(2),
    "reshape": lambda x: x.view(*x.shape[:2], 2, 2).flatten(2),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "deepcopy": lambda x: copy.deepcopy(x),
}


@pytest.mark.parametrize("name", list(EAGER_STEPS))
def test_marks_survive_what_runs_before_a_graph(name: str) -> None:
    fn = compiled(SquarePair(), "eager")
    for lengths in ([4, 6, 3], [4, 4], [7], [5, 0, 6, 4]):
        (x,) = pack(make(lengths, dtype=torch.float32))
        fn(EAGER_STEPS[name](ops.mark_dynamic(x)))
    assert graphs() == 1


def test_a_batch_from_the_workers_of_a_loader_is_marked_in_the_main_process() -> None:
    import packload

    samples = [{"x": torch.randn(2 + i % 5, 4), "label": i % 2} for i in range(23)]
    loader = torch.utils.data.DataLoader(
        samples, batch_size=4, num_workers=1, collate_fn=packload.collate, multiprocessing_context="fork"
    )
    model = SquarePair()

    def forward(batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]).mean(1), batch["label"])

    fn = compiled(forward)
    for batch in loader:
        ops.mark_dynamic(batch)
        torch.testing.assert_close(fn(batch), forward(batch))
    assert graphs() == 1


def test_marks_of_packed_fields_survive_the_way_from_a_worker() -> None:
    loader = torch.utils.data.DataLoader(
        [torch.randn(2 + i % 5, 4) for i in range(23)],
        batch_size=4,
        num_workers=1,
        collate_fn=_marked_batch,
        multiprocessing_context="fork",
    )
    fn = compiled(SquarePair())
    for x in loader:
        fn(x)
    assert graphs() == 1


def _marked_batch(samples: list[Tensor]) -> PackedTensor:
    return ops.mark_dynamic(PackedTensor.from_list(samples, "n 4"))


def test_a_batch_that_moves_after_it_was_marked_keeps_its_marks() -> None:
    import packload

    model = SquarePair().double()
    fn = compiled(lambda batch: model(batch["x"]))
    for lengths in ([4, 6, 3], [4, 4], [7], [5, 2, 6, 4]):
        batch = packload.collate([{"x": torch.randn(n, 4)} for n in lengths])
        moved = ops.mark_dynamic(batch).to(torch.float64)
        torch.testing.assert_close(fn(moved).values, model(moved["x"]).values)
    assert graphs() == 1


class Block(nn.Module):
    """A layer in code of its own: before torch 2.14 ``compile()`` skips the code of ``torch.nn``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.layer(x)


def test_blocks_compiled_one_by_one_are_compiled_for_the_first_batch_only() -> None:
    """One graph together where the compiler shares code among modules, one each where not."""
    model = nn.Sequential(nn.Linear(4, 8), Block(), Block(), Block())
    reference = copy.deepcopy(model)
    for block in model[1:]:
        block.compile(fullgraph=True, backend="aot_eager")
    counts = set()
    for lengths in ([4, 6, 3], [4, 4], [7], [5, 0, 6, 4]):
        got = train(model, model, marked(PROGRAMS["encoder"], lengths))
        want = train(reference, reference, operands(PROGRAMS["encoder"], lengths))
        torch.testing.assert_close(got, want, **CLOSE)
        counts.add(graphs())
    assert len(counts) == 1 and 1 <= max(counts) <= 3


# ---------------------------------------------------------------- boundaries


def test_gradients_cross_from_graph_to_eager_and_back() -> None:
    first, second, third = SquarePair(), SquarePair(), SquarePair()
    model = nn.ModuleList([first, second, third])

    def chain(one: Any, three: Any) -> Callable[[PackedTensor], PackedTensor]:
        return lambda x: three(second(one(x))[:, 1:] * 2)

    mixed = chain(compiled(first), compiled(third))
    for lengths in ([4, 6, 3], [4, 4], [7], [5, 2, 6, 4]):
        got = train(mixed, model, marked(PROGRAMS["square"], lengths))
        want = train(chain(first, third), model, operands(PROGRAMS["square"], lengths))
        torch.testing.assert_close(got, want, **CLOSE)
    assert graphs() == 1, "both blocks run the same code"


FIRST: dict[str, Callable[[PackedTensor], PackedTensor]] = {
    "same_axis": lambda x: x * 2,
    "derived_axis": lambda x: x[:, 1:],
    "pair": lambda x: x[:, :, None] * x[:, None],
}


@pytest.mark.parametrize("name", list(FIRST))
def test_what_leaves_a_graph_enters_the_next_as_one_graph(name: str) -> None:
    first, second = compiled(FIRST[name], "eager"), compiled(lambda y: (y + y[:, 1:].sum()).mean(1), "eager")
    for lengths in ([4, 6, 3], [4, 4], [7], [5, 3, 6, 4]):
        (x,) = ops.mark_dynamic(pack(make(lengths, dtype=torch.float32)))
        got = second(first(x))
        y = FIRST[name](x)
        torch.testing.assert_close(results(got), results((y + y[:, 1:].sum()).mean(1)))
    assert graphs() == 2


def test_backward_from_two_packed_outputs_of_one_graph() -> None:
    def fn(x: PackedTensor) -> tuple[PackedTensor, PackedTensor]:
        return (x[:, :, None] * x[:, None]).sum(2), x.exp()[:, 1:]

    program = compiled(fn)
    for lengths in ([4, 6, 3], [4, 4], [5, 0, 6, 4]):
        grads = []
        for run in (program, fn):
            (x,) = marked(PROGRAMS["square"], lengths)
            a, b = run(x)
            (a.square().sum((0, 1)).sum() + (b.amax(-1) * 3).sum()).backward()
            grads.append(x.grad.values)
        torch.testing.assert_close(*grads)
    assert graphs() == 1


CHANGES: dict[str, Callable[[PackedTensor], Any]] = {
    "one_more_rank": lambda x: x[:, :, None] * x[:, None],
    "one_rank_less": lambda x: x.sum(-1),
    "positions_first": lambda x: (x * 2).transpose(0, 1),
    "channels_first": lambda x: (x * 2).movedim(-1, 1),
    "heads": lambda x: x.unflatten(-1, (2, 2)).transpose(1, 2),
    "rows": lambda x: x.flatten(0, 1).tanh(),
    "pair_flattened": lambda x: (x[:, :, None] * x[:, None]).flatten(1, 2),
    "sliced": lambda x: (x[:, 1:], x[:, :-1]),
    "nested": lambda x: {"packed": [x * 2], "dense": x.sum(1)},
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_results_of_another_rank_or_layout_leave_a_graph(name: str) -> None:
    program = compiled(CHANGES[name])
    for lengths in ([4, 6, 3], [4, 4], [7], [5, 2, 6, 4]):
        (x,) = pack(make(lengths, dtype=torch.float32))
        got, want = program(ops.mark_dynamic(x)), CHANGES[name](x)
        is_leaf = ops.is_packed
        got, want = (torch.utils._pytree.tree_leaves(out, is_leaf=is_leaf) for out in (got, want))
        for a, b in zip(got, want, strict=True):
            assert type(a) is type(b) and a.shape == b.shape
            if ops.is_packed(b):
                assert a.order == b.order and [x.lengths.tolist() for x in a.axes] == [
                    x.lengths.tolist() for x in b.axes
                ]
            torch.testing.assert_close(results(a), results(b))
    assert graphs() == 1


JOINED: dict[str, Callable[[PackedTensor, PackedTensor], PackedTensor]] = {
    "cat of a tuple": lambda x, y: torch.cat((x * 2, y), -1),
    "cat of a list": lambda x, y: torch.cat([x * 2, y], -1),
    "stack of a tuple": lambda x, y: torch.stack((x * 2, y)),
    "stack of a list": lambda x, y: torch.stack([x * 2, y]),
}


@pytest.mark.parametrize("name", list(JOINED))
def test_operands_in_a_tuple_or_a_list_are_joined_in_a_graph(name: str) -> None:
    program = JOINED[name]
    fn = compiled(program, "eager")
    for lengths in ([4, 6, 3], [4, 4], [7], [5, 3, 0, 4]):
        x, y = ops.mark_dynamic(pack(make(lengths, dtype=torch.float32), make(lengths, dtype=torch.float32)))
        torch.testing.assert_close(results(fn(x, y)), results(program(x, y)))
    assert graphs() == 1

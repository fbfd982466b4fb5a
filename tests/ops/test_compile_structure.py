"""Structures in graphs: maps delivered or built, caches, checks, memory, export."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import ops
from ops import Axis, Grid, PackedTensor
from ops.testing import pack
from tests.ops.programs import PROGRAMS, Encoder, SquarePair, operands, results, train
from tests.strategies import make

CLOSE = {"rtol": 1e-4, "atol": 1e-4, "equal_nan": True}
BATCHES = ([4, 6, 3], [4, 4], [7], [5, 2, 6, 4])


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


class Recorder:
    """A backend that notes which of the package's operators stand in the graphs it is given."""

    def __init__(self) -> None:
        self.operators: list[str] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        for node in module.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "packed":
                self.operators.append(node.target._opname)
        return module.forward


def compiled(fn: Any, backend: Any = "aot_eager") -> Any:
    return torch.compile(fn, fullgraph=True, backend=backend)


def single(lengths: list[int], seed: int = 0) -> PackedTensor:
    (x,) = pack(make(lengths, dtype=torch.float32, seed=seed))
    return x


# ---------------------------------------------------------------- maps


#: What is derived in each is in the name.
DERIVING: dict[str, Callable[[PackedTensor], Any]] = {
    "slice": lambda x: x[:, 1:] * x[:, :-1],
    "slice_of_a_slice": lambda x: x[:, 1:][:, 1:].sum(1),
    "stride": lambda x: x[:, ::2].exp(),
    "strided_slice": lambda x: x[:, 1::2].exp(),
    "pair": lambda x: (x[:, :, None] * x[:, None]).mean(2),
    "pair_of_slices": lambda x: (x[:, 1:, None] * x[:, None, :-1]).mean(1),
    "rectangular_pair_of_slices": lambda x: (x[:, :, None] * x[:, None, 1:]).sum((1, 2)),
    "transposed_pair": lambda x: (p := x[:, :, None] - 2 * x[:, None]) + p.transpose(1, 2),
    "flattened_pair": lambda x: (x[:, :, None] * x[:, None]).flatten(1, 2).softmax(-1).sum(1),
    "positions": lambda x: x + torch.arange(48.0).view(12, 4)[: x.shape[1]],
}
CHECKS = {"check_same", "check_longer", "check_inside"}


@pytest.mark.parametrize("name", list(DERIVING))
def test_what_was_delivered_is_read_and_not_built_in_a_graph(name: str) -> None:
    fn = DERIVING[name]
    built, read = Recorder(), Recorder()
    building, reading = compiled(fn, built), compiled(fn, read)
    for lengths in BATCHES:
        want = results(fn(single(lengths)))
        x = single(lengths)
        fn(x)
        torch.testing.assert_close(results(reading(ops.mark_dynamic(ops.deliver(x)))), want, **CLOSE)
        torch.testing.assert_close(results(building(ops.mark_dynamic(single(lengths)))), want, **CLOSE)
    assert graphs() == 2
    structural = {"derive", "product", "grid_map", "ranges", "sample_ids", "positions", "splits", "invert"}
    assert structural & set(built.operators)
    assert not structural & set(read.operators)


def test_gradients_through_delivered_and_built_maps_agree() -> None:
    model = SquarePair()
    fn = compiled(model)
    for lengths in BATCHES:
        built, delivered = (operands(PROGRAMS["square"], lengths)[0] for _ in range(2))
        model(delivered).sum((0, 1))
        found = [train(fn, model, [ops.mark_dynamic(x)]) for x in (built, ops.deliver(delivered))]
        torch.testing.assert_close(*found, **CLOSE)
    assert graphs() == 2


def test_maps_given_to_an_axis_are_read() -> None:
    recorder = Recorder()
    fn = compiled(lambda x: x.to_padded(), recorder)
    for lengths in BATCHES:
        plain = single(lengths)
        axis = plain.axes[0]
        maps = {"sample_ids": axis.sample_ids.clone(), "positions": axis.positions.clone()}
        x = PackedTensor(plain.values, Grid((Axis(lengths, maps=maps),)), plain.order)
        torch.testing.assert_close(fn(ops.mark_dynamic(x)), plain.to_padded())
    assert graphs() == 1 and not recorder.operators


def test_what_was_delivered_moves_and_is_pickled_along() -> None:
    import pickle

    for carry in (lambda x: x.clone(), lambda x: x.double().float(), lambda x: pickle.loads(pickle.dumps(x))):
        recorder = Recorder()
        fn = compiled(DERIVING["pair"], recorder)
        for lengths in BATCHES:
            x = single(lengths)
            want = DERIVING["pair"](x).values
            torch.testing.assert_close(fn(carry(ops.mark_dynamic(ops.deliver(x)))).values, want)
        assert set(recorder.operators) <= {"sum_rows"}


def test_delivered_structures_keep_no_batch_alive() -> None:
    x = single([3, 2])
    DERIVING["pair"](x), DERIVING["slice"](x)
    ops.deliver(x)
    gc.collect()
    gc.disable()
    try:
        before = _live_axes()
        del x
        assert _live_axes() < before
    finally:
        gc.enable()


def _live_axes() -> int:
    return sum(type(one) is Axis for one in gc.get_objects())


# ---------------------------------------------------------------- caches


@pytest.mark.parametrize("reentrant_twin", ["plain", "checkpointed"])
def test_caches_warm_and_cold_are_one_graph(reentrant_twin: str) -> None:
    model = SquarePair()

    def forward(x: PackedTensor) -> PackedTensor:
        if reentrant_twin == "plain":
            return model(x)
        return checkpoint(model, x, use_reentrant=False)

    fn = compiled(forward)
    for lengths in BATCHES:
        want = train(model, model, operands(PROGRAMS["square"], lengths))
        for warm in (False, True):
            (x,) = ops.mark_dynamic(operands(PROGRAMS["square"], lengths))
            if warm:
                model(x)
            torch.testing.assert_close(train(fn, model, [x]), want, **CLOSE)
            x.grad = None
            torch.testing.assert_close(train(fn, model, [x]), want, **CLOSE)
    assert graphs() == 1


def test_checkpointing_around_a_compiled_block_gives_the_same_gradients() -> None:
    model = SquarePair()
    block = compiled(model)
    for lengths in BATCHES:
        (x,) = ops.mark_dynamic(operands(PROGRAMS["square"], lengths))
        got = train(lambda x: checkpoint(block, x * 1, use_reentrant=False), model, [x])
        want = train(lambda x: model(x * 1), model, operands(PROGRAMS["square"], lengths))
        torch.testing.assert_close(got, want, **CLOSE)
    assert graphs() == 1


# ---------------------------------------------------------------- checks


@pytest.mark.parametrize(
    ("backend", "training"),
    [
        ("aot_eager", True),
        ("aot_eager", False),
        pytest.param("inductor", True, marks=pytest.mark.slow),
        ("inductor", False),
    ],
)
def test_a_program_that_returns_values_only_still_checks_structures(backend: str, training: bool) -> None:
    fn = compiled(lambda x, y: (x + y).values, backend)

    def fields(n: list[int], m: list[int]) -> list[PackedTensor]:
        pair = [single(n).requires_grad_(training), single(m).requires_grad_(training)]
        return ops.mark_dynamic(pair)

    x, y = fields([3, 1, 5], [3, 1, 5])
    torch.testing.assert_close(fn(x, y), x.values + y.values)
    for n, m in (([3, 0, 5], [0, 3, 5]), ([4, 4], [5, 3])):
        with pytest.raises(ValueError, match="structures differ"):
            fn(*fields(n, m))


def test_checks_hold_for_axes_that_are_the_same_object_and_for_axes_that_are_not() -> None:
    """A graph made for either serves the other, and refuses what disagrees."""
    for shared_first in (True, False):
        torch._dynamo.reset()
        fn = compiled(lambda x, y: (x * y).values)
        for shared in (shared_first, not shared_first, shared_first):
            x, y = pack(make([3, 2]), make([3, 2], seed=1), share=shared)
            torch.testing.assert_close(fn(*ops.mark_dynamic([x, y])), x.values * y.values)
            with pytest.raises((RuntimeError, ValueError)):
                fn(*ops.mark_dynamic([single([3, 2]).double(), single([2, 3]).double()]))


def test_batches_of_different_size_meet_under_different_names() -> None:
    fn = compiled(lambda x, y: x.sum(1).sum(0) + y.sum(1).sum(0))
    for n, m in (([3, 1], [2, 2, 4]), ([2], [5, 1]), ([4, 4], [6])):
        x, y = ops.mark_dynamic(single(n), batch="anchors"), ops.mark_dynamic(single(m), batch="candidates")
        torch.testing.assert_close(fn(x, y), x.values.sum(0) + y.values.sum(0))
    assert graphs() == 1


def test_a_tree_of_two_batch_sizes_is_refused() -> None:
    with pytest.raises(ValueError, match="batch sizes"):
        ops.mark_dynamic([single([3]), single([3, 1])])


# ---------------------------------------------------------------- many batches


def _train_on_many(count: int, backend: str) -> tuple[list[int], list[int]]:
    """Live axes and peak memory in kilobytes, five times on the way."""
    model = nn.Sequential(Encoder(), nn.Linear(8, 4), SquarePair())
    fn = compiled(model, backend)
    generator = torch.Generator().manual_seed(0)
    axes, memory = [], []
    for step in range(count):
        size = int(torch.randint(1, 6, (), generator=generator))
        lengths = torch.randint(0, 12, (size,), generator=generator).tolist()
        lengths[0] = max(lengths[0], 2)
        train(fn, model, ops.mark_dynamic(operands(PROGRAMS["square"], lengths)))
        if (step + 1) % (count // 5) == 0:
            gc.collect()
            axes.append(_live_axes())
            memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return axes, memory


def test_fifty_batches_leave_one_graph_and_no_axes_behind() -> None:
    axes, _ = _train_on_many(50, "aot_eager")
    assert graphs() == 1 and not counters["recompiles"]
    assert axes[-1] <= axes[0]


@pytest.mark.slow
def test_three_hundred_batches_leave_one_graph_no_axes_and_no_memory_behind() -> None:
    axes, memory = _train_on_many(300, "inductor")
    assert graphs() == 1 and not counters["recompiles"]
    assert axes[-1] <= axes[0]
    assert memory[-1] - memory[1] < 8 * 1024, f"peak memory in kB, every 60 batches: {memory}"


# ---------------------------------------------------------------- export


class Pooled(nn.Module):
    """A small model of one packed input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: PackedTensor) -> Tensor:
        return self.down(torch.relu(self.up(x)).sum(1))


@pytest.mark.parametrize("model", [Pooled, SquarePair], ids=["pooled", "pair"])
def test_a_packed_module_is_exported_for_any_lengths(model: type[nn.Module]) -> None:
    module = model().eval()
    x = single([3, 5, 2])
    program = torch.export.export(module, (x,), dynamic_shapes=(ops.dynamic_shapes(x),), strict=False)
    for lengths in ([3, 5, 2], [4, 4], [7, 2, 6, 4]):
        y = single(lengths)
        torch.testing.assert_close(results(program.module()(y)), results(module(y)))

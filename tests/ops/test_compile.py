from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import ops
from ops import PackedTensor
from ops.testing import pack
from tests.strategies import make

#: Lengths and batch sizes that differ: one sample, an empty one, equal lengths, lengths of one.
BATCHES = ([3, 5, 2], [4, 4], [6], [3, 0, 5], [7, 2, 1, 4], [2, 2, 2], [1, 6], [5, 9, 3, 3, 8])
BACKEND = "aot_eager"
CLASSES = 3


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def compiled(fn: Callable, backend: str = BACKEND) -> Callable:
    return torch.compile(fn, fullgraph=True, backend=backend)


class Classifier(nn.Module):
    """Embedding, unmodified encoder, mean over positions, linear."""

    inputs = "n"
    dtype = torch.int64

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(6, 8)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids: PackedTensor) -> Tensor:
        return self.head(self.encoder(self.embedding(ids)).mean(1))


class PairProgram(nn.Module):
    """Single to pair to single."""

    inputs = "n 4"
    dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.u, self.v, self.h, self.g = (nn.Linear(4, 4) for _ in range(4))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: PackedTensor) -> PackedTensor:
        p = self.u(x)[:, :, None] + self.v(x)[:, None, :]
        p = p + self.h(self.norm(p))
        return x + self.g(p.mean(2))


class Mixture(nn.Module):
    """Slices, rows, heads, positions, losses: the rest of the rules in one graph."""

    inputs = "n 4"
    dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 12, 4))
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: PackedTensor) -> Tensor:
        x = x + self.table[:, : x.shape[1]]
        delta = x[:, 1:] - x[:, :-1]
        rows = self.down(F.gelu(self.up(x.flatten(0, 1)))).view(*x.shape)
        q = rows.view(*x.shape[:2], 2, 2).transpose(1, 2)
        x = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
        return x.sum(1) + delta.sum(1) + (x - x.mean(1, keepdim=True)).square().sum((0, 1))


MODELS = {"classifier": Classifier, "pair": PairProgram, "mixture": Mixture}
EACH_MODEL = pytest.mark.parametrize("kind", list(MODELS.values()), ids=list(MODELS))


def batch_for(model: nn.Module, lengths: list[int]) -> PackedTensor:
    samples = make(lengths, model.inputs, dtype=model.dtype).samples
    x = PackedTensor.from_list(list(samples), model.inputs)
    return x.requires_grad_() if x.is_floating_point() else x


def result_of(out: PackedTensor | Tensor) -> Tensor:
    return out.values if isinstance(out, PackedTensor) else out


def step(fn: Callable, model: nn.Module, x: PackedTensor) -> list[Tensor]:
    """Forward and backward; the output and all gradients. Means of empty samples count as 0."""
    model.zero_grad()
    out = result_of(fn(x))
    out.nan_to_num().square().sum().backward()
    grads = [p.grad for p in model.parameters()]
    return [out.detach(), *grads, *([x.grad.values] if x.requires_grad else [])]


def compare(fn: Callable, model: nn.Module, lengths: list[int], warm: bool = False) -> None:
    x, y = batch_for(model, lengths), batch_for(model, lengths)
    if warm:
        result_of(model(x)).sum()
    got = step(fn, model, ops.mark_dynamic(x))
    torch.testing.assert_close(got, step(model, model, y), equal_nan=True, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- one graph


@EACH_MODEL
def test_one_graph_serves_batches_of_any_lengths_and_sizes(kind: type[nn.Module]) -> None:
    model = kind()
    fn = compiled(model)
    for lengths in BATCHES:
        compare(fn, model, lengths)
    assert graphs() == 1
    assert not counters["recompiles"]


@EACH_MODEL
@pytest.mark.parametrize("first", [[4, 4], [6], [0, 3], [3, 3, 3]], ids=str)
@pytest.mark.slow
def test_one_graph_whatever_batch_comes_first(kind: type[nn.Module], first: list[int]) -> None:
    model = kind()
    fn = compiled(model)
    for lengths in (first, *BATCHES[:4]):
        compare(fn, model, lengths)
    assert graphs() == 1


@EACH_MODEL
def test_a_maximum_of_one_costs_one_more_graph_at_most(kind: type[nn.Module]) -> None:
    model = kind()
    fn = compiled(model)
    for lengths in ([3, 5], [1, 1], [1], [1, 1, 1], [1, 0], [2, 6, 4]):
        compare(fn, model, lengths)
    assert graphs() <= 2


@EACH_MODEL
def test_the_same_batch_twice_and_a_batch_warm_from_eager_are_one_graph(kind: type[nn.Module]) -> None:
    model = kind()
    fn = compiled(model)
    x = ops.mark_dynamic(batch_for(model, [3, 5, 2]))
    first = result_of(fn(x)).detach()
    torch.testing.assert_close(result_of(fn(x)), first)
    result_of(model(x))
    torch.testing.assert_close(result_of(fn(x)), first)
    compare(fn, model, [4, 1], warm=True)
    compare(fn, model, [2, 0, 2], warm=True)
    assert graphs() == 1


@pytest.mark.parametrize("kind", [Classifier, PairProgram], ids=["classifier", "pair"])
@pytest.mark.slow
def test_the_default_backend_serves_the_same_batches_with_one_graph(kind: type[nn.Module]) -> None:
    model = kind()
    fn = compiled(model, "inductor")
    for lengths in BATCHES:
        compare(fn, model, lengths)
    assert graphs() == 1


def test_the_default_backend_trains_the_pair_program() -> None:
    model = PairProgram()
    fn = compiled(model, "inductor")
    for lengths in ([3, 5, 2], [3, 0, 5, 4]):
        compare(fn, model, lengths)
    assert graphs() == 1


# ---------------------------------------------------------------- rules one by one


PROGRAMS: dict[str, Callable[[PackedTensor], Any]] = {
    "pointwise": lambda x: (x + x).relu() * 2 - x / 3,
    "dense_by_feature": lambda x: x + torch.arange(4.0),
    "square_pair": lambda x: x[:, :, None] * x[:, None],
    "transposed_pair": lambda x: (p := x[:, :, None] + 2 * x[:, None]) + p.transpose(1, 2),
    "softmax": lambda x: x.softmax(-1),
    "sums": lambda x: x.sum(1) + x.mean((1, 2), keepdim=True)[:, 0] + x.sum((0, 1)),
    "peak": lambda x: (x[:, :, None] + x[:, None]).amax(-1),
    "slices": lambda x: x[:, 1:] * x[:, :-1],
    "strides": lambda x: x[:, ::2] + x[:, ::2],
    "cap": lambda x: x[:, :3],
    "heads": lambda x: x.view(*x.shape[:2], 2, 2).transpose(1, 2).mul(2).transpose(1, 2).flatten(2),
    "rows": lambda x: x.flatten(0, 1).tanh().view(*x.shape),
    "flattened_pair": lambda x: (x[:, :, None] + x[:, None]).flatten(1, 2).sum(1),
    "in_place": lambda x: (x * 1).add_(x).mul_(2),
    "flatten_nothing": lambda x: x.flatten(1, 1).flatten(2),
    "unsqueeze": lambda x: x.unsqueeze(1).permute(0, 2, 1, 3).squeeze(2),
    "loss": lambda x: F.mse_loss(x, x * 2) + F.cross_entropy(x.view(-1, 4), (x.sum(-1) > 0).long().view(-1)),
    "padded": lambda x: x.to_padded(1.0) * x.mask()[..., None],
    "cast": lambda x: x.to(torch.float64).sum(1) + x.double().sum(1),
    "hard": lambda x: F.hardswish(x) + F.hardsigmoid(x),
    "scalar_first": lambda x: (1 - x) * (2 / (x.abs() + 1)) + 2**x,
    "dense_first": lambda x: torch.ones(4) - x + torch.ones(4) / (x.abs() + 1) + torch.ones(4) ** x,
    "reduced_first": lambda x: x.mean(1, keepdim=True) - x,
    "compared": lambda x: torch.where((x > 0) & torch.logical_not(x > 1) | (x == 0), x, -x),
    "inverted": lambda x: torch.where(~(x > 0), x, -x),
    "last_position": lambda x: (x[:, :, None] + x[:, None])[:, :, :1].sum(2),
    "whole": lambda x: x.mean() + x.amax((0, 1)) + x.sum(),
    "rows_with_linear": lambda x: F.linear(x.view(-1, 4), torch.ones(3, 4)).view(*x.shape[:2], 3),
    "by_batch_size": lambda x: x.sum() / x.shape[0] + x.sum() / x.numel(),
    "causal": lambda x: F.scaled_dot_product_attention(*[x[:, None]] * 3, is_causal=True),
}


#: Dynamo before 2.14 traces ``~`` of no object of a user's class.
TRACES_INVERT = torch.__version__ >= torch.torch_version.TorchVersion("2.14")
TRACED = [name for name in PROGRAMS if name != "inverted" or TRACES_INVERT]


@pytest.mark.parametrize("name", TRACED)
def test_every_rule_compiles_to_one_graph(name: str) -> None:
    class Program(nn.Module):
        inputs, dtype = "n 4", torch.float32

        def forward(self, x: PackedTensor) -> Any:
            return PROGRAMS[name](x)

    model = Program()
    fn = compiled(model)
    for lengths in ([3, 5, 2], [4, 4], [6], [3, 0, 5, 1]):
        compare(fn, model, lengths)
    assert graphs() == 1


def test_dense_inputs_marked_with_the_batch_are_one_graph() -> None:
    def fn(fields: dict[str, Any]) -> Tensor:
        x = fields["x"] + fields["by_sample"][:, None]
        return F.cross_entropy(x.mean(1), fields["labels"])

    program = compiled(fn)
    for lengths in ([3, 5, 2], [4, 4], [6], [3, 2, 5, 1]):
        x = batch_for(PairProgram(), lengths)
        fields = {
            "x": x,
            "by_sample": torch.randn(len(lengths), 4),
            "labels": torch.zeros(len(lengths), dtype=torch.long),
        }
        assert ops.mark_dynamic(fields) is fields
        torch.testing.assert_close(program(fields), fn(fields))
    assert graphs() == 1


def test_two_fields_of_one_loader_batch() -> None:
    """Fields that share axes, and a pair field over the same axis."""

    def fn(x: PackedTensor, y: PackedTensor, pair: PackedTensor) -> PackedTensor:
        return (x[:, :, None] + y[:, None] + pair).mean(2)

    program = compiled(fn)
    for lengths in ([3, 5, 2], [4, 4], [6], [3, 0, 5, 1]):
        fields = pack(make(lengths), make(lengths, seed=1), make(lengths, "n n 4", seed=2))
        ops.mark_dynamic(fields)
        torch.testing.assert_close(program(*fields).values, fn(*fields).values, equal_nan=True)
    assert graphs() == 1


def test_channels_first_elements_of_equal_and_differing_lengths_are_one_graph() -> None:
    """Case 1: axis 1 of elements (4, L) is ragged for lengths [7, 7], then [7], then [7, 5]."""

    def fn(x: PackedTensor) -> PackedTensor:
        return (x - x.mean(2, keepdim=True)).relu()

    program = compiled(fn)
    for lengths in ([7, 7], [7], [7, 5]):
        x = PackedTensor.from_list([torch.randn(4, n) for n in lengths], "4 n")
        out = program(ops.mark_dynamic(x))
        assert out.order == x.order
        torch.testing.assert_close(out.values, fn(x).values)
    assert graphs() == 1


def test_rectangular_pairs_are_one_graph() -> None:
    def fn(x: PackedTensor, y: PackedTensor) -> PackedTensor:
        return (x[:, :, None] * y[:, None]).sum(2)

    program = compiled(fn)
    for n, m in (([3, 5, 2], [1, 2, 4]), ([4, 4], [4, 4]), ([6], [2]), ([3, 0, 5], [0, 2, 3])):
        fields = pack(make({"n": n}, "n 4"), make({"m": m}, "m 4", seed=1))
        ops.mark_dynamic(fields)
        torch.testing.assert_close(program(*fields).values, fn(*fields).values)
    assert graphs() == 1


def test_inference_compiles_to_one_graph() -> None:
    model = Classifier().eval()
    fn = compiled(model)
    for lengths in ([3, 5, 2], [4, 4], [6], [3, 1, 5, 1]):
        x = batch_for(model, lengths)
        with torch.no_grad():
            torch.testing.assert_close(fn(ops.mark_dynamic(x)), model(x), rtol=1e-4, atol=1e-5)
    assert graphs() == 1


def test_dropout_trains_in_one_graph() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.Dropout(0.5), nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    )
    fn = compiled(model)
    for lengths in ([3, 5, 2], [4, 4], [6], [3, 0, 5, 1]):
        x = ops.mark_dynamic(batch_for(PairProgram(), lengths))
        model.zero_grad()
        fn(x).sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        assert not torch.equal(fn(x).values, fn(x).values)
    assert graphs() == 1


# ---------------------------------------------------------------- outputs


def test_a_packed_output_feeds_an_eager_loss_with_gradient() -> None:
    model = PairProgram()
    fn = compiled(model)
    grads = []
    for forward in (fn, model):
        x = ops.mark_dynamic(batch_for(model, [3, 2, 5]))
        model.zero_grad()
        out = forward(x)
        assert ops.is_packed(out)
        (out[:, 1:] - x[:, :-1]).square().mean().backward()
        grads.append([x.grad.values, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*grads)


def test_an_output_of_one_graph_feeds_the_next() -> None:
    first, second = compiled(lambda x: x[:, 1:]), compiled(lambda y: (y * 2).sum(1))
    for lengths in ([3, 5, 2], [4, 4], [6, 1, 1, 3]):
        x = ops.mark_dynamic(batch_for(PairProgram(), lengths))
        torch.testing.assert_close(second(first(x)), (x[:, 1:] * 2).sum(1))
    assert graphs() <= 3


def test_marks_survive_eager_operators() -> None:
    fn = compiled(lambda x: (x[:, :, None] + x[:, None]).mean(2))
    for lengths in ([3, 5, 2], [4, 4], [6], [3, 1, 5, 1]):
        x = ops.mark_dynamic(batch_for(PairProgram(), lengths)) * 2
        torch.testing.assert_close(fn(x).values, (x[:, :, None] + x[:, None]).mean(2).values)
    assert graphs() == 1


def test_an_unmarked_batch_compiles_too() -> None:
    model = PairProgram()
    fn = compiled(model)
    for lengths in ([3, 5, 2], [4, 4], [6, 2, 2, 7]):
        x = batch_for(model, lengths)
        torch.testing.assert_close(fn(x).values, model(x).values, rtol=1e-4, atol=1e-5)
    assert graphs() <= 3


# ---------------------------------------------------------------- structures that differ


MISMATCHES: dict[str, Callable] = {
    "values": lambda x, y: (x + y).values,
    "total": lambda x, y: (x + y).values.sum(),
    "packed": lambda x, y: x + y,
    "pair": lambda x, y: x[:, :, None] + (y[:, :, None] + y[:, None]),
    "loss": lambda x, y: F.mse_loss(x, y),
}


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, BACKEND) for name in MISMATCHES), ("values", "inductor"), ("total", "inductor")],
)
def test_a_mismatch_inside_a_graph_raises_when_it_runs(name: str, backend: str) -> None:
    fn = MISMATCHES[name]
    program = compiled(fn, backend)

    def fields(n: list[int], m: list[int]) -> Any:
        return ops.mark_dynamic([batch_for(PairProgram(), lengths) for lengths in (n, m)])

    agreeing = fields([3, 1, 5], [3, 1, 5])
    torch.testing.assert_close(result_of(program(*agreeing)), result_of(fn(*agreeing)))
    for n, m in (([3, 0, 5], [0, 3, 5]), ([4, 4], [5, 3]), ([2, 2, 2], [3, 3])):
        with pytest.raises((RuntimeError, ValueError)):
            program(*fields(n, m))
    again = fields([2, 6], [2, 6])
    torch.testing.assert_close(result_of(program(*again)), result_of(fn(*again)))


def test_a_program_made_for_one_axis_serves_two_that_agree_and_refuses_two_that_do_not() -> None:
    """Identity of axes is not guarded: both branches have to be right."""
    program = compiled(lambda x, y: (x + y).values)
    for first_shared in (True, False):
        torch._dynamo.reset()
        for share in (first_shared, not first_shared):
            x, y = pack(make([3, 2, 5]), make([3, 2, 5], seed=1), share=share)
            torch.testing.assert_close(program(*ops.mark_dynamic([x, y])), x.values + y.values)
        x, y = pack(make([3, 2, 5]))[0], pack(make([2, 3, 5]))[0]
        with pytest.raises((RuntimeError, ValueError)):
            program(*ops.mark_dynamic([x, y]))


def test_an_index_beyond_a_sample_raises_in_a_graph() -> None:
    program = compiled(lambda x: x[:, -1])
    x = ops.mark_dynamic(batch_for(PairProgram(), [3, 2]))
    torch.testing.assert_close(program(x), x[:, -1])
    with pytest.raises((IndexError, RuntimeError)):
        program(ops.mark_dynamic(batch_for(PairProgram(), [3, 0])))


def test_a_transposed_pair_is_not_added_as_it_lies() -> None:
    def fn(p: PackedTensor) -> Tensor:
        return (p + p.transpose(1, 2)).values

    program = compiled(fn)
    for lengths in ([3, 2, 5], [4, 4], [6]):
        (p,) = pack(make(lengths, "n n 4"))
        torch.testing.assert_close(program(ops.mark_dynamic(p)), fn(p))
    assert graphs() == 1

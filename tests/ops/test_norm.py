from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import ops
from ops import is_packed
from ops.kernels import norm
from ops.testing import Ragged, assert_matches, check, pack, per_sample
from tests.strategies import PROFILES, batches, make

LENGTHS = pytest.mark.parametrize("lengths", list(PROFILES.values()), ids=list(PROFILES))
#: Channels first, then every mix of ragged and static dims.
IMAGES = ("4 n", "4 n n", "4 n m", "4 n 3", "4 3 n", "4 n 2 m")
EACH_PATTERN = pytest.mark.parametrize("pattern", IMAGES)


def double(module: nn.Module) -> nn.Module:
    """In double precision, with parameters that differ from channel to channel."""
    module = module.to(torch.float64)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def of_two(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A per-sample function as in a larger dense batch, where one entry a group is allowed."""
    return lambda x: function(torch.cat([x, x]))[:1] if x.numel() else x


# ---------------------------------------------------------------- layer norm and RMS norm


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 3, 2, 1), (2, 0, 1, 3), (1, 3, 0, 2)], ids=str)
def test_trailing_dims_may_be_stored_anywhere(name: str, order: tuple[int, ...]) -> None:
    function = getattr(F, name)
    for pattern in ("n 3 4", "3 n 4", "4 3 n", "3 4 n"):
        tokens = ["batch", *pattern.split()]
        last = [tokens[d] for d in order]
        shape: list[int] = []
        while last and last[-1].isdigit():
            shape.insert(0, int(last.pop()))
        for count in range(1, len(shape) + 1):
            kept = shape[-count:]
            check(
                lambda x, w, kept=kept: function(x.permute(order), kept, w),
                make([3, 0, 5], pattern),
                torch.randn(kept, dtype=torch.float64),
                batch_dim=order.index(0),
            )


def test_native_layer_norm_gives_its_statistics() -> None:
    weight, bias = torch.randn(2, 4, dtype=torch.float64)
    for part in range(3):
        check(
            lambda x, part=part: torch.native_layer_norm(x, (4,), weight, bias, 1e-5)[part], make([3, 0, 5])
        )


def test_native_dropout_gives_its_mask() -> None:
    (x,) = pack(make([3, 0, 5]))
    out, mask = torch.native_dropout(x, 0.5, True)
    assert_matches(out, [s * 2 * m for s, m in zip(x.to_list(), mask.to_list())])
    assert mask.dtype == torch.bool and mask.grid is x.grid


# ---------------------------------------------------------------- batch norm


def together(batch: Ragged) -> Tensor:
    """By hand: the valid positions of all samples as one dense sample (1, C, positions)."""
    return torch.cat([s.reshape(s.shape[0], -1) for s in batch.samples], 1)[None]


def apart(out: Tensor, batch: Ragged) -> list[Tensor]:
    """The samples of :func:`together`."""
    sizes = [s[0].numel() for s in batch.samples]
    return [part[0].reshape(s.shape) for part, s in zip(out.split(sizes, 2), batch.samples)]


def check_batch_norm(module: nn.Module, batch: Ragged, **kwargs: Any) -> None:
    """Values, gradients and running statistics against one dense sample that holds every position."""
    dense, packed = deepcopy(module), deepcopy(module)
    check_pair(
        packed,
        lambda b: apart(
            F.batch_norm(
                together(b),
                dense.running_mean if dense.track_running_stats or not dense.training else None,
                dense.running_var if dense.track_running_stats or not dense.training else None,
                dense.weight,
                dense.bias,
                dense.training or dense.running_mean is None,
                kwargs.get("momentum", dense.momentum),
                dense.eps,
            ),
            b,
        ),
        batch,
        list(packed.parameters()),
        list(dense.parameters()),
    )
    for name, buffer in packed.named_buffers():
        if name != "num_batches_tracked":
            torch.testing.assert_close(buffer, getattr(dense, name), equal_nan=True)


def check_pair(
    fn: Callable, by_hand: Callable, batch: Ragged, params: list[Tensor], dense_params: list[Tensor]
) -> None:
    """Like :func:`ops.testing.check`, where each side has parameters of its own and runs once."""
    leaves = Ragged([s.clone().requires_grad_() for s in batch.samples], batch.pattern)
    (x,) = pack(batch)
    x.requires_grad_()
    got, want = fn(x), by_hand(leaves)
    assert_matches(got, want)
    cotangents = [torch.randn_like(w) for w in want]
    torch.autograd.backward(got.to_list(), cotangents)
    torch.autograd.backward(want, cotangents)
    for a, b in zip(x.grad.to_list(), leaves.samples):
        torch.testing.assert_close(a, b.grad)
    for p, q in zip(params, dense_params):
        torch.testing.assert_close(p.grad, q.grad)


KINDS = {"n": nn.BatchNorm1d, "n m": nn.BatchNorm2d, "n m k": nn.BatchNorm3d}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_affine": {"affine": False},
    "no_running_stats": {"track_running_stats": False},
    "slow": {"momentum": 0.01, "eps": 1e-2},
}


@LENGTHS
@pytest.mark.parametrize("dims", list(KINDS))
@pytest.mark.parametrize("options", list(OPTIONS.values()), ids=list(OPTIONS))
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_batch_norm_modules(lengths: list[int], dims: str, options: dict[str, Any], training: bool) -> None:
    """Statistics are those of all valid positions, also where a length is the number of channels."""
    batch = make(lengths, f"4 {dims}")
    cells = sum(s[0].numel() for s in batch.samples)
    module = double(KINDS[dims](4, **options)).train(training)
    if cells == 1 and (training or not module.track_running_stats):
        with pytest.raises(ValueError, match="more than 1 value per channel when training"):
            module(pack(batch)[0])
        return
    check_batch_norm(module, batch)


@given(batches(patterns=("4 n 3", "4 3 n", "4 n 2 m"), least=1))
def test_batch_norm_of_any_layout(batch: Ragged) -> None:
    module = double(nn.BatchNorm2d(4) if len(batch.pattern.split()) == 3 else nn.BatchNorm3d(4))
    check_batch_norm(module, batch)


@LENGTHS
def test_batch_norm_of_rows(lengths: list[int]) -> None:
    """(T, C), the rows of all samples; and (B, n, C) by way of a transposition."""
    if sum(lengths) == 1:
        return
    batch = make(lengths)
    dense = Ragged([s.T for s in batch.samples], "4 n")
    for through in (
        lambda x, m: m(x.flatten(0, 1)).view(*x.shape),
        lambda x, m: m(x.transpose(1, 2)).transpose(1, 2),
        lambda x, m: m(x.permute(1, 2, 0)).permute(2, 0, 1),
    ):
        ours, theirs = double(nn.BatchNorm1d(4)), nn.BatchNorm1d(4).double()
        theirs.load_state_dict(ours.state_dict())
        check_pair(
            lambda x, ours=ours, through=through: through(x, ours),
            lambda b, theirs=theirs: (
                [s.T for s in apart(theirs(together(Ragged([s.T for s in b.samples], "4 n"))), dense)]
                if sum(lengths)
                else [s * 1 for s in b.samples]
            ),
            batch,
            list(ours.parameters()) if sum(lengths) else [],
            list(theirs.parameters()),
        )
        torch.testing.assert_close(ours.running_var, theirs.running_var)
        torch.testing.assert_close(ours.running_mean, theirs.running_mean)


def test_a_cumulative_average_of_running_statistics() -> None:
    """momentum=None: the plain mean over the batches seen."""
    module, dense = nn.BatchNorm1d(4, momentum=None).double(), nn.BatchNorm1d(4, momentum=None).double()
    for seed, lengths in enumerate(([3, 5, 1], [2], [4, 0, 4])):
        batch = make(lengths, "4 n", seed=seed)
        assert_matches(module(pack(batch)[0]), apart(dense(together(batch)), batch))
    assert module.num_batches_tracked == 3
    torch.testing.assert_close(module.running_mean, dense.running_mean)
    torch.testing.assert_close(module.running_var, dense.running_var)


def test_statistics_are_not_those_of_a_padded_batch() -> None:
    batch = make([7, 1], "4 n")
    (x,) = pack(batch)
    packed, padded = nn.BatchNorm1d(4).double(), nn.BatchNorm1d(4).double()
    packed(x), padded(x.to_padded())
    assert not torch.allclose(packed.running_var, padded.running_var)


def test_a_batch_of_no_positions_leaves_running_statistics_alone() -> None:
    for lengths in ([0, 0], []):
        module = nn.BatchNorm1d(4).double()
        (x,) = pack(make(lengths, "4 n"))
        assert module(x).numel() == 0
        assert not module.running_mean.any() and (module.running_var == 1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_batch_norm_of_half_precision_has_exact_statistics(dtype: torch.dtype) -> None:
    samples = [(torch.randn(2, n) * 0.1 + 3).to(dtype) for n in (3000, 1, 700)]
    module = nn.BatchNorm1d(2)
    out = module(pack(Ragged(samples, "2 n"))[0])
    exact = together(Ragged([s.double() for s in samples], "2 n"))
    assert out.dtype == dtype
    torch.testing.assert_close(module.running_mean.double(), 0.1 * exact.mean((0, 2)), rtol=1e-4, atol=0)
    torch.testing.assert_close(module.running_var.double(), 0.9 + 0.1 * exact.var((0, 2)), rtol=1e-5, atol=0)


def test_synchronised_batch_norm_of_one_process() -> None:
    batch = make([3, 0, 5], "4 n")
    check_batch_norm(double(nn.SyncBatchNorm(4)), batch)
    check_batch_norm(double(nn.SyncBatchNorm(4)).eval(), batch)


def test_synchronised_batch_norm_across_processes_sees_payloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collective part needs accelerators; it is handed the payload, and its gradient arrives."""

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor, *rest: Any) -> Tensor:
            assert input.shape == (8 * 3, 4) and rest[-1] == 2
            ctx.save_for_backward(weight)
            return input * weight + bias

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad * ctx.saved_tensors[0], None, None, *[None] * 6

    monkeypatch.setattr(ops.compat.Synchronised, "function", Recorded)
    weight, bias = torch.randn(2, 4, dtype=torch.float64)

    def rule(x: Any) -> Any:
        return nn.modules.batchnorm.sync_batch_norm.apply(x, weight, bias, None, None, 1e-5, 0.1, None, 2)

    check(
        rule,
        make({"n": [3, 0, 5], "m": [3, 0, 3]}, "4 n m"),
        reference=lambda b: [s * weight.view(4, 1, 1) + bias.view(4, 1, 1) for s in b.samples],
    )
    assert torch.equal(rule(torch.ones(24, 4).double()), (weight + bias).expand(24, 4))


@pytest.mark.parametrize("training", [True, False])
def test_torch_spells_its_arguments_in_another_order(training: bool) -> None:
    weight, bias = torch.randn(2, 4, dtype=torch.float64)
    mean, var = torch.randn(4, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    batch = make([3, 2, 5], "4 n")
    arguments = lambda: (weight, bias, mean.clone(), var.clone(), training, 0.1, 1e-5, False)  # noqa: E731
    check(
        lambda x: torch.batch_norm(x, *arguments()),
        batch,
        reference=lambda b: apart(torch.batch_norm(together(b), *arguments()), b),
    )
    check(lambda x: torch.instance_norm(x, *arguments()), batch)
    check(lambda x: torch.group_norm(x, 2, weight, bias, 1e-5, False), batch)


# ---------------------------------------------------------------- group norm


@LENGTHS
@EACH_PATTERN
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_group_norm(lengths: list[int], pattern: str, groups: int) -> None:
    module = double(nn.GroupNorm(groups, 4))
    check(
        module,
        make(lengths, pattern),
        reference=lambda b: per_sample(of_two(module), b),
        params=module.parameters(),
    )


@pytest.mark.parametrize("groups", [1, 2])
@given(batches(patterns=IMAGES))
def test_group_norm_of_any_batch(groups: int, batch: Ragged) -> None:
    check(
        lambda x: F.group_norm(x, groups),
        batch,
        reference=lambda b: per_sample(of_two(lambda x: F.group_norm(x, groups)), b),
    )


def test_a_row_is_a_sample_to_group_norm() -> None:
    module = double(nn.GroupNorm(2, 4))
    check(
        lambda x: module(x.flatten(0, 1)).view(*x.shape),
        make([3, 0, 5]),
        reference=lambda b: [module(s) if len(s) else s for s in b.samples],
        params=module.parameters(),
    )


def test_group_norm_after_permutations() -> None:
    module = double(nn.GroupNorm(2, 4))
    check(lambda x: module(x.transpose(1, 2)), make([3, 0, 5]), reference=lambda b: [
        of_two(module)(s.T[None])[0] for s in b.samples
    ], params=module.parameters())  # fmt: skip
    check(lambda x: module(x.permute(0, 3, 2, 1)), make([3, 2, 5], "n m 4"), params=module.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_group_norm_of_half_precision_is_computed_in_single(dtype: torch.dtype) -> None:
    samples = [(torch.randn(4, n) + 20).to(dtype) for n in (3000, 2, 70)]
    (x,) = pack(Ragged(samples, "4 n"))
    for kind in (dtype, torch.float32):
        weight, bias = torch.randn(2, 4).to(kind)
        out = F.group_norm(x, 2, weight, bias)
        assert out.dtype == dtype
        for got, sample in zip(out.to_list(), samples):
            exact = F.group_norm(sample[None].double(), 2, weight.double(), bias.double())[0]
            torch.testing.assert_close(got.double(), exact, rtol=2e-2, atol=2e-2)


def test_a_sample_does_not_see_the_others() -> None:
    samples = [torch.randn(4, n) for n in (3, 5)]
    (x,), (y,) = pack(Ragged(samples, "4 n")), pack(Ragged([samples[0], samples[1] * 100], "4 n"))
    assert torch.equal(F.group_norm(x, 2).to_list()[0], F.group_norm(y, 2).to_list()[0])


def test_the_kernel_is_twice_differentiable() -> None:
    splits, index = torch.tensor([0, 3, 3, 7]).int(), torch.tensor([0, 0, 0, 2, 2, 2, 2]).int()
    values = torch.randn(7, 2, 3, dtype=torch.float64, requires_grad=True)

    def function(x: Tensor) -> Any:
        return norm.normalize_rows(x, index, None, splits, 3, 1e-5)

    assert torch.autograd.gradcheck(function, values)
    assert torch.autograd.gradgradcheck(function, values)


# ---------------------------------------------------------------- instance norm

INSTANCE = {"n": nn.InstanceNorm1d, "n m": nn.InstanceNorm2d, "n m k": nn.InstanceNorm3d}


@pytest.mark.parametrize("lengths", [[3, 5, 2], [4, 4], [6], [3, 0, 5]], ids=str)
@pytest.mark.parametrize("dims", list(INSTANCE))
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_instance_norm_modules(lengths: list[int], dims: str, affine: bool) -> None:
    module = double(INSTANCE[dims](4, affine=affine))
    check(
        module,
        make(lengths, f"4 {dims}"),
        reference=lambda b: [module(s[None])[0] if s.numel() else s * 1 for s in b.samples],
        params=module.parameters(),
    )


@pytest.mark.parametrize("lengths", [[3, 5, 2], [4, 4], [3, 0, 5]], ids=str)
def test_running_statistics_of_instance_norm_are_means_over_samples(lengths: list[int]) -> None:
    """Each sample's own statistics, of equal weight; an empty sample has none."""
    module = double(nn.InstanceNorm1d(4, affine=True, track_running_stats=True, momentum=0.3))
    batch = make(lengths, "4 n")
    filled = [s for s in batch.samples if s.numel()]
    module(pack(batch)[0])
    mean = torch.stack([s.mean(1) for s in filled]).mean(0)
    var = torch.stack([s.var(1) for s in filled]).mean(0)
    torch.testing.assert_close(module.running_mean, 0.3 * mean)
    torch.testing.assert_close(module.running_var, 0.7 + 0.3 * var)
    module.eval()
    check(module, batch, params=module.parameters())


def test_running_statistics_of_equal_samples_are_those_of_the_dense_batch() -> None:
    batch = make([5, 5, 5], "4 n")
    packed, dense = (nn.InstanceNorm1d(4, track_running_stats=True).double() for _ in range(2))
    for _ in range(3):
        assert_matches(packed(pack(batch)[0]), list(dense(torch.stack(list(batch.samples)))))
    torch.testing.assert_close(packed.running_mean, dense.running_mean)
    torch.testing.assert_close(packed.running_var, dense.running_var)


def test_a_batch_of_empty_samples_leaves_instance_statistics_alone() -> None:
    module = nn.InstanceNorm1d(4, track_running_stats=True).double()
    module(pack(make([0, 0], "4 n"))[0])
    assert not module.running_mean.any() and (module.running_var == 1).all()


# ---------------------------------------------------------------- over channels


@LENGTHS
@EACH_PATTERN
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_local_response_norm(lengths: list[int], pattern: str, size: int) -> None:
    check(nn.LocalResponseNorm(size, alpha=0.3, beta=0.6, k=1.5), make(lengths, pattern))


@pytest.mark.parametrize("pattern", ["4 n", "4 n m", "4 n 3"])
def test_channel_shuffle(pattern: str) -> None:
    check(nn.ChannelShuffle(2), make([3, 5, 1], pattern))
    check(lambda x: F.channel_shuffle(x.transpose(1, 2), 2), make([3, 5, 1]))


# ---------------------------------------------------------------- parametrizations


@pytest.mark.parametrize("how", ["weight_norm", "spectral_norm"])
def test_normalised_weights_are_dense_and_work_as_ever(how: str) -> None:
    module = getattr(nn.utils.parametrizations, how)(nn.Linear(4, 3).double()).eval()
    check(module, make([3, 0, 5]), params=module.parameters())


def test_a_stack_of_normalised_layers_trains() -> None:
    model = double(
        nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4, affine=True))
    )
    before = model[0].running_mean.clone()
    (x,) = pack(make([3, 2, 5], "4 n"))
    model(x).square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert not torch.equal(model[0].running_mean, before)


# ---------------------------------------------------------------- compiled


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(
            [
                nn.BatchNorm1d(4),
                nn.GroupNorm(2, 4),
                nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
                nn.LocalResponseNorm(3),
            ]
        )
        self.rows = nn.BatchNorm1d(4)

    def forward(self, x: Any) -> Any:
        for layer in self.norms:
            x = layer(x) + 0.1 * x
        return self.rows(x.transpose(1, 2).flatten(0, 1)).view(*x.transpose(1, 2).shape)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_normalisation_compiles_to_one_graph(backend: str, training: bool) -> None:
    torch._dynamo.reset()
    eager = double(Stack()).train(training)
    model = deepcopy(eager)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for lengths in ([3, 5, 2], [4, 4], [6], [2, 0, 7, 3], [0, 0]):
        (x,), (y,) = pack(make(lengths, "4 n")), pack(make(lengths, "4 n"))
        x.requires_grad_(), y.requires_grad_()
        ops.mark_dynamic(x)
        got, want = compiled(x), eager(y)
        assert_matches(got, want.to_list())
        for out in (got, want):
            (out.values.sin()).sum().backward()
        torch.testing.assert_close(x.grad.values, y.grad.values)
        for p, q in zip(model.parameters(), eager.parameters()):
            torch.testing.assert_close(p.grad, q.grad)
        for p, q in zip(model.buffers(), eager.buffers()):
            torch.testing.assert_close(p, q)
        assert counter.frame_count == (1 if any(lengths) else 2), (
            "a largest length of 0 is a graph of its own"
        )


def test_one_position_raises_in_a_graph_too() -> None:
    torch._dynamo.reset()
    model = torch.compile(nn.BatchNorm1d(4).double(), fullgraph=True, backend="aot_eager")
    for lengths in ([3, 5], [1]):
        (x,) = pack(make(lengths, "4 n"))
        ops.mark_dynamic(x)
        if lengths == [1]:
            with pytest.raises(Exception, match="more than 1 value per channel"):
                model(x)
        else:
            model(x)


# ---------------------------------------------------------------- mistakes


def x_of(pattern: str = "n 4", lengths: tuple[int, ...] = (3, 5)) -> Any:
    return pack(make(list(lengths), pattern))[0].float()


MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "positions where channels are": (
        lambda: nn.BatchNorm1d(4)(x_of()),
        ValueError,
        r"batch_norm: dim 1 of \(2, 5, 4\) has to hold the channels, and is the ragged axis 'n'.*transpose",
    ),
    "as many positions as channels": (
        lambda: nn.BatchNorm1d(4)(x_of("n 4", (4, 4))),
        ValueError,
        "is the ragged axis 'n'",
    ),
    "samples where channels are": (
        lambda: F.group_norm(x_of("4 n").transpose(0, 1), 2),
        ValueError,
        "group_norm: dim 0 of .* has to be the batch",
    ),
    "the batch where channels are": (
        lambda: F.batch_norm(x_of("4 n").transpose(0, 1), None, None, training=True),
        ValueError,
        "batch_norm: dim 1 of .* and is the batch",
    ),
    "groups that do not divide": (
        lambda: nn.GroupNorm(3, 6)(x_of("4 n")),
        ValueError,
        "group_norm: 4 channels do not make 3 groups",
    ),
    "parameters of another width": (
        lambda: F.group_norm(x_of("4 n"), 2, torch.ones(6)),
        ValueError,
        r"group_norm: a weight of shape \(6,\) for 4 channels",
    ),
    "running statistics of another width": (
        lambda: nn.BatchNorm1d(6)(x_of("4 n")),
        RuntimeError,
        "running_mean should contain 4 elements not 6",
    ),
    "one position in training": (
        lambda: nn.BatchNorm1d(4)(x_of("4 n", (1, 0))),
        ValueError,
        "expected more than 1 value per channel when training; the whole batch has one",
    ),
    "one position in a sample": (
        lambda: nn.InstanceNorm1d(4)(x_of("4 n", (3, 1, 2))),
        ValueError,
        "instance_norm: expected more than 1 value per channel in each sample; sample 1 has one",
    ),
    "rows to instance norm": (
        lambda: F.instance_norm(x_of().flatten(0, 1)),
        ValueError,
        "instance_norm: rows have one value per channel; keep the samples apart",
    ),
    "a ragged dim to layer norm": (
        lambda: nn.LayerNorm(5)(x_of("4 n")),
        ValueError,
        "layer_norm needs a static dim; dim 2 of a packed tensor of 3 dims is the ragged axis 'n'",
    ),
    "another width to layer norm": (lambda: nn.LayerNorm(5)(x_of()), RuntimeError, "normalized_shape"),
    "rows to local response norm": (
        lambda: nn.LocalResponseNorm(2)(x_of().flatten(0, 1)),
        ValueError,
        "local_response_norm: expected at least 3 dims, got 2",
    ),
    "a packed parameter": (
        lambda: F.layer_norm(torch.randn(2, 5, 4), (4,), x_of()),
        TypeError,
        "layer_norm: the input must be packed where a parameter is",
    ),
    "groups of a shuffle": (
        lambda: F.channel_shuffle(x_of("4 n"), 3),
        ValueError,
        "channel_shuffle: 4 channels do not make 3 groups",
    ),
    "evaluation without statistics": (
        lambda: F.batch_norm(x_of("4 n"), None, None),
        RuntimeError,
        "running_mean must be defined in evaluation mode|Expected running_mean",
    ),
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistakes_are_told(name: str) -> None:
    call, kind, message = MISTAKES[name]
    with pytest.raises(kind, match=message):
        call()


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_results_keep_the_structure(lengths: list[int]) -> None:
    (x,) = pack(make(lengths, "4 n"))
    for out in (F.group_norm(x, 2), F.local_response_norm(x, 2), nn.BatchNorm1d(4).double().eval()(x)):
        assert is_packed(out) and out.grid is x.grid and out.order == x.order

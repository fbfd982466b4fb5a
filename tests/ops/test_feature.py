from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ops.testing import Ragged, assert_matches, check, pack
from tests.strategies import PROFILES, batches, laid_out, make

LENGTHS = pytest.mark.parametrize("lengths", list(PROFILES.values()), ids=list(PROFILES))
REFUSALS = (NotImplementedError, TypeError, ValueError, RuntimeError)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def double(module: nn.Module) -> nn.Module:
    return module.to(torch.float64)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 6),
    "linear_without_bias": lambda: nn.Linear(4, 1, bias=False),
    "layer_norm": lambda: nn.LayerNorm(4),
    "layer_norm_without_affine": lambda: nn.LayerNorm(4, elementwise_affine=False),
    "rms_norm": lambda: nn.RMSNorm(4),
    "softmax": lambda: nn.Softmax(-1),
    "log_softmax": lambda: nn.LogSoftmax(-1),
    "mlp": lambda: nn.Sequential(
        nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.0), nn.Linear(8, 4)
    ),
    "identity": nn.Identity,
}


@LENGTHS
@pytest.mark.parametrize("name", list(MODULES))
def test_modules(lengths: list[int], name: str) -> None:
    module = double(MODULES[name]())
    check(module, make(lengths), params=module.parameters())


@pytest.mark.parametrize("name", list(MODULES))
@given(batch=batches(patterns=("n 4", "n 3 4", "n n 4", "n m 4", "3 n 4", "n m k 4")))
def test_modules_on_any_rank(name: str, batch: Ragged) -> None:
    module = double(MODULES[name]())
    check(module, batch, params=module.parameters())


@pytest.mark.parametrize("name", ["linear", "layer_norm", "softmax", "mlp"])
def test_modules_after_a_permutation(name: str) -> None:
    module = double(MODULES[name]())
    check(lambda x: module(x.transpose(1, 2)), make([3, 0, 5], "4 n"), params=module.parameters())
    check(lambda x: module(x.transpose(2, 3)), make([3, 0, 5], "n 4 3"), params=module.parameters())
    check(lambda x: module(x.transpose(0, 1)), make([3, 0, 5]), params=module.parameters(), batch_dim=1)
    check(lambda x: module(x.permute(0, 2, 3, 1)), make([3, 0, 5], "4 n m"), params=module.parameters())


def test_functional_linear_differentiates_weight_and_bias() -> None:
    check(F.linear, make([3, 0, 5]), randn(6, 4), randn(6))
    check(F.linear, make([3, 0, 5], "n n 4"), randn(6, 4))


def test_linear_over_a_ragged_dim_is_refused() -> None:
    (x,) = pack(make([4, 4], "3 n"))
    with pytest.raises(REFUSALS):
        F.linear(x, randn(6, 4))


def test_linear_of_another_width_raises_as_dense() -> None:
    (x,) = pack(make([3, 5]))
    with pytest.raises(RuntimeError):
        F.linear(x, randn(6, 5))


@pytest.mark.parametrize("shape", [(4,), (3, 4)])
def test_functional_layer_norm(shape: tuple[int, ...]) -> None:
    x = make([3, 0, 5], "n 3 4")
    check(lambda x, w, b: F.layer_norm(x, shape, w, b, 1e-3), x, randn(*shape), randn(*shape))
    check(lambda x: F.layer_norm(x, shape), make([3, 0, 5], "3 n 4") if shape == (4,) else x)
    check(lambda x, w: F.rms_norm(x, shape, w), x, randn(*shape))


def test_layer_norm_over_a_ragged_dim_is_refused() -> None:
    (x,) = pack(make([4, 4], "3 n"))
    with pytest.raises(REFUSALS):
        F.layer_norm(x, (4,))
    (y,) = pack(make([4, 4], "n 3"))
    with pytest.raises(REFUSALS):
        F.layer_norm(y, (4, 3))


@given(laid_out(patterns=("n 3 4", "3 n 4", "n m 4", "n 4 m 3")), st.data())
def test_softmax_over_any_static_dim(case: tuple[Ragged, tuple[int, ...]], data: st.DataObject) -> None:
    batch, order = case
    tokens = ["batch", *batch.pattern.split()]
    dims = [i for i, d in enumerate(order) if tokens[d].isdigit()]
    dim = data.draw(st.sampled_from(dims))
    dim = data.draw(st.sampled_from([dim, dim - len(order)]))
    for fn in (F.softmax, F.log_softmax, torch.softmax):
        check(lambda x, fn=fn: fn(x.permute(order), dim=dim), batch, batch_dim=order.index(0))


def test_softmax_methods_and_dtype() -> None:
    x = make([3, 0, 5])
    check(lambda a: a.softmax(-1), x)
    check(lambda a: a.log_softmax(2), x)
    check(lambda a: F.softmax(a, -1, dtype=torch.float32), x)


# ---------------------------------------------------------------- embedding


@LENGTHS
@pytest.mark.parametrize("pattern", ["n", "n 3", "n n", "3 n"])
def test_embedding_adds_a_feature_dim(lengths: list[int], pattern: str) -> None:
    ids = make(lengths, pattern, dtype=torch.int64)
    check(F.embedding, ids, randn(6, 4))
    table = double(nn.Embedding(6, 4, padding_idx=2))
    check(table, ids, params=table.parameters())


def test_embedding_takes_int32_identifiers_and_a_permuted_tensor() -> None:
    check(F.embedding, make([3, 0, 5], "n", dtype=torch.int32), randn(6, 4))
    check(
        lambda i, w: F.embedding(i.transpose(1, 2), w), make([3, 0, 5], "3 n", dtype=torch.int64), randn(6, 4)
    )


def test_a_packed_table_is_refused() -> None:
    (x,) = pack(make([3, 5]))
    with pytest.raises(REFUSALS):
        F.embedding(torch.tensor([0, 1]), x)


# ---------------------------------------------------------------- dropout


@pytest.mark.parametrize("p", [0.0, 1.0])
@pytest.mark.parametrize("fn", [F.dropout, torch.dropout], ids=["functional", "torch"])
def test_dropout_of_all_or_nothing(p: float, fn: Callable) -> None:
    check(lambda x: fn(x, p, True), make([3, 0, 5]))


def test_dropout_does_nothing_in_evaluation() -> None:
    check(lambda x: F.dropout(x, 0.5, training=False), make([3, 0, 5]))
    module = nn.Dropout(0.5).eval()
    check(module, make([3, 0, 5], "n n 4"))


def test_dropout_keeps_the_expected_share_and_scale() -> None:
    x = pack(Ragged([torch.ones(n, 50) for n in (100, 300)], "n 50"))[0].requires_grad_()
    y = F.dropout(x, 0.25)
    assert y.grid is x.grid
    kept = y.values != 0
    torch.testing.assert_close(y.values[kept], torch.full((int(kept.sum()),), 1 / 0.75))
    assert abs(kept.float().mean() - 0.75) < 0.02
    y.sum().backward()
    torch.testing.assert_close(x.grad.values, y.values)


def test_dropout_in_place() -> None:
    (x,) = pack(make([3, 5]))
    assert F.dropout(x, 1.0, inplace=True) is x
    assert not x.values.any()


def test_dropout_follows_the_generator() -> None:
    (x,) = pack(make([3, 5]))
    draws = []
    for _ in range(2):
        torch.manual_seed(7)
        draws.append(F.dropout(x, 0.5).values)
    assert torch.equal(*draws)


# ---------------------------------------------------------------- models


def test_a_residual_network_matches_per_sample() -> None:
    norm, up, down = (double(m) for m in (nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)))
    params = [p for m in (norm, up, down) for p in m.parameters()]
    for lengths in PROFILES.values():
        check(lambda x: x + down(F.gelu(up(norm(x)))), make(lengths), params=params)


@LENGTHS
def test_the_pair_program_matches_per_sample(lengths: list[int]) -> None:
    u, v, h, g = (double(nn.Linear(4, 4)) for _ in range(4))
    norm = double(nn.LayerNorm(4))
    params = [p for m in (u, v, h, g, norm) for p in m.parameters()]

    def program(x: Tensor) -> Tensor:
        p = u(x)[:, :, None] + v(x)[:, None, :]
        p = p + h(norm(p))
        return x + g(p.mean(2))

    check(program, make(lengths), params=params)


def test_autocast_is_respected() -> None:
    layer = nn.Linear(4, 4)
    batch = make([3, 0, 5], dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(layer, batch, grad=False, rtol=1e-2, atol=1e-2)


def test_float32_models_match_to_float32_precision() -> None:
    layer = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    check(layer, make([3, 0, 5], dtype=torch.float32), params=layer.parameters(), rtol=1e-5, atol=1e-5)


def test_the_payload_sees_one_call() -> None:
    """No per-sample loop hides behind a feature-wise operator."""
    layer = double(nn.Linear(4, 4))
    (x,) = pack(make([1] * 50))
    with torch.profiler.profile() as profile:
        layer(x)
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["aten::linear"] == 1


@given(batches(patterns=("n 4", "n m 4", "n n 4")))
def test_results_do_not_depend_on_other_samples(batch: Ragged) -> None:
    layer = double(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Softmax(-1)))
    (whole,) = pack(batch)
    singles = [layer(pack(Ragged([s], batch.pattern))[0]).to_list()[0] for s in batch.samples]
    assert_matches(layer(whole), singles)


ODD: dict[str, Callable] = {
    "linear_with_a_vector": lambda x: F.linear(x, torch.ones(4, dtype=x.dtype)),
    "linear_with_a_scalar_bias": lambda x: F.linear(
        x, torch.ones(2, 4, dtype=x.dtype), torch.ones((), dtype=x.dtype)
    ),
    "layer_norm_of_an_int": lambda x: nn.LayerNorm(4, dtype=x.dtype)(x),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "glu": lambda x: F.glu(x),
    "channel_dropout": lambda x: F.dropout1d(x, 0.0),
    "bilinear": lambda x: F.bilinear(x, x, torch.ones(2, 4, 4, dtype=x.dtype)),
    "prelu_with_slopes": lambda x: F.prelu(x.transpose(1, 2), torch.arange(4, dtype=x.dtype)),
    "embedding_bag": lambda x: F.embedding_bag(x.long(), torch.ones(9, 4)),
    "one_hot": lambda x: F.one_hot((x > 0).long(), 2),
}


@pytest.mark.parametrize("fn", list(ODD.values()), ids=list(ODD))
def test_odd_feature_operators_are_right_or_refused(fn: Callable) -> None:
    batch = make([3, 1, 5])
    try:
        fn(pack(batch)[0])
    except REFUSALS:
        return
    check(fn, batch)


@pytest.mark.parametrize("fn", [F.dropout1d, F.feature_alpha_dropout, torch.feature_dropout])
def test_dropouts_of_whole_channels_are_refused_or_drop_whole_channels(fn: Callable) -> None:
    """(B, C, n): a channel of a sample is kept or dropped as a whole."""
    samples = [torch.ones(6, n) for n in (40, 30)]
    (x,) = pack(Ragged(samples, "6 n"))
    try:
        out = fn(x, 0.5, True)
    except REFUSALS:
        return
    assert all((s == s[:, :1]).all() for s in out.to_list())
    assert any(s[:, 0].unique().numel() > 1 for s in out.to_list())


@pytest.mark.parametrize("pattern", ["n 2", "n m 2", "2 n"])
def test_pairs_of_numbers_are_complex_ones(pattern: str) -> None:
    x = make([3, 0, 5], pattern)
    check(lambda x: torch.view_as_real(torch.complex(x, x * x)), x)
    if pattern.endswith("2"):
        check(lambda x: torch.view_as_complex(x).abs(), x)


def ids(x: Any) -> Any:
    return (x[..., 0] > 0).long()


MISTAKES: dict[str, tuple[Callable, str]] = {
    "linear_over_an_axis": (lambda x: F.linear(x.mT, randn(6, 4)), "linear needs a static dim.*axis 'n'"),
    "linear_of_another_width": (
        lambda x: F.linear(x, randn(6, 5)),
        "shapes cannot be multiplied|size mismatch",
    ),
    "linear_by_a_packed_weight": (lambda x: F.linear(randn(2, 4), x), "input must be packed"),
    "linear_out_of_features": (lambda x: F.linear(x, randn(4)), "must keep the last dim"),
    "layer_norm_over_an_axis": (lambda x: F.layer_norm(x.mT, (5,)), "static dim|axis 'n'"),
    "glu_over_an_axis": (lambda x: F.glu(x, 1), "glu needs a static dim; dim 1 .* axis 'n'"),
    "slopes_over_an_axis": (lambda x: F.prelu(x, randn(4)), "prelu with several slopes needs a static dim"),
    "a_packed_table": (lambda x: F.embedding(torch.tensor([0]), x), "the input must be packed"),
    "classes_unknown": (lambda x: F.one_hot(ids(x)), "needs num_classes="),
    "two_packed_tables": (lambda x: torch.isin(x, x), "the table must be dense"),
    "complex_over_an_axis": (
        lambda x: torch.view_as_complex(x[..., 0]),
        "view_as_complex needs a static dim",
    ),
}


@pytest.mark.parametrize(("fn", "message"), list(MISTAKES.values()), ids=list(MISTAKES))
def test_mistakes_are_named(fn: Callable, message: str) -> None:
    with pytest.raises((*REFUSALS, RuntimeError), match=message):
        fn(pack(make([3, 0, 5]))[0])

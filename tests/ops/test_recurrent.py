"""Recurrent layers on samples of varying length, and PyTorch's packed sequences."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

import ops
from ops import PackedTensor, from_packed_sequence, is_packed, to_packed_sequence
from ops.testing import check, pack
from tests.strategies import NONEMPTY, PROFILES, make

MODULES: dict[str, Callable[..., nn.RNNBase]] = {
    "tanh": lambda **kw: nn.RNN(4, 3, **kw),
    "relu": lambda **kw: nn.RNN(4, 3, nonlinearity="relu", **kw),
    "lstm": lambda **kw: nn.LSTM(4, 3, **kw),
    "gru": lambda **kw: nn.GRU(4, 3, **kw),
    "projected lstm": lambda **kw: nn.LSTM(4, 3, proj_size=2, **kw),
}
OPTIONS = {
    "one layer": {},
    "two layers": {"num_layers": 2},
    "both directions": {"bidirectional": True},
    "two layers both ways": {"num_layers": 2, "bidirectional": True, "bias": False},
}


def module_of(name: str, **options: Any) -> nn.RNNBase:
    torch.manual_seed(0)
    return MODULES[name](dtype=torch.float64, **options)


def states_of(module: nn.RNNBase, batch: int, leaf: bool = True) -> Any:
    """Random initial states, [layers * directions, B, H]."""
    layers = module.num_layers * (2 if module.bidirectional else 1)
    sizes = [module.proj_size or module.hidden_size, module.hidden_size]
    sizes = sizes if isinstance(module, nn.LSTM) else sizes[:1]
    drawn = [torch.randn(layers, batch, n, dtype=torch.float64).requires_grad_(leaf) for n in sizes]
    return tuple(drawn) if len(drawn) > 1 else drawn[0]


def flat(state: Any) -> list[Tensor]:
    return list(state) if isinstance(state, tuple) else [state]


def by_sample(state: Any, i: int) -> Any:
    parts = [s[:, i : i + 1] for s in flat(state)]
    return tuple(parts) if isinstance(state, tuple) else parts[0]


def compare(module: nn.RNNBase, lengths: list[int], given: bool, batch_first: bool) -> None:
    """Outputs, final states and all gradients, against the module on each dense sample that is not empty."""
    twin = copy.deepcopy(module)
    batch = make(lengths, "n 4")
    (x,) = pack(batch)
    x.requires_grad_()
    start = states_of(module, len(lengths)) if given else None
    begin = tuple(s.detach().clone().requires_grad_() for s in flat(start)) if given else None
    out, last = module(x if batch_first else x.transpose(0, 1), start)
    assert is_packed(out) and out.axes[0] is x.axes[0] and out.dim() == 3
    assert out.shape[0 if batch_first else 1] == len(lengths)
    samples, loss, expected_loss = [s.clone().requires_grad_() for s in batch.samples], 0.0, 0.0
    for i, sample in enumerate(samples):
        got = (out if batch_first else out.transpose(0, 1)).to_list()[i]
        initial = by_sample(begin if isinstance(start, tuple) else begin[0], i) if begin else None
        if lengths[i]:
            dense = sample[None] if batch_first else sample[:, None]
            want, end = twin(dense, initial)
            want = want.squeeze(0 if batch_first else 1)
        else:
            want = got.detach().clone()
            end = initial if given else by_sample(states_of(module, 1), 0)
            end = end if given else tuple(torch.zeros_like(s) for s in flat(end))
        torch.testing.assert_close(got, want)
        weight = torch.linspace(0.5, 1.5, want.numel(), dtype=torch.float64).view(want.shape)
        loss, expected_loss = loss + (got * weight).sum(), expected_loss + (want * weight).sum()
        for a, b in zip(flat(by_sample(last, i)), flat(end), strict=True):
            torch.testing.assert_close(a, b)
            loss, expected_loss = loss + (a**2).sum(), expected_loss + (b**2).sum()
    loss.backward()
    expected_loss.backward()
    for sample, grad in zip(samples, x.grad.to_list()):
        torch.testing.assert_close(grad, torch.zeros_like(sample) if sample.grad is None else sample.grad)
    for a, b in zip(module.parameters(), twin.parameters()):
        torch.testing.assert_close(a.grad, b.grad)
    for a, b in zip(flat(start), begin) if given else ():
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", MODULES)
def test_modules_unmodified(name: str, options: str, batch_first: bool, given: bool) -> None:
    compare(module_of(name, batch_first=batch_first, **OPTIONS[options]), [3, 5, 1, 5], given, batch_first)


@pytest.mark.parametrize("profile", [name for name in PROFILES if name != "all_empty"])
@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_lengths_of_every_kind(name: str, profile: str) -> None:
    for initial in (False, True):
        compare(module_of(name, batch_first=True, bidirectional=True), PROFILES[profile], initial, True)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any), st.sampled_from(sorted(MODULES)))
def test_any_lengths(lengths: list[int], name: str) -> None:
    compare(module_of(name, num_layers=2), lengths, True, False)


def test_nothing_but_empty_samples() -> None:
    module = module_of("lstm", batch_first=True, bidirectional=True)
    for x in (pack(make([0, 0]))[0], PackedTensor.from_list([], "n 4").to(torch.float64)):
        start = states_of(module, x.batch_size)
        out, last = module(x, start)
        assert out.values.shape == (0, 6) and out.axes[0] is x.axes[0]
        for a, b in zip(last, start):
            torch.testing.assert_close(a, b)
        assert module(x)[1][0].shape == (2, x.batch_size, 3)


def test_no_sample_sees_another() -> None:
    (x,) = pack(make([3, 5, 2]))
    module = module_of("lstm", batch_first=True, bidirectional=True)
    changed = PackedTensor(x.values.clone(), x.grid, x.order)
    changed.values[3:8] += 1
    for i in (0, 2):
        assert torch.equal(module(x)[0].to_list()[i], module(changed)[0].to_list()[i])


def test_dropout_between_layers() -> None:
    (x,) = pack(make([30, 50, 20]))
    module = module_of("gru", batch_first=True, num_layers=2, dropout=0.5)
    assert not torch.equal(module(x)[0].values, module(x)[0].values)
    module.eval()
    assert torch.equal(module(x)[0].values, module(x)[0].values)
    torch.manual_seed(1)
    first = module.train()(x)[0].values
    torch.manual_seed(1)
    assert torch.equal(first, module(x)[0].values)


def test_half_precision() -> None:
    (x,) = pack(make([3, 5, 2], dtype=torch.bfloat16))
    module = module_of("lstm", batch_first=True).bfloat16()
    out, (hidden, _) = module(x)
    assert out.dtype == hidden.dtype == torch.bfloat16
    wide = copy.deepcopy(module).float()
    for got, sample in zip(out.to_list(), x.to_list()):
        torch.testing.assert_close(got.float(), wide(sample[None].float())[0][0], rtol=0.05, atol=0.01)


def test_the_order_of_steps_is_kept_with_the_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    (x,) = pack(make([3, 5, 2]))
    module = module_of("lstm", batch_first=True)
    module(x)

    def never(*args: Any) -> Any:
        raise AssertionError("the order is built a second time")

    monkeypatch.setattr("ops.sequences._slots", never)
    module(x * 2)


# ------------------------------------------------------------------ cells


CELLS: dict[str, Callable[[], Any]] = {
    "tanh": lambda: nn.RNNCell(4, 3),
    "relu": lambda: nn.RNNCell(4, 3, nonlinearity="relu"),
    "lstm": lambda: nn.LSTMCell(4, 3),
    "gru": lambda: nn.GRUCell(4, 3),
}


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", CELLS)
def test_cells_on_rows(name: str, given: bool) -> None:
    module = CELLS[name]().double()
    batch = make([3, 0, 5], "n 4")
    hidden = [make([3, 0, 5], "n 3", seed=k) for k in (1, 2)][: 2 if name == "lstm" else 1]

    def fn(x: Any, *state: Any) -> Any:
        start = tuple(s.flatten(0, 1) for s in state)
        out = module(x.flatten(0, 1), (start if name == "lstm" else start[0]) if given else None)
        return (out[0] * out[1] if name == "lstm" else out).view(*x.shape[:2], 3)

    check(fn, batch, *(hidden if given else ()), params=module.parameters())


def test_a_cell_on_samples_and_positions() -> None:
    w, u, b = (torch.randn(*s, dtype=torch.float64) for s in ((3, 4), (3, 3), (3,)))

    def fn(x: Any, h: Any) -> Any:
        if is_packed(x):
            return torch.rnn_tanh_cell(x, h, w, u, b, b)
        return torch.rnn_tanh_cell(x[0], h[0], w, u, b, b)[None]

    check(fn, make([3, 2], "n 4"), make([3, 2], "n 3"))


# ------------------------------------------------------------------ packed sequences


@pytest.mark.parametrize("profile", NONEMPTY)
@pytest.mark.parametrize("pattern", ["n", "n 4", "n 2 3"])
def test_to_packed_sequence_is_what_pytorch_packs(profile: str, pattern: str) -> None:
    batch = make(NONEMPTY[profile], pattern)
    (x,) = pack(batch)
    want = pack_sequence(list(batch.samples), enforce_sorted=False)
    got = to_packed_sequence(x)
    for a, b in zip(pad_packed_sequence(got), pad_packed_sequence(want)):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(got.batch_sizes, want.batch_sizes)
    back = from_packed_sequence(got, x)
    assert back.axes[0] is x.axes[0] and torch.equal(back.values, x.values)


@pytest.mark.parametrize("profile", NONEMPTY)
@pytest.mark.parametrize("like", ["nothing", "the tensor", "the axis"])
def test_from_packed_sequence(profile: str, like: str) -> None:
    batch = make(NONEMPTY[profile], "n 2 3")
    (x,) = pack(batch)
    known = {"nothing": None, "the tensor": x, "the axis": x.axes[0]}[like]
    back = from_packed_sequence(pack_sequence(list(batch.samples), enforce_sorted=False), known)
    for got, want in zip(back.to_list(), batch.samples, strict=True):
        assert torch.equal(got, want)
    assert known is None or back.axes[0] is x.axes[0]


def test_sorted_sequences_carry_no_order() -> None:
    batch = make([5, 3, 3, 1])
    (x,) = pack(batch)
    got, want = to_packed_sequence(x, enforce_sorted=True), pack_sequence(list(batch.samples))
    assert got.sorted_indices is None and got.unsorted_indices is None
    torch.testing.assert_close(got.data, want.data)
    for known in (None, x):
        assert torch.equal(from_packed_sequence(want, known).values, x.values)
    assert from_packed_sequence(want, name="words").axes[0].label == "words"


def test_sequences_in_every_order_of_dims() -> None:
    batch = make([2, 4, 1], "n 2 3")
    (x,) = pack(batch)
    turned = to_packed_sequence(x.permute(1, 0, 3, 2))
    torch.testing.assert_close(turned.data, to_packed_sequence(x).data.transpose(1, 2))
    back = from_packed_sequence(turned, x.transpose(0, 1))
    assert back.order == (1, 0, 2, 3)
    torch.testing.assert_close(back.values, x.values.transpose(1, 2))


def test_gradients_through_sequences() -> None:
    (x,) = pack(make([2, 4, 1]))
    leaf = x.values.clone().requires_grad_()

    def there(values: Tensor) -> Tensor:
        return to_packed_sequence(PackedTensor(values, x.grid, x.order)).data

    def back(values: Tensor) -> Tensor:
        sequence = pack_padded_sequence(values, [4, 2, 1])
        return from_packed_sequence(sequence).values

    assert torch.autograd.gradcheck(there, (leaf,))
    assert torch.autograd.gradcheck(back, (torch.randn(4, 3, 4, dtype=torch.float64).requires_grad_(),))


def test_a_module_on_a_sequence_is_a_module_on_the_tensor() -> None:
    (x,) = pack(make([2, 4, 1, 4]))
    module = module_of("lstm", batch_first=True, bidirectional=True)
    out, (hidden, cells) = module(to_packed_sequence(x))
    direct, state = module(x)
    torch.testing.assert_close(from_packed_sequence(out, x).values, direct.values)
    for a, b in zip((hidden, cells), state):
        torch.testing.assert_close(a, b)


# ------------------------------------------------------------------ mistakes


def mistakes() -> dict[str, tuple[Callable[[], Any], type[Exception], str]]:
    x, empty, pair, wide = pack(
        make([3, 5], "n 4"), make([3, 0], "k 4"), make([3, 5], "n n 4"), make([3, 5], "n 4 4")
    )
    module, other = module_of("lstm", batch_first=True), module_of("gru")
    sequence = to_packed_sequence(x)
    start = torch.zeros(1, 2, 3, dtype=torch.float64)
    weights = (module._flat_weights, True, 1, 0.0, True, False, True)
    (longer,) = pack(make([5, 3], "n 4"))
    return {
        "time first": (lambda: module(x.transpose(0, 1)), ValueError, r"lstm: .*\(B, n, C\).*transpose"),
        "batch first": (lambda: other(x), ValueError, r"gru: .*\(n, B, C\), or batch_first=True"),
        "features first": (lambda: nn.LSTM(5, 3).double()(x.permute(0, 2, 1)), ValueError, "transpose it"),
        "rows": (lambda: module(x.flatten(0, 1)), ValueError, "with one ragged axis"),
        "features": (lambda: nn.GRU(5, 3).double()(x), RuntimeError, "Expected 5, got 4"),
        "dtype": (lambda: nn.GRU(4, 3)(x.transpose(0, 1)), ValueError, "does not match weight dtype"),
        "a pair": (lambda: module(pair), ValueError, "to be 2D or 3D, got 4D"),
        "states": (
            lambda: torch.lstm(x, (start[:, :1],) * 2, *weights),
            ValueError,
            r"state of shape \(1, 1, 3\) for a batch of 2",
        ),
        "packed states": (lambda: torch.lstm(x, (x, x), *weights), TypeError, "initial states dense"),
        "dense input": (lambda: torch.lstm(start, (x, x), *weights), TypeError, "input must be packed"),
        "two ways": (
            lambda: torch.lstm(x, torch.tensor([1]), (start, start), *weights[:-1]),
            NotImplementedError,
            "give it the packed tensor alone",
        ),
        "cells of more dims": (
            lambda: torch.rnn_tanh_cell(wide, wide, torch.eye(4), torch.eye(4)),
            ValueError,
            "rows of features",
        ),
        "an empty sample": (lambda: to_packed_sequence(empty), IndexError, "no empty samples: sample 1"),
        "pairs as a sequence": (lambda: to_packed_sequence(pair), ValueError, "one ragged axis"),
        "not sorted": (lambda: to_packed_sequence(x, True), ValueError, "sample 1 is longer"),
        "other lengths": (
            lambda: from_packed_sequence(sequence, longer),
            ValueError,
            "sample 0 has 3.*5 along",
        ),
        "other batch": (lambda: from_packed_sequence(sequence, empty), ValueError, "sample 1 has 5.*0 along"),
        "fewer samples": (lambda: from_packed_sequence(sequence, x[:1]), ValueError, "2 samples.* axis of 1"),
        "a graph": (
            lambda: torch.compile(torch.lstm, fullgraph=True, backend="eager")(x, (start, start), *weights),
            Exception,
            "cannot be in a graph",
        ),
    }


@pytest.mark.parametrize("name", mistakes())
def test_mistakes(name: str) -> None:
    call, kind, message = mistakes()[name]
    with pytest.raises(kind, match=f"(?s){message}"):
        call()


def test_names_are_exported() -> None:
    assert ops.to_packed_sequence is to_packed_sequence and ops.from_packed_sequence is from_packed_sequence
    assert isinstance(to_packed_sequence(pack(make([2]))[0]), PackedSequence)

"""No sample sees another: what one sample holds changes no other's output or gradient, bit for bit.

For every backend. ``flash`` and ``varlen`` run on stand-ins, PyTorch's formula on each sample with the
arguments of the real function; that shows what the adapters hand over: rows, starts and largest lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import ops
from ops import is_packed
from ops.attention import AUTO, TABLE, flash, varlen
from ops.testing import Ragged, pack
from tests.strategies import make

sdpa: Callable[..., Any] = F.scaled_dot_product_attention
attention = ops.nn.attention
#: Long enough for several threads to share the work.
LENGTHS = {"n": [120, 0, 90, 110], "m": [100, 50, 120, 90]}
CHANGED = 2
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


class Kind(NamedTuple):
    """A way to attend: 4 heads of 16 features, ``shared`` heads of keys on axis ``keys``, and a bias."""

    call: Callable[..., Any]
    shared: int = 4
    keys: str = "n"
    bias: str = ""
    boolean: bool = False


#: What the kernels of packed sequences take too.
PLAIN: dict[str, Kind] = {
    "plain": Kind(sdpa),
    "scale": Kind(lambda q, k, v: sdpa(q, k, v, scale=0.3)),
    "causal": Kind(lambda q, k, v: sdpa(q, k, v, is_causal=True)),
    "window": Kind(lambda q, k, v: attention(q, k, v, window=(5, 2))),
    "causal_window": Kind(lambda q, k, v: attention(q, k, v, window=(5, None), causal=True)),
    "two_axes": Kind(sdpa, keys="m"),
    "grouped": Kind(lambda q, k, v: sdpa(q, k, v, enable_gqa=True), shared=2),
    "grouped_two_axes": Kind(lambda q, k, v: sdpa(q, k, v, enable_gqa=True), shared=1, keys="m"),
}
#: What takes a mask or a bias, or positions of two axes.
MASKED: dict[str, Kind] = {
    "causal_two_axes": Kind(lambda q, k, v: sdpa(q, k, v, is_causal=True), keys="m"),
    "window_two_axes": Kind(lambda q, k, v: attention(q, k, v, window=(5, 2)), keys="m"),
    "pair_bias": Kind(lambda q, k, v, b: sdpa(q, k, v, b), bias="4 n n"),
    "pair_bias_of_all_heads": Kind(lambda q, k, v, b: sdpa(q, k, v, b), bias="1 n n"),
    "pair_bias_two_axes": Kind(lambda q, k, v, b: sdpa(q, k, v, b), keys="m", bias="4 n m"),
    "pair_bias_grouped": Kind(lambda q, k, v, b: sdpa(q, k, v, b, enable_gqa=True), shared=2, bias="4 n n"),
    "pair_bias_causal": Kind(lambda q, k, v, b: sdpa(q, k, v, b, is_causal=True), bias="4 n n"),
    "pair_bias_window": Kind(lambda q, k, v, b: attention(q, k, v, bias=b, window=(9, 9)), bias="4 n n"),
    "pair_mask": Kind(lambda q, k, v, b: sdpa(q, k, v, b), bias="4 n n", boolean=True),
    "mask_of_keys": Kind(lambda q, k, v, b: sdpa(q, k, v, b), keys="m", bias="1 1 m", boolean=True),
    "by_position": Kind(lambda q, k, v: attention(q, k, v, position_bias=ops.nn.alibi(4))),
}
#: What only the formula does.
FORMULA: dict[str, Kind] = {
    "dropout": Kind(lambda q, k, v: sdpa(q, k, v, dropout_p=0.3)),
    "narrow_values": Kind(lambda q, k, v: sdpa(q, k, v[..., :8])),
}
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "other": lambda x: ~x if x.dtype == torch.bool else x * 7,
    "nan": lambda x: ~x if x.dtype == torch.bool else x * torch.nan,
    "infinite": lambda x: ~x if x.dtype == torch.bool else x * torch.inf,
}


def operands(kind: Kind, dtype: torch.dtype) -> list[Ragged]:
    """Queries, keys, values and perhaps a bias of this kind."""
    patterns = ["4 n 16", *[f"{kind.shared} {kind.keys} 16"] * 2, *[kind.bias] * bool(kind.bias)]
    found = [make(LENGTHS, p, dtype=dtype, seed=seed) for seed, p in enumerate(patterns)]
    if kind.boolean:
        found[3] = Ragged([s > -0.3 for s in found[3].samples], found[3].pattern)
    return found


def changed(batch: Ragged, change: Callable[[Tensor], Tensor], which: int = CHANGED) -> Ragged:
    """``batch`` with one sample replaced."""
    samples = [change(s) if i == which else s for i, s in enumerate(batch.samples)]
    return Ragged(samples, batch.pattern)


def results(call: Callable[..., Any], batches: list[Ragged], grad: bool) -> list[list[Tensor]]:
    """The output and, with ``grad``, all gradients: sample by sample."""
    packed = pack(*batches)
    for x in packed:
        x.requires_grad_(grad and x.dtype.is_floating_point)
    torch.manual_seed(5)
    with torch.set_grad_enabled(grad):
        out = call(*packed)
        outs = out if isinstance(out, tuple) else (out,)
        if grad:
            torch.autograd.backward([o.values.square().sum() for o in outs])
    grads = [x.grad for x in packed if x.grad is not None]
    return [x.detach().to_list() for x in (*outs, *grads)]


def assert_no_leak(
    call: Callable[..., Any],
    before: list[Ragged],
    after: list[Ragged],
    which: int = CHANGED,
    grad: bool = True,
) -> None:
    """Results of sample ``which`` differ, all others are the same bit for bit."""
    one, other = (results(call, batches, grad) for batches in (before, after))
    floating = sum(b.samples[0].is_floating_point() for b in before)
    assert len(one) == len(other) >= 1 + (floating if grad else 0)
    for a, b in zip(one, other, strict=True):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same = torch.equal(x, y)
            assert same == (i != which), f"sample {i} {'is' if same else 'is not'} as it was"
            assert i == which or x.isfinite().all()


# ---------------------------------------------------------------- the loop, which auto takes on a CPU


@pytest.fixture(params=[("loop", 1), ("loop", 2), ("auto", 2)], ids=["loop_1", "loop_2", "auto_2"])
def backend_and_threads(request: Any) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param[1])
    with ops.attention_backend(request.param[0]):
        yield
    torch.set_num_threads(before)


@DTYPES
@pytest.mark.parametrize("change", ["other", "nan"])
@pytest.mark.parametrize("name", [*PLAIN, *MASKED, *FORMULA])
@pytest.mark.usefixtures("backend_and_threads")
def test_the_loop(name: str, change: str, dtype: torch.dtype) -> None:
    kind = {**PLAIN, **MASKED, **FORMULA}[name]
    before = operands(kind, dtype)
    assert_no_leak(kind.call, before, [changed(b, CHANGES[change]) for b in before])


@DTYPES
@pytest.mark.parametrize("name", [*PLAIN, *MASKED])
def test_the_loop_without_gradients(name: str, dtype: torch.dtype) -> None:
    kind = {**PLAIN, **MASKED}[name]
    before = operands(kind, dtype)
    assert_no_leak(kind.call, before, [changed(b, CHANGES["nan"]) for b in before], grad=False)


@DTYPES
@pytest.mark.parametrize("name", list(PLAIN))
@pytest.mark.parametrize("size", [0, 1, 200])
def test_the_length_of_a_sample(name: str, size: int, dtype: torch.dtype) -> None:
    """A sample gets another length: all others lie elsewhere, and are what they were."""
    before = operands(PLAIN[name], dtype)
    after = [changed(b, lambda s: torch.ones(s.shape[0], size, s.shape[2], dtype=dtype)) for b in before]
    one, other = (results(PLAIN[name].call, batches, True) for batches in (before, after))
    for a, b in zip(one, other, strict=True):
        assert [torch.equal(x, y) for x, y in zip(a, b, strict=True)] == [True, True, False, True]


@given(st.data())
def test_any_sample_of_any_lengths(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 4))
    sizes = st.lists(st.sampled_from([0, 1, 2, 4, 17, 65]), min_size=count, max_size=count)
    lengths = {"n": data.draw(sizes), "m": data.draw(sizes)}
    which, causal = data.draw(st.integers(0, count - 1)), data.draw(st.booleans())
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    patterns = ["4 n 16", "2 m 16", "2 m 16", "4 n m"][: data.draw(st.sampled_from([3, 4]))]
    before = [make(lengths, p, dtype=dtype, seed=seed) for seed, p in enumerate(patterns)]
    after = [changed(b, CHANGES["nan"], which) for b in before]

    def call(q: Any, k: Any, v: Any, b: Any = None) -> Any:
        return sdpa(q, k, v, attn_mask=b, is_causal=causal, enable_gqa=True)

    for a, b in zip(*(results(call, batches, True) for batches in (before, after)), strict=True):
        assert all(torch.equal(x, y) for i, (x, y) in enumerate(zip(a, b)) if i != which)


@DTYPES
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("more", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_the_weights_of_a_module(more: dict[str, bool], average: bool, dtype: torch.dtype) -> None:
    module = nn.MultiheadAttention(16, 4, batch_first=True, dtype=dtype, **more)
    x = make(LENGTHS, "n 16", dtype=dtype)

    def call(x: Any) -> Any:
        return module(x, x, x, average_attn_weights=average)

    for change in CHANGES.values():
        assert_no_leak(call, [x], [changed(x, change)])


# ---------------------------------------------------------------- flex, forward on a CPU


@DTYPES
@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.parametrize("name", [*PLAIN, *MASKED])
@pytest.mark.filterwarnings("ignore")
def test_flex(name: str, change: str, dtype: torch.dtype) -> None:
    kind = {**PLAIN, **MASKED}[name]
    before = operands(kind, dtype)
    with ops.attention_backend("flex"):
        assert_no_leak(kind.call, before, [changed(b, CHANGES[change]) for b in before], grad=False)


# ---------------------------------------------------------------- flash and varlen, on stand-ins


def by_sample(q: Tensor, k: Tensor, v: Tensor, spans: tuple[Tensor, Tensor], **options: Any) -> Tensor:
    """PyTorch's formula on each sample's rows; a window counts from the last query and the last key."""
    (left, right), parts = options.pop("window"), []
    for a, b, c, d in zip(spans[0], spans[0][1:], spans[1], spans[1][1:]):
        ahead = torch.arange(d - c) - torch.arange(b - a)[:, None] - ((d - c) - (b - a))
        seen = (ahead >= -left if left >= 0 else True) & (ahead <= right if right >= 0 else ahead == ahead)
        one = (t.transpose(0, 1).unsqueeze(0) for t in (q[a:b], k[c:d], v[c:d]))
        with sdpa_kernel(SDPBackend.MATH):
            parts.append(sdpa(*one, attn_mask=seen, **options).squeeze(0).transpose(0, 1))
    return torch.cat(parts)


class StandIn:
    """flash-attn's and PyTorch's functions of packed sequences, by their documented arguments."""

    def __init__(self) -> None:
        self.given: list[tuple[Any, ...]] = []

    def flash(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        self.given.append((q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))
        assert dropout_p == 0.0
        window = (window_size[0], 0 if causal else window_size[1])
        spans = cu_seqlens_q, cu_seqlens_k
        return by_sample(q, k, v, spans, scale=softmax_scale, window=window, enable_gqa=True)

    def varlen(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
    ) -> Tensor:
        self.given.append((query, key, value, cu_seq_q, cu_seq_k, max_q, max_k))
        spans, options = (cu_seq_q, cu_seq_k), {"scale": scale, "enable_gqa": enable_gqa}
        return by_sample(query, key, value, spans, window=window_size, **options)


@pytest.fixture(params=["flash", "varlen", "auto"])
def stand_in(request: Any, monkeypatch: Any) -> Iterator[StandIn]:
    """Both functions replaced and taken for able on a CPU; ``auto`` tries what it tries on a CUDA device."""
    function = StandIn()
    monkeypatch.setattr(flash, "function", function.flash)
    monkeypatch.setattr(varlen.varlen, "varlen_attn", function.varlen)
    monkeypatch.setattr(varlen, "_GROUPS", True)
    monkeypatch.setitem(AUTO, "cpu", AUTO["cuda"])
    for name in ("flash", "varlen"):
        monkeypatch.setitem(TABLE, name, TABLE[name]._replace(refuses=lambda call: None))
    with ops.attention_backend(request.param):
        yield function


@DTYPES
@pytest.mark.parametrize("change", ["other", "nan"])
@pytest.mark.parametrize("name", list(PLAIN))
def test_kernels_of_packed_sequences(name: str, change: str, dtype: torch.dtype, stand_in: StandIn) -> None:
    kind = PLAIN[name]
    before = operands(kind, dtype)
    assert_no_leak(kind.call, before, [changed(b, CHANGES[change]) for b in before])
    assert len(stand_in.given) == 2


@pytest.mark.parametrize("name", list(PLAIN))
def test_what_kernels_of_packed_sequences_are_given(name: str, stand_in: StandIn) -> None:
    """The rows of each sample, where each begins, and the largest length; stored as the kernels need it."""
    kind = PLAIN[name]
    batches = operands(kind, torch.bfloat16)
    kind.call(*pack(*batches))
    (given,) = stand_in.given
    for rows, batch in zip(given[:3], batches, strict=True):
        assert torch.equal(rows, torch.cat([s.transpose(0, 1) for s in batch.samples]))
        assert rows.is_contiguous()
    for starts, most, axis in zip(given[3:5], given[5:], ("n", kind.keys), strict=True):
        lengths = LENGTHS[axis]
        assert starts.dtype == torch.int32
        assert starts.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        assert most == max(lengths)


def test_permuted_operands_reach_the_kernels_in_their_layout(stand_in: StandIn) -> None:
    x = make(LENGTHS, "n 16 4", dtype=torch.bfloat16)
    (packed,) = pack(x)
    moved = packed.movedim(3, 1)  # heads last in storage
    sdpa(moved, moved, moved)
    (given,) = stand_in.given
    assert torch.equal(given[0], torch.cat([s.transpose(1, 2) for s in x.samples]))
    assert given[0].is_contiguous()


def test_stand_ins_give_what_the_loop_gives(stand_in: StandIn) -> None:
    """Otherwise what they show of no leak would mean little."""
    for kind in PLAIN.values():
        packed = pack(*operands(kind, torch.float32))
        found = kind.call(*packed).values
        with ops.attention_backend("loop"):
            want = kind.call(*packed).values
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    assert is_packed(packed[0])

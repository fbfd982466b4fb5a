"""Masks, biases, windows and grouped heads, against PyTorch's formula on each dense sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import ops
from ops.rules.attention import packed_attention
from ops.testing import Dense, Ragged, assert_matches, check, pack, per_sample
from tests.strategies import PROFILES, make

HEADS = 2
LENGTHS = pytest.mark.parametrize("lengths", list(PROFILES.values()), ids=list(PROFILES))
PAIRS = pytest.mark.parametrize(
    ("queries", "keys"),
    [
        ([2, 3], [4, 1]),
        ([2, 3], [0, 3]),
        ([0, 3], [2, 3]),
        ([1, 1, 0], [1, 0, 1]),
        ([5], [2]),
        ([2, 2], [2, 2]),
    ],
    ids=["other_lengths", "case_8", "empty_queries", "at_most_one", "one_sample", "as_many_as_heads"],
)
sdpa = F.scaled_dot_product_attention


def reference_sdpa(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
    """PyTorch's formula; a query whose keys are all masked, or that has none, gets 0."""
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(q, k, v, **kwargs)


def check_sdpa(fn: Callable, *operands: Any, dense: Callable | None = None, **kwargs: Any) -> Any:
    def reference(*args: Any) -> list[Tensor]:
        with sdpa_kernel(SDPBackend.MATH):
            return per_sample(dense or fn, *args)

    return check(fn, *operands, reference=reference, **kwargs)


def qkv(queries: list[int], keys: list[int], heads: int = HEADS, shared: int | None = None) -> list[Ragged]:
    width = shared or heads
    return [
        make({"n": queries}, f"{heads} n 4"),
        make({"m": keys}, f"{width} m 4", seed=1),
        make({"m": keys}, f"{width} m 4", seed=2),
    ]


def with_mask(q: Any, k: Any, v: Any, b: Any) -> Any:
    return sdpa(q, k, v, attn_mask=b)


def seen(batch: Ragged) -> Ragged:
    """A boolean mask; every third entry is not seen."""
    return Ragged([s > -0.3 for s in batch.samples], batch.pattern)


# ---------------------------------------------------------------- packed


@PAIRS
@pytest.mark.parametrize("pattern", ["2 n m", "1 n m", "n 2 m", "n m 2", "2 m n"])
def test_a_packed_bias_of_any_layout(queries: list[int], keys: list[int], pattern: str) -> None:
    """Case 7, cross: (heads, N_i, M_i), gradients of the bias too."""
    moves: dict[str, Callable[[Any], Any]] = {
        "n 2 m": lambda b: b.transpose(1, 2),
        "n m 2": lambda b: b.movedim(3, 1),
        "2 m n": lambda b: b.transpose(2, 3),
    }
    move = moves.get(pattern, lambda b: b)
    bias = make({"n": queries, "m": keys}, pattern, seed=3)
    check_sdpa(lambda q, k, v, b: sdpa(q, k, v, attn_mask=move(b)), *qkv(queries, keys), bias)


@LENGTHS
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_self_attention_with_pair_bias(lengths: list[int], causal: bool) -> None:
    """Case 7; with causality too, which PyTorch has apart only."""
    x, bias = make(lengths, "2 n 4"), make(lengths, "2 n n", seed=3)

    def dense(x: Tensor, b: Tensor) -> Tensor:
        below = torch.ones(b.shape[-2:], dtype=torch.bool).tril()
        return sdpa(x, x, x, attn_mask=b.masked_fill(~below, -torch.inf) if causal else b)

    check_sdpa(lambda x, b: sdpa(x, x, x, attn_mask=b, is_causal=causal), x, bias, dense=dense)


@PAIRS
def test_a_boolean_mask_a_sample(queries: list[int], keys: list[int]) -> None:
    mask = seen(make({"n": queries, "m": keys}, "2 n m", seed=3))
    check_sdpa(with_mask, *qkv(queries, keys), mask)


@PAIRS
@pytest.mark.parametrize("pattern", ["1 1 m", "2 1 m"])
def test_a_mask_of_keys(queries: list[int], keys: list[int], pattern: str) -> None:
    for mask in (make({"m": keys}, pattern, seed=3), seen(make({"m": keys}, pattern, seed=3))):
        check_sdpa(with_mask, *qkv(queries, keys), mask)


def test_a_bias_of_queries_alone_changes_nothing() -> None:
    q, k, v = qkv([2, 3], [4, 1])
    bias = make({"n": [2, 3]}, "2 n 1", seed=3)
    packed = pack(q, k, v, bias)
    torch.testing.assert_close(with_mask(*packed).values, sdpa(*packed[:3]).values)
    check_sdpa(with_mask, q, k, v, bias)


def test_without_a_head_dim() -> None:
    q, k = make([3, 0, 5]), make([3, 0, 5], seed=1)
    check_sdpa(with_mask, q, k, k, make([3, 0, 5], "n n", seed=2))


def test_two_head_dims() -> None:
    q = make([3, 2], "2 3 n 4")
    check_sdpa(with_mask, q, q, q, make([3, 2], "2 3 n n", seed=3))
    check_sdpa(with_mask, q, q, q, make([3, 2], "2 1 n n", seed=3))


# ---------------------------------------------------------------- dense


DENSE = {
    "n n": (5, 5),
    "1 n n": (1, 5, 5),
    "2 n n": (2, 5, 5),
    "1 2 n n": (1, 2, 5, 5),
    "1 1 1 n": (1, 1, 1, 5),
    "2 n 1": (2, 5, 1),
    "batch 1 1 n": (3, 1, 1, 5),
    "batch 2 n n": (3, 2, 5, 5),
    "batch 1 n 1": (3, 1, 5, 1),
}


@pytest.mark.parametrize("pattern", list(DENSE))
@pytest.mark.parametrize("kind", ["boolean", "added"])
def test_a_dense_mask_is_read_by_sample_head_and_position(pattern: str, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.randn(DENSE[pattern], generator=generator, dtype=torch.float64)
    x = make([3, 0, 5], "2 n 4")
    names = pattern.split()
    operand = Dense(mask > -0.3 if kind == "boolean" else mask, pattern)
    if names[-2:] == ["n", "n"]:
        check_sdpa(lambda x, b: sdpa(x, x, x, attn_mask=b), x, operand)
    else:
        check_sdpa(lambda x, b: sdpa(x, x, x, attn_mask=b), x, operand, grad=kind == "added")


def test_a_dense_mask_for_two_axes() -> None:
    mask = torch.randn(3, 4, dtype=torch.float64)
    check_sdpa(with_mask, *qkv([2, 3], [4, 1]), Dense(mask, "n m"))


def test_a_query_whose_keys_are_all_masked_gets_zero_and_finite_gradients() -> None:
    """By each way a key is hidden."""
    x = make([3, 4], "2 n 4")
    hidden = torch.zeros(2, 1, 1, 4, dtype=torch.bool)
    hidden[1] = True
    for mask in (hidden, torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(~hidden, -torch.inf)):
        for recorded in (False, True):
            (q,) = pack(x)
            q.requires_grad_()
            given = mask.clone().requires_grad_(recorded and mask.is_floating_point())
            out = sdpa(q, q, q, attn_mask=given)
            assert torch.equal(out.to_list()[0], torch.zeros_like(out.to_list()[0]))
            out.square().sum().backward()
            assert q.grad.values.isfinite().all()
            assert torch.equal(q.grad.to_list()[0], torch.zeros_like(q.grad.to_list()[0]))
            if given.grad is not None:
                assert given.grad.isfinite().all()


# ---------------------------------------------------------------- groups, windows, dropout


@PAIRS
@pytest.mark.parametrize("shared", [1, 2, 4])
@pytest.mark.parametrize("bias", [None, "4 n m", "1 n m"])
def test_grouped_heads(queries: list[int], keys: list[int], shared: int, bias: str | None) -> None:
    operands = qkv(queries, keys, 4, shared)
    if bias is not None:
        operands.append(make({"n": queries, "m": keys}, bias, seed=3))
    check_sdpa(lambda q, k, v, b=None: sdpa(q, k, v, attn_mask=b, enable_gqa=True), *operands)


@PAIRS
@pytest.mark.parametrize("window", [(1, -1), (-1, 0), (0, 0), (1, 2)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_window(queries: list[int], keys: list[int], window: tuple[int, int], biased: bool) -> None:
    operands = qkv(queries, keys)
    if biased:
        operands.append(make({"n": queries, "m": keys}, "2 n m", seed=3))

    def dense(q: Tensor, k: Tensor, v: Tensor, b: Tensor | None = None) -> Tensor:
        return windowed(q, k, v, b, window)

    check_sdpa(lambda q, k, v, b=None: packed_attention(q, k, v, b, window=window), *operands, dense=dense)


def windowed(q: Tensor, k: Tensor, v: Tensor, b: Tensor | None, window: tuple[int, int]) -> Tensor:
    """PyTorch's formula with the window as a bias."""
    left, right = window
    ahead = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    hidden |= (ahead < -left) if left >= 0 else False
    hidden |= (ahead > right) if right >= 0 else False
    added = torch.zeros(ahead.shape, dtype=q.dtype) if b is None else b
    return sdpa(q, k, v, attn_mask=added.masked_fill(hidden, -torch.inf), enable_gqa=True)


LONG = {"n": [300, 0, 70, 129, 5], "m": [150, 90, 0, 300, 400]}


@pytest.mark.parametrize("window", [(10, 3), (0, 0), (70, -1), (-1, 20), (-1, 0), (130, 200)])
@pytest.mark.parametrize("axes", ["n", "m"], ids=["self", "cross"])
@pytest.mark.parametrize("kind", ["plain", "causal", "grouped", "biased", "masked", "bfloat16"])
def test_a_window_in_blocks(window: tuple[int, int], axes: str, kind: str) -> None:
    """Samples of many blocks, of one, and of queries beyond the last key's window."""
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float64
    shared = 1 if kind == "grouped" else HEADS
    operands = [
        make(LONG, "2 n 8", dtype=dtype),
        *(make(LONG, f"{shared} {axes} 8", dtype=dtype, seed=s) for s in (1, 2)),
    ]
    if kind in ("biased", "masked"):
        bias = make(LONG, f"2 n {axes}", seed=3)
        operands.append(bias if kind == "biased" else seen(bias))
    causal = kind == "causal"
    reach = (window[0], 0) if causal else window

    def dense(q: Tensor, k: Tensor, v: Tensor, b: Tensor | None = None) -> Tensor:
        if b is not None and b.dtype == torch.bool:
            b = torch.zeros(b.shape, dtype=q.dtype).masked_fill(~b, -torch.inf)
        return windowed(q, k, v, b, reach)

    def ours(q: Any, k: Any, v: Any, b: Any = None) -> Any:
        return packed_attention(q, k, v, b, window=window, causal=causal, grouped=True)

    tolerance = {"rtol": 3e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {}
    check_sdpa(ours, *operands, dense=dense, **tolerance)


class Scores(TorchDispatchMode):
    """Counts the scores that fused kernels compute, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.count = {"forward": 0, "backward": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "flash_attention_for_cpu" in name:
            q, k = args[1:3] if "backward" in name else args[:2]
            self.count["backward" if "backward" in name else "forward"] += q.shape[2] * k.shape[2]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("window", [(20, 5), (30, 0)])
def test_work_grows_with_the_window(window: tuple[int, int]) -> None:
    lengths = [1000, 0, 500]
    (x,) = pack(make(lengths, "2 n 8", dtype=torch.float32))
    with Scores() as scores:
        packed_attention(*[x.requires_grad_()] * 3, window=window).values.sum().backward()
    for count in scores.count.values():
        assert sum(lengths) * (sum(window) + 1) <= count <= sum(lengths) * (sum(window) + 64)


def test_dropout_keeps_the_expectation_and_its_gradient_is_that_of_the_kept_weights() -> None:
    x, _, v = (p.requires_grad_() for p in pack(*(make([200, 100], "2 n 8", seed=s) for s in range(3))))
    torch.manual_seed(3)
    out = sdpa(x * 0, x * 0, v * 0 + 1, dropout_p=0.5)
    assert out.values.std() > 0
    assert abs(out.values.mean() - 1) < 0.1
    gradients = []
    for _ in range(2):  # linear in the values: the gradient sums the weights that were kept
        torch.manual_seed(3)
        out = sdpa(x, x, v, dropout_p=0.5)
        (grad,) = torch.autograd.grad((out * out.detach()).sum(), v.values)
        gradients.append(grad)
        torch.testing.assert_close((grad * v.values).sum(), out.values.square().sum())
    assert torch.equal(*gradients)


def test_everything_is_dropped_where_the_share_is_one() -> None:
    (x,) = pack(make([3, 2], "2 n 4"))
    assert torch.equal(sdpa(x, x, x, dropout_p=1.0).values, torch.zeros_like(x.values))


# ---------------------------------------------------------------- any of all that


@given(st.data())
def test_any_lengths_heads_groups_and_masks(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 4))
    sizes = st.lists(st.sampled_from([0, 1, 2, 3, 4, 4, 17]), min_size=count, max_size=count)
    queries, keys = data.draw(sizes), data.draw(sizes)
    heads, shared = data.draw(st.sampled_from([(1, 1), (2, 2), (4, 4), (4, 2), (4, 1)]))
    causal = data.draw(st.booleans())
    kind = data.draw(st.sampled_from(["none", "bias", "boolean", "shared", "keys"]))
    operands: list[Any] = qkv(queries, keys, heads, shared)
    width = data.draw(st.sampled_from([1, heads]))
    if kind in ("bias", "boolean"):
        bias = make({"n": queries, "m": keys}, f"{width} n m", seed=3)
        operands.append(bias if kind == "bias" else seen(bias))
    elif kind == "keys":
        operands.append(seen(make({"m": keys}, "1 1 m", seed=3)))
    elif kind == "shared":
        size = (width, max(queries), max(keys))
        operands.append(Dense(torch.randn(size, dtype=torch.float64), f"{width} n m"))

    def dense(q: Tensor, k: Tensor, v: Tensor, b: Tensor | None = None) -> Tensor:
        if b is None:
            return sdpa(q, k, v, is_causal=causal, enable_gqa=True)
        below = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        if causal:
            b = b & below if b.dtype == torch.bool else b.masked_fill(~below, -torch.inf)
        return sdpa(q, k, v, attn_mask=b, enable_gqa=True)

    def ours(q: Any, k: Any, v: Any, b: Any = None) -> Any:
        return sdpa(q, k, v, attn_mask=b, is_causal=causal, enable_gqa=True)

    check_sdpa(ours, *operands, dense=dense)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pattern", ["2 n n", "1 n n"])
def test_bias_in_lower_precision(dtype: torch.dtype, pattern: str) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    x, bias = make([3, 0, 40], "2 n 16", dtype=dtype), make([3, 0, 40], pattern, dtype=dtype, seed=3)
    check_sdpa(lambda x, b: sdpa(x, x, x, attn_mask=b), x, bias, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------- refusals


def _axes() -> list[Any]:
    return pack(
        make([3, 5], "2 n 4"), make([3, 5], "2 n n"), make({"k": [4, 5]}, "2 k k"), make([3, 5], "n n")
    )


MISTAKES: dict[str, tuple[Callable[..., Any], str]] = {
    "a_bias_of_other_lengths": (lambda x, b, o, p: sdpa(x, x, x, attn_mask=o), "sample 0"),
    "a_bias_without_head_dim": (lambda x, b, o, p: sdpa(x, x, x, attn_mask=p), "1 where all heads share it"),
    "a_dense_mask_too_large": (
        lambda x, b, o, p: sdpa(x, x, x, attn_mask=torch.zeros(9, 9)),
        "9 queries where the largest length of axis 'n' is 5; slice it",
    ),
    "a_mask_of_other_heads": (
        lambda x, b, o, p: sdpa(x, x, x, attn_mask=torch.zeros(3, 5, 5)),
        r"head dims \[3\], the queries have \[2\]",
    ),
    "a_mask_of_integers": (
        lambda x, b, o, p: sdpa(x, x, x, attn_mask=torch.zeros(5, 5, dtype=torch.int64)),
        "boolean, or floating",
    ),
    "a_mask_of_another_batch": (
        lambda x, b, o, p: sdpa(x, x, x, attn_mask=torch.zeros(3, 1, 1, 5)),
        "the batch size is 2",
    ),
    "a_list_for_a_mask": (lambda x, b, o, p: sdpa(x, x, x, attn_mask=[0.0]), "list"),
    "grouped_without_saying_so": (lambda x, b, o, p: sdpa(x, x[:, :1], x[:, :1]), "enable_gqa=True"),
    "heads_that_do_not_divide": (
        lambda x, b, o, p: sdpa(torch.cat([x, x[:, :1]], 1), x, x, enable_gqa=True),
        "3, 2 and 2 heads",
    ),
    "dense_keys": (lambda x, b, o, p: sdpa(x, torch.zeros(2, 2, 5, 4), x), "all be packed"),
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_a_mistake_is_named(name: str) -> None:
    call, message = MISTAKES[name]
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        call(*_axes())


# ---------------------------------------------------------------- nn.MultiheadAttention


def module(**options: Any) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(4, HEADS, batch_first=True, dtype=torch.float64, **options)


@LENGTHS
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("average", [True, False])
def test_ragged_weights(lengths: list[int], batch_first: bool, training: bool, average: bool) -> None:
    attention = nn.MultiheadAttention(4, HEADS, batch_first=batch_first, dtype=torch.float64).train(training)

    def run(x: Any, which: int) -> Any:
        x = x if batch_first else x.transpose(0, 1)
        found = attention(x, x, x, average_attn_weights=average)
        return found[0].transpose(0, 1) if which == 0 and not batch_first else found[which]

    batch = make(lengths)
    for which in (0, 1):
        check_sdpa(lambda x, w=which: run(x, w), batch, params=attention.parameters() if which == 0 else ())


@PAIRS
def test_ragged_weights_of_two_axes(queries: list[int], keys: list[int]) -> None:
    attention = module()
    q, k = make({"n": queries}), make({"m": keys}, "m 4", seed=1)
    weights = check_sdpa(lambda q, k: attention(q, k, k)[1], q, k, grad=min(keys) > 0)
    assert weights.order == (0, 1, 2)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("kind", ["boolean", "added"])
@pytest.mark.parametrize("shape", ["n n", "batch n n"])
def test_module_masks(need_weights: bool, kind: str, shape: str) -> None:
    """(N, M) for all, and (B * H, N, M)."""
    attention, batch = module(), make([3, 2, 5])
    mask = torch.randn((5, 5) if shape == "n n" else (3 * HEADS, 5, 5), dtype=torch.float64)
    mask.diagonal(dim1=-2, dim2=-1).fill_(-1.0)
    mask = mask > 0.2 if kind == "boolean" else mask
    (x,) = pack(batch)
    out = attention(x, x, x, attn_mask=mask, need_weights=need_weights)
    for i, sample in enumerate(batch.samples):
        n = len(sample)
        part = (mask if shape == "n n" else mask[i * HEADS : (i + 1) * HEADS])[..., :n, :n]
        want = attention(sample[None], sample[None], sample[None], attn_mask=part, need_weights=need_weights)
        torch.testing.assert_close(out[0].to_list()[i], want[0][0])
        if need_weights:
            torch.testing.assert_close(out[1].to_list()[i], want[1][0])


@pytest.mark.parametrize("packed_mask", [True, False])
@pytest.mark.parametrize("attn", [True, False])
def test_a_key_padding_mask_hides_keys(packed_mask: bool, attn: bool) -> None:
    attention, batch = module(), make([3, 2, 5])
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[0, 2:] = padding[1, 2:] = True  # the third key of the first sample, and what no sample has
    mask = torch.zeros(5, 5, dtype=torch.bool).fill_diagonal_(True) if attn else None
    (x,) = pack(batch)
    given: Any = padding
    if packed_mask:
        given = ops.PackedTensor(
            padding[[0, 0, 0, 1, 1, 2, 2, 2, 2, 2], [0, 1, 2, 0, 1, 0, 1, 2, 3, 4]], x.grid, (0, 1)
        )
    out, weights = attention(x, x, x, key_padding_mask=given, attn_mask=mask)
    for i, s in enumerate(batch.samples):
        n = len(s)
        part = None if mask is None else mask[:n, :n]
        want = attention(s[None], s[None], s[None], key_padding_mask=padding[i : i + 1, :n], attn_mask=part)
        torch.testing.assert_close(out.to_list()[i], want[0][0])
        torch.testing.assert_close(weights.to_list()[i], want[1][0])


MORE_KEYS = pytest.mark.parametrize(
    "more",
    [
        {"add_bias_kv": True},
        {"add_zero_attn": True},
        {"add_bias_kv": True, "add_zero_attn": True, "kdim": 6, "vdim": 3},
    ],
    ids=["bias_kv", "zero_attn", "both"],
)


def with_more_keys(
    more: dict[str, Any], queries: list[int], keys: list[int]
) -> tuple[nn.MultiheadAttention, Ragged, Ragged, Ragged]:
    """A module that adds keys, and its operands; keys and values have an axis of their own."""
    attention = module(**more)
    k = make({"m": keys}, f"m {attention.kdim}", seed=1)
    return attention, make({"n": queries}), k, make({"m": keys}, f"m {attention.vdim}", seed=2)


@MORE_KEYS
@PAIRS
@pytest.mark.parametrize("average", [True, False])
def test_a_module_that_adds_keys_to_every_sample(
    more: dict[str, Any], queries: list[int], keys: list[int], average: bool
) -> None:
    """Also where a sample has none of its own."""
    attention, q, k, v = with_more_keys(more, queries, keys)
    for options in ({"need_weights": False}, {"average_attn_weights": average}):
        check_sdpa(lambda *x, o=options: attention(*x, **o)[0], q, k, v, params=attention.parameters())
    check_sdpa(lambda *x: attention(*x, average_attn_weights=average)[1], q, k, v)


@pytest.mark.parametrize("more", [{}, *MORE_KEYS.mark.args[1]], ids=str)
@pytest.mark.parametrize("kind", ["boolean", "added"])
@pytest.mark.parametrize("shape", ["n m", "batch n m", "padding", "both", "packed"])
@pytest.mark.parametrize(("queries", "keys"), [([3, 2, 5], [4, 3, 2]), ([3], [4]), ([1], [1])])
def test_masks_of_a_module(
    more: dict[str, Any], kind: str, shape: str, queries: list[int], keys: list[int]
) -> None:
    """They say nothing of what was added, which every query sees."""
    attention, q, k, v = with_more_keys(more, queries, keys)
    packed, generator = pack(q, k, v), torch.Generator().manual_seed(0)
    size = [max(queries), max(keys)]
    mask, padding = (
        torch.randn(s, generator=generator, dtype=torch.float64)
        for s in ([len(queries) * HEADS, *size] if shape == "batch n m" else size, [len(keys), size[1]])
    )
    mask[..., 0] = padding[:, 0] = -1.0
    if kind == "boolean":
        mask, padding = mask > 0.3, padding > 0.3
    given: dict[str, Any] = {"attn_mask": None if shape == "padding" else mask}
    if shape in ("padding", "both"):
        given["key_padding_mask"] = padding
    if shape == "packed":
        given["key_padding_mask"] = ops.PackedTensor.from_padded(padding, keys)
    out, weights = attention(*packed, **given)
    for i, sample in enumerate(zip(q.samples, k.samples, v.samples)):
        n, m = len(sample[0]), len(sample[1])
        part = mask if mask.dim() == 2 else mask[i * HEADS : (i + 1) * HEADS]
        part = None if shape == "padding" else part[..., :n, :m]
        hidden = padding[i : i + 1, :m] if "key_padding_mask" in given else None
        want = attention(*(s[None] for s in sample), attn_mask=part, key_padding_mask=hidden)
        torch.testing.assert_close(out.to_list()[i], want[0][0])
        torch.testing.assert_close(weights.to_list()[i], want[1][0])
        assert weights.to_list()[i].shape == (
            n,
            m + more.get("add_bias_kv", 0) + more.get("add_zero_attn", 0),
        )


def test_causal_of_a_module_that_adds_keys_reads_the_mask() -> None:
    attention, batch = module(add_bias_kv=True), make([3, 1, 5])
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    check_sdpa(
        lambda x, m: attention(x, x, x, attn_mask=m, is_causal=isinstance(x, ops.PackedTensor))[0],
        batch,
        Dense(mask, "n n"),
        params=attention.parameters(),
    )
    with pytest.raises(NotImplementedError, match="is_causal says nothing of the keys .* as attn_mask"):
        attention(*[*pack(batch)] * 3, is_causal=True, need_weights=False)


def test_static_keys_and_half_of_a_bias_are_refused() -> None:
    attention = module(add_bias_kv=True)
    (x,) = (p.transpose(0, 1) for p in pack(make([3, 5])))
    weights = (attention.in_proj_weight, attention.in_proj_bias)
    rest = (0.0, attention.out_proj.weight, attention.out_proj.bias)
    with pytest.raises(NotImplementedError, match="static_k and static_v: .* scaled_dot_product_attention"):
        F.multi_head_attention_forward(
            x, x, x, 4, HEADS, *weights, None, None, False, *rest, static_k=torch.zeros(4, 3, 2)
        )
    with pytest.raises(ValueError, match="bias_k and bias_v go together"):
        F.multi_head_attention_forward(x, x, x, 4, HEADS, *weights, attention.bias_k, None, False, *rest)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_an_encoder_with_a_mask_and_padding(training: bool, batch_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(4, HEADS, 8, 0.0, batch_first=batch_first, dtype=torch.float64)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    batch = make([3, 1, 5])
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)

    def fn(x: Any, m: Any) -> Any:
        x = x if batch_first else x.transpose(0, 1)
        out = model(x, mask=m)
        return out if batch_first else out.transpose(0, 1)

    check_sdpa(fn, batch, Dense(mask, "n n"), params=model.parameters())
    (x,) = pack(batch)
    padding = ~x.mask()
    moved = x if batch_first else x.transpose(0, 1)
    torch.testing.assert_close(
        model(moved, src_key_padding_mask=padding).values, model(moved).values, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_an_unmodified_transformer(batch_first: bool, training: bool) -> None:
    model = nn.Transformer(4, HEADS, 1, 2, 8, dropout=0.0, batch_first=batch_first, dtype=torch.float64)
    model.train(training)
    x, y = make({"n": [2, 3, 4]}), make({"m": [4, 1, 3]}, "m 4", seed=1)
    mask = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)

    def fn(x: Any, y: Any, m: Any) -> Any:
        if batch_first:
            return model(x, y, tgt_mask=m)
        return model(x.transpose(0, 1), y.transpose(0, 1), tgt_mask=m).transpose(0, 1)

    check_sdpa(fn, x, y, Dense(mask, "m m"), params=model.parameters())


@LENGTHS
def test_attention_as_vision_models_write_it(lengths: list[int]) -> None:
    """``B, N, C = x.shape``; reshape, permute(2, 0, 3, 1, 4), unbind."""
    qkv, out = nn.Linear(4, 12, dtype=torch.float64), nn.Linear(4, 4, dtype=torch.float64)

    def attention(x: Any) -> Any:
        B, N, C = x.shape
        q, k, v = qkv(x).reshape(B, N, 3, HEADS, C // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        y = sdpa(q, k, v)
        return out(y.transpose(1, 2).reshape(B, N, C))

    check_sdpa(attention, make(lengths), params=[*qkv.parameters(), *out.parameters()])


def test_dropped_weights_are_those_that_the_output_was_made_of() -> None:
    attention = module(dropout=0.5, bias=False)
    with torch.no_grad():
        attention.in_proj_weight[8:] = torch.eye(4)
        attention.out_proj.weight.copy_(torch.eye(4))
    batch = make([6, 3])
    (x,) = pack(batch)
    out, weights = attention(x, x, x, average_attn_weights=False)
    for o, w, s in zip(out.to_list(), weights.to_list(), batch.samples):
        heads = s.view(len(s), HEADS, 2).transpose(0, 1)
        torch.testing.assert_close(o, (w @ heads).transpose(0, 1).flatten(1))
    assert_matches(weights, [w for w in weights.to_list()])

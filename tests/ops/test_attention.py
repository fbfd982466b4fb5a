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

from ops import PackedTensor
from ops.testing import Dense, assert_matches, check, pack, per_sample
from tests.strategies import PROFILES, make

HEADS = 2
LENGTHS = pytest.mark.parametrize("lengths", list(PROFILES.values()), ids=list(PROFILES))
sdpa = F.scaled_dot_product_attention


def heads(x: Any) -> Any:
    """(B, N, C) -> (B, h, N, d), as every transformer writes it."""
    return x.view(x.shape[0], x.shape[1], HEADS, x.shape[2] // HEADS).transpose(1, 2)


def merged(x: Any) -> Any:
    return x.transpose(1, 2).flatten(2)


def attend(q: Any, k: Any, v: Any, **kwargs: Any) -> Any:
    return merged(sdpa(heads(q), heads(k), heads(v), **kwargs))


def check_attention(fn: Callable, *operands: Any, **kwargs: Any) -> Any:
    """The reference runs the plain formula: the fused CPU kernel dies on empty sequences."""
    batch_dim = kwargs.get("batch_dim", 0)

    def reference(*ops: Any) -> list[Tensor]:
        with sdpa_kernel(SDPBackend.MATH):
            return per_sample(fn, *ops, batch_dim=batch_dim)

    return check(fn, *operands, reference=reference, **kwargs)


# ---------------------------------------------------------------- the function


@LENGTHS
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"scale": 0.3}], ids=["plain", "causal", "scale"]
)
def test_self_attention(lengths: list[int], options: dict[str, Any]) -> None:
    q, k, v = (make(lengths, seed=seed) for seed in range(3))
    check_attention(lambda q, k, v: attend(q, k, v, **options), q, k, v)
    check_attention(lambda x: attend(x, x, x, **options), q)


def test_operands_built_apart() -> None:
    q, k, v = (make([3, 0, 5], seed=seed) for seed in range(3))
    check_attention(attend, q, k, v, share=False)


@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        ([2, 3], [4, 1]),
        ([2, 3], [0, 3]),
        ([0, 3], [2, 3]),
        ([0, 2], [0, 0]),
        ([1, 1, 0], [1, 0, 1]),
        ([5], [2]),
        ([2, 2], [3, 3]),
    ],
    ids=["other_lengths", "case_8", "empty_queries", "nothing", "all_at_most_one", "one_sample", "equal"],
)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_cross_attention(queries: list[int], keys: list[int], causal: bool) -> None:
    q = make({"n": queries}, "n 4")
    k, v = (make({"m": keys}, "m 4", seed=seed) for seed in (1, 2))
    check_attention(lambda q, k, v: attend(q, k, v, is_causal=causal), q, k, v)


def test_attention_over_no_keys_is_exactly_zero_with_finite_gradients() -> None:
    """Case 8: query lengths [2, 3], key lengths [0, 3]."""
    q, k, v = pack(
        make({"n": [2, 3]}, "n 4"), make({"m": [0, 3]}, "m 4", seed=1), make({"m": [0, 3]}, "m 4", seed=2)
    )
    for x in (q, k, v):
        x.requires_grad_()
    out = attend(q, k, v)
    assert torch.equal(out.to_list()[0], torch.zeros(2, 4, dtype=torch.float64))
    out.sum().backward()
    for x in (q, k, v):
        assert x.grad.values.isfinite().all()


@pytest.mark.parametrize(
    "wanted", [(True, False, False), (False, True, False), (False, False, True)], ids=str
)
def test_gradients_of_one_operand_alone(wanted: tuple[bool, ...]) -> None:
    batches = [make([3, 0, 5], "2 n 4", seed=seed) for seed in range(3)]
    packed = [x.requires_grad_(flag) for x, flag in zip(pack(*batches), wanted)]
    dense = [[s.clone().requires_grad_(flag) for s in b.samples] for b, flag in zip(batches, wanted)]
    sdpa(*packed).square().sum().backward()
    for i in (0, 2):
        sdpa(*(d[i] for d in dense)).square().sum().backward()
    for x, samples, flag in zip(packed, dense, wanted):
        assert (x.grad is not None) == flag
        if flag:
            assert_matches(x.grad, [torch.zeros_like(s) if s.grad is None else s.grad for s in samples])


def test_autocast_gives_what_it_gives_dense() -> None:
    model = encoder(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check_attention(model, make([3, 0, 5], dtype=torch.float32), grad=False, rtol=5e-2, atol=5e-2)


def test_values_may_have_another_width() -> None:
    q, k = (make([3, 0, 5], "2 n 4", seed=seed) for seed in (0, 1))
    check_attention(sdpa, q, k, make([3, 0, 5], "2 n 6", seed=2))


@pytest.mark.parametrize("pattern", ["n 4", "2 n 4", "n 2 4", "3 2 n 4"])
def test_any_number_of_leading_dims(pattern: str) -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        moved = (x.transpose(1, 2) if pattern == "n 2 4" else x for x in (q, k, v))
        return sdpa(*moved)

    check_attention(fn, *(make([3, 0, 5], pattern, seed=seed) for seed in range(3)))


@given(st.data())
def test_attention_of_any_lengths(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 4))
    sizes = st.lists(st.integers(0, 5), min_size=count, max_size=count)
    q = make({"n": data.draw(sizes)}, "2 n 4")
    lengths = {"m": data.draw(sizes)}
    k, v = (make(lengths, "2 m 4", seed=seed) for seed in (1, 2))
    causal = data.draw(st.booleans())
    check_attention(lambda q, k, v: sdpa(q, k, v, is_causal=causal), q, k, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(dtype: torch.dtype) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    operands = [make([3, 0, 40], "2 n 16", dtype=dtype, seed=seed) for seed in range(3)]
    check_attention(sdpa, *operands, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("weights", [False, True])
def test_second_derivatives_are_refused_and_not_lost(weights: bool) -> None:
    """A penalty on gradients would silently be a constant; written out it has its gradient."""
    module = nn.MultiheadAttention(4, HEADS, batch_first=True, dtype=torch.float64)
    (x,) = (x.requires_grad_() for x in pack(make([3, 2])))
    out = module(x, x, x)[1] if weights else sdpa(*[heads(x)] * 3)
    (grad,) = torch.autograd.grad(out.square().sum(), [x.values], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"no second derivative; written out as \(q @ k.mT"):
        (out.sum() + grad.square().sum()).backward()

    def written_out(q: Any, k: Any, v: Any) -> Any:
        return (q @ k.mT * 0.5).softmax(-1) @ v

    def penalty(x: Any) -> Any:
        leaf = x.values if isinstance(x, PackedTensor) else x
        (grad,) = torch.autograd.grad(written_out(x, x, x).square().sum(), [leaf], create_graph=True)
        return torch.autograd.grad(grad.square().sum(), [leaf])[0]

    want = [penalty(s[None].clone().requires_grad_())[0] for s in make([3, 2]).samples]
    torch.testing.assert_close(penalty(x), torch.cat(want))


def test_batches_that_differ_are_refused() -> None:
    q, k, v = pack(make([3, 5], "2 n 4"))[0], *pack(make([3, 5, 2], "2 n 4"), make([3, 5, 2], "2 n 4"))
    with pytest.raises(ValueError, match="queries of 2 samples, keys of 3"):
        sdpa(q, k, v)
    with pytest.raises(ValueError, match="key against value: the structures differ: sample 0 has 3 and 2"):
        sdpa(k, k, pack(make([2, 5, 3], "2 n 4"))[0])


def test_a_dense_mask_and_shared_heads_of_keys() -> None:
    operands = [make([3, 2, 5], "2 n 4", seed=seed) for seed in range(3)]
    for mask in (
        torch.ones(5, 5, dtype=torch.bool).tril(),
        torch.arange(25.0, dtype=torch.float64).view(5, 5),
    ):
        check_attention(lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), *operands, Dense(mask, "n n"))
    check_attention(lambda q, k, v: sdpa(q, k[:, :1], v[:, :1], enable_gqa=True), *operands)


WRONG: dict[str, tuple[Callable, type[Exception], str]] = {
    "widths": (lambda x, y: sdpa(x, y, y), ValueError, "features of 4 and 6 differ"),
    "heads": (lambda x, y: sdpa(x, x[:, :1], x[:, :1]), ValueError, "2, 1 and 1 heads.*enable_gqa=True"),
    "heads_of_values": (lambda x, y: sdpa(x, x, x[:, :1]), ValueError, "2, 2 and 1 heads"),
    "more_heads_of_keys": (lambda x, y: sdpa(x[:, :1], x, x), ValueError, "1, 2 and 2 heads"),
    "rank": (
        lambda x, y: sdpa(x, x[:, 0], x[:, 0]),
        ValueError,
        r"\(0, 2, 1, 3\), \(0, 1, 2\) and \(0, 1, 2\)",
    ),
    "dense_keys": (
        lambda x, y: sdpa(x, torch.zeros(2, 2, 5, 4), torch.zeros(2, 2, 5, 4)),
        TypeError,
        "must all be packed, or none; a dense one is packed by PackedTensor.from_padded",
    ),
    "batch_inside": (
        lambda x, y: sdpa(x, x.transpose(0, 1), x.transpose(0, 1)),
        ValueError,
        "batch, heads, positions and features at the same dims",
    ),
    "positions_last": (lambda x, y: sdpa(*[x.mT] * 3), ValueError, "one ragged axis, at dim -2"),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_operands_that_do_not_fit_are_refused(name: str) -> None:
    """The fused kernel trusts its sizes: it must never see these."""
    call, error, message = WRONG[name]
    operands = [make([3, 5], "2 n 4", dtype=torch.float32), make([3, 5], "2 n 6", dtype=torch.float32)]
    with pytest.raises(error, match=message):
        call(*pack(*operands))


ORDERS: dict[str, tuple[bool, Callable[[Any], Any]]] = {
    "batch_before_positions": (False, lambda x: x),
    "positions_before_batch": (True, lambda x: x.transpose(0, 1)),
    "features_before_positions": (True, lambda x: x.transpose(1, 2)),
}


@pytest.mark.parametrize("name", list(ORDERS))
def test_multihead_attention_refuses_dims_in_another_order(name: str) -> None:
    """(B, n, E) for a module that reads (n, B, E): dense attends over the samples, packed must not guess."""
    batch_first, moved = ORDERS[name]
    module = nn.MultiheadAttention(4, HEADS, batch_first=batch_first, dtype=torch.float64)
    operand = moved(*pack(make([4, 4])))
    with pytest.raises(ValueError, match=r"needs positions, batch, features: .*batch_first=True \(B, n, E\)"):
        module(operand, operand, operand, need_weights=False)


def test_multihead_attention_takes_any_storage_order() -> None:
    module = nn.MultiheadAttention(4, HEADS, batch_first=True, dtype=torch.float64)
    x = make([3, 0, 5], "4 n")
    check_attention(
        lambda x: module(*[x.transpose(1, 2)] * 3, need_weights=False)[0], x, params=module.parameters()
    )


# ---------------------------------------------------------------- modules


def encoder(layers: int = 2, **options: Any) -> nn.TransformerEncoder:
    settings = {"d_model": 4, "nhead": HEADS, "dim_feedforward": 8, "dropout": 0.0, "batch_first": True}
    layer = nn.TransformerEncoderLayer(**{**settings, "dtype": torch.float64, **options})
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


@LENGTHS
@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_an_unmodified_transformer_encoder(lengths: list[int], norm_first: bool, training: bool) -> None:
    model = encoder(norm_first=norm_first).train(training)
    check_attention(model, make(lengths), params=model.parameters())


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_an_encoder_without_gradients(training: bool) -> None:
    model = encoder().train(training)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            check_attention(model, make([3, 0, 5]), grad=False)


@pytest.mark.filterwarnings("ignore")
def test_an_encoder_with_default_arguments() -> None:
    layer = nn.TransformerEncoderLayer(
        4, HEADS, 8, dropout=0.0, activation="gelu", batch_first=True, dtype=torch.float64
    )
    model = nn.TransformerEncoder(layer, 2)
    for training in (True, False):
        model.train(training)
        check_attention(model, make([3, 0, 5]), params=model.parameters())


@pytest.mark.filterwarnings("ignore")
def test_an_encoder_with_default_arguments_and_a_padding_mask_stays_packed_without_gradients() -> None:
    layer = nn.TransformerEncoderLayer(4, HEADS, 8, batch_first=True, dtype=torch.float64)
    model = nn.TransformerEncoder(layer, 2).eval()
    (x,) = pack(make([3, 2, 5]))
    with torch.no_grad():
        out = model(x, src_key_padding_mask=~x.mask())
        for sample, got in zip(x.to_list(), out.to_list()):
            torch.testing.assert_close(got, model(sample[None])[0])


@LENGTHS
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_an_encoder_with_the_batch_second(lengths: list[int], training: bool) -> None:
    model = encoder(batch_first=False).train(training)
    check_attention(
        lambda x: model(x.transpose(0, 1)).transpose(0, 1), make(lengths), params=model.parameters()
    )


def test_a_causal_encoder() -> None:
    model = encoder()
    batch = make([3, 0, 5])
    mask = Dense(torch.ones(5, 5, dtype=torch.bool).triu(1), "n n")
    check_attention(lambda x, m: model(x, mask=m, is_causal=True), batch, mask, params=model.parameters())


@LENGTHS
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch_first", "batch_second"])
def test_multihead_attention_without_weights(lengths: list[int], batch_first: bool) -> None:
    module = nn.MultiheadAttention(4, HEADS, batch_first=batch_first, dtype=torch.float64)

    def fn(x: Any) -> Any:
        x = x if batch_first else x.transpose(0, 1)
        out, weights = module(x, x, x, need_weights=False)
        assert weights is None
        return out if batch_first else out.transpose(0, 1)

    check_attention(fn, make(lengths), params=module.parameters())


@pytest.mark.parametrize(("queries", "keys"), [([2, 3], [4, 1]), ([2, 3], [0, 3]), ([3, 3], [3, 3])])
def test_multihead_cross_attention(queries: list[int], keys: list[int]) -> None:
    module = nn.MultiheadAttention(4, HEADS, batch_first=True, dtype=torch.float64)
    q, k = make({"n": queries}, "n 4"), make({"m": keys}, "m 4", seed=1)
    check_attention(lambda q, k: module(q, k, k, need_weights=False)[0], q, k, params=module.parameters())


def test_multihead_attention_with_other_key_and_value_widths() -> None:
    module = nn.MultiheadAttention(4, HEADS, kdim=6, vdim=3, batch_first=True, dtype=torch.float64)
    q, k, v = make({"n": [2, 3]}, "n 4"), make({"m": [4, 1]}, "m 6"), make({"m": [4, 1]}, "m 3")
    check_attention(
        lambda q, k, v: module(q, k, v, need_weights=False)[0], q, k, v, params=module.parameters()
    )


def test_a_classifier_of_reviews() -> None:
    """Embedding, encoder, mean, linear: all parameters' gradients."""
    embedding, head = nn.Embedding(6, 4, dtype=torch.float64), nn.Linear(4, 3, dtype=torch.float64)
    model = encoder()
    params = [*embedding.parameters(), *model.parameters(), *head.parameters()]
    for lengths in ([3, 1, 5], [4, 4], [2]):
        ids = make(lengths, "n", dtype=torch.int64)
        check_attention(lambda i: head(model(embedding(i)).mean(1)), ids, params=params)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(("targets", "sources"), [([2, 3], [4, 1]), ([3, 0, 5], [2, 1, 0]), ([4], [4])])
def test_an_unmodified_decoder(
    targets: list[int], sources: list[int], batch_first: bool, causal: bool
) -> None:
    """Over its own positions and over what was encoded; causal by ``tgt_is_causal`` alone."""
    options: dict[str, Any] = {"dropout": 0.0, "batch_first": batch_first, "dtype": torch.float64}
    layer = nn.TransformerDecoderLayer(4, HEADS, 8, **options)
    model = nn.TransformerDecoder(layer, 2, norm=nn.LayerNorm(4, dtype=torch.float64))

    def fn(x: Any, memory: Any) -> Any:
        options: dict[str, Any] = {"tgt_is_causal": causal}
        if isinstance(x, Tensor):
            below = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            options = {"tgt_mask": below} if causal else {}
        if batch_first:
            return model(x, memory, **options)
        return model(x.transpose(0, 1), memory.transpose(0, 1), **options).transpose(0, 1)

    x, memory = make({"n": targets}, "n 4"), make({"m": sources}, "m 4", seed=1)
    check_attention(fn, x, memory, params=model.parameters())

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

from ops.testing import Dense, Ragged, assert_matches, check, pack, per_sample
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


def test_second_derivatives_or_a_refusal() -> None:
    q, k, v = (x.requires_grad_() for x in pack(*(make([3, 2], "2 n 4", seed=seed) for seed in range(3))))
    (grad,) = torch.autograd.grad(sdpa(q, k, v).sum(), [q.values], create_graph=True)
    with pytest.raises((RuntimeError, NotImplementedError)):
        grad.square().sum().backward()
        if q.grad.values.any():
            raise NotImplementedError("supported")


def test_batches_that_differ_are_refused() -> None:
    q, k, v = pack(make([3, 5], "2 n 4"))[0], *pack(make([3, 5, 2], "2 n 4"), make([3, 5, 2], "2 n 4"))
    with pytest.raises((ValueError, RuntimeError)):
        sdpa(q, k, v)
    with pytest.raises((ValueError, RuntimeError), match="sample 0"):
        sdpa(k, k, pack(make([2, 5, 3], "2 n 4"))[0])


def test_a_sample_does_not_see_another() -> None:
    """Case 7, last part: bit for bit."""
    x = make([3, 4, 5], "2 n 4")
    changed = Ragged([x.samples[0], x.samples[1] * 7, x.samples[2]], x.pattern)
    before, after = (sdpa(*pack(b, b, b)).to_list() for b in (x, changed))
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[2], after[2])
    assert not torch.equal(before[1], after[1])


MASKS: dict[str, Callable] = {
    "dense_bool": lambda q, k, v: sdpa(q, k, v, attn_mask=torch.ones(5, 5, dtype=torch.bool).tril()),
    "dense_bias": lambda q, k, v: sdpa(q, k, v, attn_mask=torch.arange(25.0, dtype=torch.float64).view(5, 5)),
    "grouped": lambda q, k, v: sdpa(q, k[:, :1], v[:, :1], enable_gqa=True),
    "dropped": lambda q, k, v: sdpa(q, k, v, dropout_p=0.0),
}


@pytest.mark.parametrize("name", list(MASKS))
def test_masks_and_groups_are_right_or_refused(name: str) -> None:
    operands = [make([3, 2, 5], "2 n 4", seed=seed) for seed in range(3)]
    try:
        MASKS[name](*pack(*operands))
    except (NotImplementedError, TypeError):
        return
    mask = {
        "dense_bool": torch.ones(5, 5, dtype=torch.bool).tril(),
        "dense_bias": torch.arange(25.0).view(5, 5).double(),
    }
    if name not in mask:
        check_attention(MASKS[name], *operands)
        return
    dense = Dense(mask[name], "n n")
    check_attention(lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), *operands, dense, grad=False)


def test_a_packed_bias_is_right_or_refused() -> None:
    operands = [make([3, 2, 5], "2 n 4", seed=seed) for seed in range(3)]
    bias = make([3, 2, 5], "2 n n", seed=3)
    try:
        q, k, v, b = pack(*operands, bias)
        sdpa(q, k, v, attn_mask=b)
    except (NotImplementedError, TypeError):
        return
    check_attention(lambda q, k, v, b: sdpa(q, k, v, attn_mask=b), *operands, bias)


def test_dropout_keeps_the_expectation_or_is_refused() -> None:
    (x,) = pack(make([200, 100], "2 n 8"))
    try:
        out = sdpa(x * 0, x * 0, x * 0 + 1, dropout_p=0.5)
    except (NotImplementedError, TypeError):
        return
    assert out.values.std() > 0
    assert abs(out.values.mean() - 1) < 0.1


WRONG: dict[str, Callable] = {
    "widths": lambda x, y: sdpa(x, y, y),
    "heads": lambda x, y: sdpa(x, x[:, :1], x[:, :1]),
    "heads_of_values": lambda x, y: sdpa(x, x, x[:, :1]),
    "more_heads_of_keys": lambda x, y: sdpa(x[:, :1], x, x),
    "rank": lambda x, y: sdpa(x, x[:, 0], x[:, 0]),
    "dense_keys": lambda x, y: sdpa(x, torch.zeros(2, 2, 5, 4), torch.zeros(2, 2, 5, 4)),
    "batch_inside": lambda x, y: sdpa(x, x.transpose(0, 1), x.transpose(0, 1)),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_operands_that_do_not_fit_are_right_or_refused(name: str) -> None:
    """The fused kernel trusts its sizes: it must never see these."""
    operands = [make([3, 5], "2 n 4", dtype=torch.float32), make([3, 5], "2 n 6", dtype=torch.float32)]
    try:
        WRONG[name](*pack(*operands))
    except (NotImplementedError, TypeError, ValueError, RuntimeError):
        return
    check_attention(WRONG[name], *operands, rtol=1e-5, atol=1e-5)


def test_multihead_attention_refuses_a_batch_where_the_sequence_belongs() -> None:
    """(B, n, E) for a module that reads (n, B, E): dense attends over the samples, packed must not guess."""
    (x,) = pack(make([3, 5]))
    for module, operand in (
        (nn.MultiheadAttention(4, HEADS, batch_first=False, dtype=torch.float64), x),
        (nn.MultiheadAttention(4, HEADS, batch_first=True, dtype=torch.float64), x.transpose(0, 1)),
    ):
        with pytest.raises((NotImplementedError, TypeError, ValueError, RuntimeError)):
            module(operand, operand, operand, need_weights=False)


def test_multihead_attention_refuses_features_that_are_not_last() -> None:
    module = nn.MultiheadAttention(4, HEADS, batch_first=True, dtype=torch.float64)
    (x,) = pack(make([4, 4]))
    with pytest.raises((NotImplementedError, TypeError, ValueError, RuntimeError)):
        module(x.transpose(1, 2), x.transpose(1, 2), x.transpose(1, 2), need_weights=False)


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
    try:
        model(*pack(batch), mask=torch.ones(5, 5, dtype=torch.bool).triu(1), is_causal=True)
    except (NotImplementedError, TypeError):
        return
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


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_unusual_multihead_options_are_right_or_refused(options: dict[str, bool]) -> None:
    module = nn.MultiheadAttention(4, HEADS, batch_first=True, dtype=torch.float64, **options)
    try:
        module(*pack(make([3, 5])) * 3, need_weights=False)
    except (NotImplementedError, TypeError):
        return
    check_attention(
        lambda x: module(x, x, x, need_weights=False)[0], make([3, 5]), params=module.parameters()
    )


def test_attention_weights_are_right_or_refused() -> None:
    module = nn.MultiheadAttention(4, HEADS, batch_first=True, dtype=torch.float64)
    batch = make([3, 5])
    try:
        _, weights = module(*pack(batch) * 3)
    except (NotImplementedError, TypeError):
        return
    assert_matches(weights, per_sample(lambda x: module(x, x, x)[1], batch))


def test_a_classifier_of_reviews() -> None:
    """Embedding, encoder, mean, linear: all parameters' gradients."""
    embedding, head = nn.Embedding(6, 4, dtype=torch.float64), nn.Linear(4, 3, dtype=torch.float64)
    model = encoder()
    params = [*embedding.parameters(), *model.parameters(), *head.parameters()]
    for lengths in ([3, 1, 5], [4, 4], [2]):
        ids = make(lengths, "n", dtype=torch.int64)
        check_attention(lambda i: head(model(embedding(i)).mean(1)), ids, params=params)


def test_a_decoder_layer_is_right_or_refused() -> None:
    layer = nn.TransformerDecoderLayer(4, HEADS, 8, dropout=0.0, batch_first=True, dtype=torch.float64)
    x, memory = make({"n": [2, 3]}, "n 4"), make({"m": [4, 1]}, "m 4", seed=1)
    try:
        layer(*pack(x, memory))
    except (NotImplementedError, TypeError):
        return
    check_attention(layer, x, memory, params=layer.parameters())

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ops import PackedTensor
from ops.testing import Dense, Ragged, assert_matches, check, pack
from tests.strategies import PROFILES, batches, dim_orders, laid_out, make, rotated

LENGTHS = pytest.mark.parametrize("lengths", list(PROFILES.values()), ids=list(PROFILES))
STRUCTURE_ERROR = (ValueError, RuntimeError)

#: Operators and the domain to try them on: any number, (-1, 1), above 0, above 1.
UNARY_TORCH = {
    "any": "abs asinh atan ceil cos cosh deg2rad erf erfc exp exp2 expm1 floor frac isfinite isinf isnan "
    "logical_not nan_to_num neg positive rad2deg relu round selu sgn sigmoid sign signbit sin sinc sinh "
    "square tan tanh trunc",
    "unit": "acos asin atanh erfinv",
    "positive": "digamma lgamma log log10 log1p log2 reciprocal rsqrt sqrt",
    "above_one": "acosh",
}
UNARY_FUNCTIONAL = (
    "celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu6 selu silu "
    "softplus softshrink softsign tanhshrink"
)
UNARY_CONFIGURED: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "leaky_relu_slope": lambda x: F.leaky_relu(x, 0.3),
    "threshold": lambda x: F.threshold(x, 0.1, 20.0),
    "clamp": lambda x: x.clamp(-0.5, 0.7),
    "clamp_min": lambda x: x.clamp(min=0.1),
    "clamp_max": lambda x: torch.clamp_max(x, 0.1),
    "nan_to_num": lambda x: torch.nan_to_num(x, nan=1.0),
    "round_decimals": lambda x: torch.round(x, decimals=1),
    "logit_eps": lambda x: torch.logit(x, eps=1e-2),
    "softplus_beta": lambda x: F.softplus(x, beta=2.0),
    "module": torch.nn.GELU(),
    "sequential": torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Tanh()),
    "abs": abs,
    "neg": operator.neg,
    "pos": operator.pos,
    "ones_like": torch.ones_like,
    "zeros_like": torch.zeros_like,
    "full_like": lambda x: torch.full_like(x, 2.5),
}
BINARY = (
    "add sub mul div true_divide floor_divide pow remainder fmod maximum minimum fmax fmin atan2 hypot "
    "copysign logaddexp logaddexp2 eq ne lt le gt ge logical_and logical_or logical_xor xlogy float_power"
)
#: Dense PyTorch has no derivative for these.
WITHOUT_GRADIENT = {"floor_divide", "floordiv", "mod"}
OPERATORS = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.pow,
    operator.eq,
    operator.ne,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
]


def in_domain(batch: Ragged, domain: str) -> Ragged:
    moves = {
        "any": lambda s: s,
        "unit": lambda s: s.tanh() * 0.9,
        "positive": lambda s: s.abs() + 0.5,
        "above_one": lambda s: s.abs() + 1.5,
    }
    return Ragged([moves[domain](s) for s in batch.samples], batch.pattern)


UNARY = [(getattr(torch, name), domain) for domain, names in UNARY_TORCH.items() for name in names.split()]
UNARY += [(getattr(F, name), "any") for name in UNARY_FUNCTIONAL.split()]
UNARY_IDS = [fn.__name__ + "_" + domain for fn, domain in UNARY]


@pytest.mark.parametrize(("fn", "domain"), UNARY, ids=UNARY_IDS)
def test_unary(fn: Callable, domain: str) -> None:
    check(fn, in_domain(make([3, 0, 5]), domain))


@pytest.mark.parametrize("name", "abs cos exp neg relu sigmoid square tanh".split())
def test_unary_methods(name: str) -> None:
    check(lambda x: getattr(x, name)(), make([3, 0, 5], "3 n 4"))


@pytest.mark.parametrize("fn", list(UNARY_CONFIGURED.values()), ids=list(UNARY_CONFIGURED))
def test_unary_with_arguments(fn: Callable) -> None:
    check(fn, make([3, 0, 5]))


@given(laid_out(), st.sampled_from([torch.tanh, F.gelu, torch.isfinite, operator.neg]))
def test_unary_on_any_layout(case: tuple[Ragged, tuple[int, ...]], fn: Callable) -> None:
    batch, order = case
    check(lambda x: fn(x.permute(order)), batch, batch_dim=order.index(0))


@pytest.mark.parametrize("name", BINARY.split())
@pytest.mark.parametrize("share", [True, False], ids=["shared_axes", "built_apart"])
def test_binary(name: str, share: bool) -> None:
    x, y = (in_domain(make([3, 0, 5], seed=seed), "positive") for seed in (0, 1))
    check(getattr(torch, name), x, y, share=share, grad=name not in WITHOUT_GRADIENT)


@pytest.mark.parametrize("name", BINARY.split())
def test_binary_with_a_scalar(name: str) -> None:
    fn = getattr(torch, name)
    x = in_domain(make([3, 0, 5]), "positive")
    if name in {
        "maximum",
        "minimum",
        "fmax",
        "fmin",
        "atan2",
        "hypot",
        "copysign",
        "logaddexp",
        "logaddexp2",
    }:
        scalar = torch.tensor(1.5, dtype=torch.float64)
    elif name.startswith("logical"):
        scalar = torch.tensor(True)
    else:
        scalar = 1.5
    check(lambda a: fn(a, scalar), x, grad=name not in WITHOUT_GRADIENT)


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.__name__)
def test_python_operators_both_ways_round(op: Callable) -> None:
    x = in_domain(make([3, 0, 5]), "positive")
    dense = torch.rand(4, dtype=torch.float64) + 0.5
    grad = op.__name__ not in WITHOUT_GRADIENT
    check(lambda a: op(a, 2), x, grad=grad)
    check(lambda a: op(1.5, a), x, grad=grad)
    check(lambda a, b: op(a, b), x, dense, grad=grad)
    check(lambda a, b: op(b, a), x, dense, grad=grad)
    check(op, x, make([3, 0, 5], seed=1), grad=grad)


@pytest.mark.parametrize("name", "add sub mul div pow maximum eq lt".split())
def test_binary_methods(name: str) -> None:
    x, y = in_domain(make([3, 0, 5]), "positive"), make([3, 0, 5], seed=1)
    check(lambda a, b: getattr(a, name)(b), x, y)
    check(lambda a, b: getattr(b, name)(a), x, torch.rand(4, dtype=torch.float64))


def test_add_and_sub_with_alpha() -> None:
    x, y = make([3, 5]), make([3, 5], seed=1)
    check(lambda a, b: torch.add(a, b, alpha=2), x, y)
    check(lambda a, b: a.sub(b, alpha=0.5), x, y)
    check(torch.rsub, x, y)


def test_div_with_rounding_mode() -> None:
    x, y = make([3, 5]), make([3, 5], seed=1)
    for mode in (None, "trunc", "floor"):
        check(lambda a, b, mode=mode: torch.div(a, b, rounding_mode=mode), x, y)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y, z: torch.where(x > 0, y, z),
        lambda x, y, z: torch.where(x > 0, y, 0.0),
        lambda x, y, z: y.where(x > 0, z),
        torch.lerp,
        lambda x, y, z: torch.lerp(x, y, 0.3),
        torch.addcmul,
        lambda x, y, z: torch.addcdiv(x, y, z.abs() + 1, value=0.5),
        lambda x, y, z: torch.clamp(x, y.minimum(z), y.maximum(z)),
        lambda x, y, z: x.masked_fill(y > z, -1.0),
        lambda x, y, z: (x + y) * z - x / (y.abs() + 1),
    ],
    ids=[
        "where",
        "where_scalar",
        "where_method",
        "lerp",
        "lerp_scalar",
        "addcmul",
        "addcdiv",
        "clamp",
        "fill",
        "mix",
    ],
)
@pytest.mark.parametrize("share", [True, False], ids=["shared_axes", "built_apart"])
def test_ternary(fn: Callable, share: bool) -> None:
    check(fn, *(make([3, 0, 5], seed=seed) for seed in range(3)), share=share)


@pytest.mark.parametrize("name", "bitwise_and bitwise_or bitwise_xor bitwise_left_shift".split())
def test_integer_operators(name: str) -> None:
    x, y = (make([3, 0, 5], dtype=torch.int64, seed=seed) for seed in (0, 1))
    check(getattr(torch, name), x, y)


def test_integer_and_bool_python_operators() -> None:
    x, y = (make([3, 0, 5], dtype=torch.bool, seed=seed) for seed in (0, 1))
    for op in (operator.and_, operator.or_, operator.xor):
        check(op, x, y)
    check(operator.invert, x)
    check(lambda a, b: (a & b) | ~a, x, y)


# ---------------------------------------------------------------- dense operands


@LENGTHS
@pytest.mark.parametrize("kind", ["4", "1", "", "batch 1 4", "batch 1 1", "n 4", "1 n 4", "batch n 4", "n 1"])
def test_dense_operands_broadcast_by_feature_sample_and_position(lengths: list[int], kind: str) -> None:
    sizes = {"batch": len(lengths), "n": max(lengths)}
    shape = [sizes.get(token) or (0 if token in sizes else int(token)) for token in kind.split()]
    dense = Dense(torch.randn(shape, dtype=torch.float64), kind)
    check(lambda x, d: x + d, make(lengths), dense)
    check(lambda x, d: d * x, make(lengths), dense)
    check(lambda x, d: torch.maximum(d, x), make(lengths), dense)


@pytest.mark.parametrize(
    "kind", ["m 4", "n 1 4", "n m 4", "1 m 4", "batch n m 4", "batch 1 m 4", "batch n 1 1"]
)
def test_dense_operands_broadcast_against_pairs(kind: str) -> None:
    lengths = {"n": [3, 0, 2], "m": [1, 5, 4]}
    sizes = {"batch": 3, "n": 3, "m": 5}
    shape = [sizes.get(token) or int(token) for token in kind.split()]
    check(lambda p, d: p * d, make(lengths, "n m 4"), Dense(torch.randn(shape, dtype=torch.float64), kind))


@pytest.mark.parametrize("kind", ["n", "1 n", "4 1", "4 n", "batch 4 1", "batch 1 n", "batch 4 n"])
def test_dense_operands_broadcast_against_channels_first(kind: str) -> None:
    sizes = {"batch": 3, "n": 5}
    shape = [sizes.get(token) or int(token) for token in kind.split()]
    dense = Dense(torch.randn(shape, dtype=torch.float64), kind)
    check(lambda x, d: x * d, make([3, 0, 5], "4 n"), dense)


@given(laid_out(patterns=("n 4", "n m 4", "3 n 4")), st.data())
def test_dense_operands_broadcast_in_any_order(
    case: tuple[Ragged, tuple[int, ...]], data: st.DataObject
) -> None:
    batch, order = case
    lengths = batch.lengths()
    tokens = ["batch", *batch.pattern.split()]
    kept = [tokens[d] if data.draw(st.booleans()) else "1" for d in order]
    sizes = {"batch": len(batch.samples), **{name: max(column) for name, column in lengths.items()}}
    shape = [sizes[token] if token in sizes else int(token) for token in kept]
    dense = Dense(torch.randn(shape, dtype=torch.float64), " ".join(kept))
    check(lambda x, d: x.permute(order) * d, batch, dense, batch_dim=order.index(0))


def test_a_sliced_position_embedding_is_added() -> None:
    """Case 11b: a learned embedding (1, N, C), cut to the batch's length."""
    table = torch.randn(1, 9, 4, dtype=torch.float64)
    for lengths in PROFILES.values():
        check(lambda x, t: x + t[:, : x.shape[1]], make(lengths), table)
        check(lambda x, t: x + t[:, : x.size(1)], make(lengths), table)


def test_a_position_operand_of_another_length_raises() -> None:
    (x,) = pack(make([3, 5]))
    for rows in (3, 6):
        with pytest.raises(STRUCTURE_ERROR):
            x + torch.zeros(rows, 4, dtype=torch.float64)
        with pytest.raises(STRUCTURE_ERROR):
            torch.zeros(2, rows, 4, dtype=torch.float64) + x


def test_a_sample_operand_of_another_batch_size_raises() -> None:
    (x,) = pack(make([3, 5]))
    with pytest.raises(STRUCTURE_ERROR):
        x + torch.zeros(3, 1, 4, dtype=torch.float64)


def test_rows_of_the_payload_are_no_operand() -> None:
    (x,) = pack(make([3, 5]))
    with pytest.raises(STRUCTURE_ERROR):
        x + torch.zeros(8, 4, dtype=torch.float64)


def test_a_reduced_tensor_broadcasts_back() -> None:
    check(lambda x: x - x.mean(1, keepdim=True), make([3, 1, 5]))
    check(lambda x: x * x.sum(1)[:, None], make([3, 1, 5]))
    check(lambda p: p - p.mean(2, keepdim=True) - p.mean((1, 2), keepdim=True), make([3, 1, 5], "n m 4"))


# ---------------------------------------------------------------- broadcasting that creates axes


@LENGTHS
def test_rows_and_columns_make_pairs(lengths: list[int]) -> None:
    check(lambda x: x[:, :, None] + x[:, None, :], make(lengths))
    check(lambda x, y: x[:, :, None] * y[:, None, :], make(lengths), make(lengths, seed=1))
    check(lambda x, y: x[:, None, :] - y[:, :, None], make(lengths), make(lengths, seed=1))


def test_pair_sum_of_two_and_three() -> None:
    """Case 4: offsets [0, 4, 13], each block as dense, gradcheck."""
    x, y = pack(make([2, 3]), make([2, 3], seed=1))
    pair = x[:, :, None] + y[:, None, :]
    assert pair.offsets.tolist() == [0, 4, 13]

    def values(u: Tensor, v: Tensor) -> Tensor:
        a, b = (PackedTensor(t, x.grid, x.order) for t in (u, v))
        return (a[:, :, None] + b[:, None, :]).sin().values

    inputs = [t.values.clone().requires_grad_() for t in (x, y)]
    assert torch.autograd.gradcheck(values, inputs)
    check(lambda a, b: a[:, :, None] + b[:, None, :], make([2, 3]), make([2, 3], seed=1))


@LENGTHS
def test_two_axes_make_rectangular_pairs(lengths: list[int]) -> None:
    x, y = make({"n": lengths}, "n 4"), make({"m": rotated(lengths, 1)}, "m 4", seed=1)
    check(lambda a, b: a[:, :, None] + b[:, None], x, y)
    check(lambda a, b: a[:, None] * b[:, :, None], x, y)
    check(lambda a, b: torch.maximum(a.unsqueeze(2), b.unsqueeze(1)), x, y)


def test_channels_first_make_pairs() -> None:
    x, y = make({"n": [3, 0, 2]}, "4 n"), make({"m": [1, 4, 2]}, "4 m", seed=1)
    check(lambda a, b: a[..., :, None] + b[..., None, :], x, y)
    check(lambda a: a[..., :, None] * a[..., None, :], x)


def test_vectors_make_pairs() -> None:
    x = make([3, 0, 5], "n")
    check(lambda a: a[:, :, None] * a[:, None, :], x)
    check(lambda a: a[:, None, :] < a[:, :, None], x)


def test_a_pair_takes_rows_and_columns() -> None:
    lengths = {"n": [3, 0, 2], "m": [1, 5, 4]}
    p, x, y = make(lengths, "n m 4"), make({"n": lengths["n"]}, "n 4"), make({"m": lengths["m"]}, "m 4")
    check(lambda p, x, y: p + x[:, :, None] + y[:, None], p, x, y)
    check(lambda p, x, y: x[:, :, None] * p * y[:, None], p, x, y)


def test_three_axes_come_from_three_vectors() -> None:
    x, y, z = (make({name: [2, 0, 3]}, name, seed=k) for k, name in enumerate("nmk"))
    check(lambda x, y, z: x[:, :, None, None] + y[:, None, :, None] * z[:, None, None], x, y, z)


def test_statics_broadcast_too() -> None:
    check(lambda x, y: x * y, make([3, 0, 5], "n 1 4"), make([3, 0, 5], "n 3 1", seed=1))
    check(lambda x, y: x + y, make([3, 0, 5], "n 3 4"), make([3, 0, 5], "n 1 4", seed=1))
    check(lambda x, y: x[..., None] + y[:, :, None], make([3, 0, 5]), make([3, 0, 5], seed=1))


def test_a_packed_operand_of_lower_rank_aligns_right() -> None:
    """(B, n) against (B, n, n) would align the batch with an axis: an error, as for dense B != n."""
    x, p = pack(make([3, 5], "n"), make([3, 5], "n n"))
    with pytest.raises(STRUCTURE_ERROR):
        p + x


@given(st.data())
def test_broadcasting_in_any_order(data: st.DataObject) -> None:
    """Operands whose dims are dropped to 1 at random, then permuted alike."""
    tokens = ["n", "m", "4"]
    count = data.draw(st.integers(1, 3))
    sizes = st.lists(st.integers(0, 3), min_size=count, max_size=count)
    lengths = {"n": data.draw(sizes), "m": data.draw(sizes)}
    kept = data.draw(st.sampled_from(["n 1 4", "n 1 1", "n m 1", "n m 4"]))
    other = data.draw(st.sampled_from(["1 m 4", "1 m 1", "n m 4", "n 1 4"]))
    order = data.draw(dim_orders(len(tokens) + 1))
    x, y = (make({k: v for k, v in lengths.items() if k in p.split()}, p, seed=len(p)) for p in (kept, other))
    check(lambda a, b: a.permute(order) * b.permute(order), x, y, batch_dim=order.index(0))


# ---------------------------------------------------------------- layouts of one structure


def test_static_dims_in_another_order_are_aligned() -> None:
    x, y = make([3, 0, 5], "n 3 4"), make([3, 0, 5], "n 4 3", seed=1)
    check(lambda a, b: a + b.transpose(2, 3), x, y)
    check(lambda a, b: a * b.transpose(1, 2), make([3, 0, 5]), make([3, 0, 5], "4 n", seed=1))


@LENGTHS
def test_a_transposed_square_pair_is_laid_out_anew(lengths: list[int]) -> None:
    p = make(lengths, "n n 4")
    check(lambda p: p + p.transpose(1, 2), p)
    check(lambda p: p.transpose(1, 2) * p, p)
    check(lambda p: p - p.mT, make(lengths, "n n"))
    check(lambda p: torch.where(p > p.mT, p, p.mT), make(lengths, "n n"))


def test_a_transposed_rectangular_pair_is_laid_out_anew() -> None:
    lengths = {"n": [3, 0, 2], "m": [1, 5, 4]}
    p, q = make(lengths, "n m 4"), make(lengths, "m n 4", seed=1)
    check(lambda p, q: p + q.transpose(1, 2), p, q)
    check(lambda p, q: q * p.transpose(1, 2), p, q)


@given(batches(patterns=("n m 4", "n n 4", "4 n m", "n n")), st.data())
def test_two_layouts_of_one_tensor_agree(batch: Ragged, data: st.DataObject) -> None:
    """x + (x brought to another layout and back) is 2x, whatever the layouts."""
    rank = len(batch.pattern.split()) + 1
    order = data.draw(dim_orders(rank))
    check(lambda x: x.permute(order) + (x * 3).permute(order), batch, batch_dim=order.index(0))


# ---------------------------------------------------------------- structures that differ


def test_two_equal_structures_built_apart_are_equal() -> None:
    """Case 2, first half."""
    for lengths in PROFILES.values():
        check(operator.sub, make(lengths), make(lengths, seed=1), share=False)
        check(
            lambda a, b: a[:, :, None] + b[:, None] + a[:, None],
            make(lengths),
            make(lengths, seed=1),
            share=False,
        )


@pytest.mark.parametrize(
    ("left", "right", "said"),
    [
        ([3, 0, 5], [0, 3, 5], ["sample 0", "3", "0"]),
        ([3, 0, 5], [3, 1, 5], ["sample 1", "0", "1"]),
        ([2, 2, 2], [2, 2, 3], ["sample 2", "2", "3"]),
        ([6, 6], [4, 4, 4], ["2", "3"]),
        ([0, 3], [0, 7], ["sample 1", "3", "7"]),
    ],
    ids=["case_2", "second", "last", "case_3", "with_empty"],
)
@pytest.mark.parametrize("op", [operator.add, torch.maximum, lambda a, b: torch.where(a > 0, a, b)])
def test_structures_that_differ_raise_and_say_where(
    left: list[int], right: list[int], said: list[str], op: Callable
) -> None:
    a, b = (PackedTensor.from_list(list(make(lengths).samples), "n 4") for lengths in (left, right))
    for pair in ((a, b), (b, a)):
        with pytest.raises(STRUCTURE_ERROR) as error:
            op(*pair)
        for words in said:
            assert words in str(error.value)


def test_pairs_without_cells_still_differ() -> None:
    """Case 3: sizes (0, 3) and (0, 7) hold no cell, and are not the same structure."""
    a, b = (PackedTensor.from_list([torch.zeros(0, m, 4)], "n m 4") for m in (3, 7))
    assert a.values.shape == b.values.shape
    with pytest.raises(STRUCTURE_ERROR) as error:
        a + b
    for words in ("sample 0", "3", "7"):
        assert words in str(error.value)
    with pytest.raises(STRUCTURE_ERROR):
        PackedTensor.from_list([torch.zeros(0, 3)], "n 3") + PackedTensor.from_list(
            [torch.zeros(0, 7)], "n 7"
        )


def test_pairs_with_as_many_cells_still_differ() -> None:
    a, b = (PackedTensor.from_list([torch.zeros(n, 6 // n, 4)], "n m 4") for n in (2, 3))
    with pytest.raises(STRUCTURE_ERROR, match="sample 0"):
        a + b


def test_one_axis_against_a_static_dim_raises() -> None:
    a = PackedTensor.from_list([torch.zeros(4, 4)] * 2, "n 4")
    b = PackedTensor.from_list([torch.zeros(4, 4)] * 2, "4 n")
    with pytest.raises(STRUCTURE_ERROR):
        a + b


# ---------------------------------------------------------------- dtypes


@pytest.mark.parametrize(
    "other", [torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float32])
def test_types_are_promoted_as_for_dense_tensors(dtype: torch.dtype, other: torch.dtype) -> None:
    x = make([3, 0, 5], dtype=dtype)
    check(torch.add, x, make([3, 0, 5], dtype=other, seed=1), grad=False)
    check(torch.mul, x, torch.ones(4, dtype=other), grad=False)
    check(torch.mul, x, torch.ones((), dtype=other), grad=False)
    check(lambda a: a * 2, x, grad=False)
    check(lambda a: a * 0.5, x, grad=False)


def test_true_division_of_integers_is_floating() -> None:
    x = make([3, 0, 5], dtype=torch.int64)
    check(lambda a: a / 2, x)
    check(lambda a: a // 2, x)
    check(lambda a: a.exp(), x)


# ---------------------------------------------------------------- in place


IN_PLACE: dict[str, Callable] = {
    "add_": lambda x, y: x.add_(y),
    "add_scalar": lambda x, y: x.add_(1.5),
    "add_alpha": lambda x, y: x.add_(y, alpha=2),
    "sub_": lambda x, y: x.sub_(y),
    "mul_": lambda x, y: x.mul_(y),
    "div_": lambda x, y: x.div_(y.abs() + 1),
    "pow_": lambda x, y: x.pow_(2),
    "clamp_": lambda x, y: x.clamp_(-0.5, 0.5),
    "relu_": lambda x, y: x.relu_(),
    "exp_": lambda x, y: x.exp_(),
    "neg_": lambda x, y: x.neg_(),
    "sigmoid_": lambda x, y: x.sigmoid_(),
    "tanh_": lambda x, y: x.tanh_(),
    "zero_": lambda x, y: x.zero_(),
    "fill_": lambda x, y: x.fill_(3.0),
    "copy_": lambda x, y: x.copy_(y),
    "masked_fill_": lambda x, y: x.masked_fill_(y > 0, 2.0),
    "lerp_": lambda x, y: x.lerp_(y, 0.3),
    "addcmul_": lambda x, y: x.addcmul_(y, y),
    "torch_relu_": lambda x, y: torch.relu_(x),
    "functional_relu": lambda x, y: F.relu(x, inplace=True),
    "functional_silu": lambda x, y: F.silu(x, inplace=True),
    "functional_leaky_relu": lambda x, y: F.leaky_relu(x, 0.2, inplace=True),
    "functional_elu": lambda x, y: F.elu(x, inplace=True),
    "iadd": lambda x, y: operator.iadd(x, y),
    "isub": lambda x, y: operator.isub(x, 2),
    "imul": lambda x, y: operator.imul(x, y),
    "itruediv": lambda x, y: operator.itruediv(x, 2),
    "by_feature": lambda x, y: x.add_(torch.arange(4.0, dtype=torch.float64)),
    "by_position": lambda x, y: x.mul_(torch.arange(20.0, dtype=torch.float64).view(5, 4)[: x.shape[1]]),
}


@pytest.mark.parametrize("op", list(IN_PLACE.values()), ids=list(IN_PLACE))
def test_in_place_forms_change_values_and_keep_structure(op: Callable) -> None:
    x, y = make([3, 0, 5]), make([3, 0, 5], seed=1)
    check(lambda a, b: op(a * 1, b), x, y)
    packed, other = pack(x, y)
    grid, payload = packed.grid, packed.values
    result = op(packed, other)
    assert result is packed
    assert packed.grid is grid
    assert packed.values.data_ptr() == payload.data_ptr()
    assert_matches(packed, [op(s[None].clone(), t[None])[0] for s, t in zip(x.samples, y.samples)])


def test_in_place_forms_work_with_structures_built_apart() -> None:
    check(lambda a, b: (a * 1).add_(b), make([3, 0, 5]), make([3, 0, 5], seed=1), share=False)


def test_in_place_on_a_transposed_pair_lays_the_operand_out_anew() -> None:
    check(lambda p: (p * 1).add_(p.transpose(1, 2)), make([3, 0, 5], "n n 4"))
    check(lambda p: (p * 1).transpose(1, 2).mul_(p), make([3, 0, 5], "n n 4"))


def test_in_place_forms_raise_where_dense_ones_do() -> None:
    x, p = pack(make([3, 5]), make([3, 5], "n n 4"))
    with pytest.raises(STRUCTURE_ERROR):
        x[:, :, None].add_(p)
    with pytest.raises(STRUCTURE_ERROR):
        pack(make([3, 5], dtype=torch.int64))[0].add_(1.5)
    with pytest.raises(STRUCTURE_ERROR):
        x.add_(pack(make([5, 3]))[0])
    with pytest.raises(RuntimeError):
        pack(make([3, 5]))[0].requires_grad_().add_(1)


def test_a_dense_tensor_is_never_changed_by_a_packed_operand() -> None:
    (x,) = pack(make([3, 5]))
    for op in (lambda d: d.add_(x), lambda d: operator.imul(d, x), lambda d: d.copy_(x)):
        dense = torch.zeros(2, 5, 4, dtype=torch.float64)
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            op(dense)
        assert not dense.any()


def test_out_arguments_are_refused() -> None:
    x, y = pack(make([3, 5]), make([3, 5], seed=1))
    for out in (pack(make([3, 5]))[0], torch.zeros(8, 4, dtype=torch.float64)):
        for call in (lambda o: torch.add(x, y, out=o), lambda o: torch.exp(x, out=o)):
            with pytest.raises((TypeError, ValueError, NotImplementedError, RuntimeError), match="out"):
                call(out)


# ---------------------------------------------------------------- what is not there


UNKNOWN: dict[str, Callable] = {
    "fft": torch.fft.fft,
    "svd": torch.linalg.svdvals,
    "flip": lambda x: torch.flip(x, (1,)),
    "roll": lambda x: torch.roll(x, 1, 1),
    "cumsum": lambda x: x.cumsum(1),
    "softmax_over_positions": lambda x: x.softmax(1),
    "sort": lambda x: x.sort(1).values,
    "matmul": lambda x: x @ x.mT,
    "bmm": lambda x: torch.bmm(x, x.transpose(1, 2)),
    "einsum": lambda x: torch.einsum("bnc,bmc->bnm", x, x),
    "cat_positions": lambda x: torch.cat([x, x], 1),
    "stack": lambda x: torch.stack([x, x], -1),
    "conv1d": lambda x: F.conv1d(x.transpose(1, 2), torch.ones(4, 4, 3, dtype=x.dtype), padding=1),
    "max_pool1d": lambda x: F.max_pool1d(x.transpose(1, 2), 1),
    "std": lambda x: x.std(1),
    "prod": lambda x: x.prod(1),
    "max": lambda x: x.max(1).values,
    "argmax": lambda x: x.argmax(1),
    "logsumexp": lambda x: x.logsumexp(1),
    "norm": lambda x: x.norm(dim=1),
    "normalize_positions": lambda x: F.normalize(x, dim=1),
    "glu": lambda x: F.glu(x, -1),
    "group_norm": lambda x: F.group_norm(x.transpose(1, 2), 2),
    "pad": lambda x: F.pad(x, (0, 0, 1, 1)),
    "repeat": lambda x: x.repeat(1, 2, 1),
    "expand": lambda x: x[:, :, None].expand(-1, -1, 3, -1),
    "chunk": lambda x: x.chunk(2, -1)[1],
    "split": lambda x: x.split(2, -1)[0],
    "unbind": lambda x: x.unbind(-1)[0],
    "tril": lambda x: x.tril(),
    "gather": lambda x: x.gather(2, torch.zeros_like(x, dtype=torch.int64)),
    "take_last": lambda x: x.select(2, -1),
    "narrow": lambda x: x.narrow(2, 1, 2),
    "any": lambda x: (x > 0).any(1),
    "var_mean": lambda x: torch.var_mean(x, 1)[0],
    "renorm": lambda x: x.renorm(2, 1, 1.0),
    "cdist": lambda x: torch.cdist(x, x),
    "instance_norm": lambda x: F.instance_norm(x.transpose(1, 2)),
    "scan_max": lambda x: x.cummax(1).values,
    "topk": lambda x: x.topk(1, 1).values,
    "unfold": lambda x: x.unfold(1, 2, 1),
    "quantile": lambda x: x.quantile(0.5, dim=1),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x + 1, dim=1),
    "softmin": lambda x: F.softmin(x, -1),
    "prelu": lambda x: F.prelu(x, torch.full((1,), 0.2, dtype=x.dtype)),
    "matmul_by_weight": lambda x: x @ torch.ones(4, 6, dtype=x.dtype),
    "pairwise_distance": lambda x: F.pairwise_distance(x, x + 1),
}


@pytest.mark.parametrize("fn", list(UNKNOWN.values()), ids=list(UNKNOWN))
@pytest.mark.filterwarnings("ignore")
def test_an_operator_is_right_or_refused_and_never_works_on_the_raw_payload(fn: Callable) -> None:
    batch = make([3, 2, 5])
    try:
        fn(pack(batch)[0])
    except (NotImplementedError, TypeError, ValueError, AttributeError) as error:
        assert len(str(error)) > 10
        return
    check(fn, batch)


def test_a_refusal_names_the_operator() -> None:
    (x,) = pack(make([3, 5]))
    with pytest.raises((NotImplementedError, TypeError), match="fft"):
        torch.fft.fft(x)


def test_where_without_values_is_refused() -> None:
    (x,) = pack(make([3, 5]))
    with pytest.raises((NotImplementedError, TypeError, ValueError)):
        torch.where(x > 0)


def test_type_as_changes_the_type_alone() -> None:
    (x,) = pack(make([3, 5], dtype=torch.float32))
    dense = torch.zeros(4, dtype=torch.float64)
    assert dense.type_as(x).dtype == torch.float32
    assert type(dense.type_as(x)) is Tensor and dense.type_as(x).shape == (4,)
    assert_matches(x.type_as(dense), [s.double() for s in x.to_list()])

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ops.testing import Ragged, assert_matches, check, pack
from tests.strategies import PROFILES, laid_out, make

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


# ---------------------------------------------------------------- mistakes


MISTAKES: dict[str, tuple[Callable, str]] = {
    "other_lengths": (lambda x, y: x + y, "sample 0 has 3 and 2"),
    "other_batch": (lambda x, y: x + pack(make([3, 5]))[0], "batches of 3 and 2 samples"),
    "other_ranks": (lambda x, y: x + x[..., 0], "packed operands of 3 and 2 dims.*give both as many dims"),
    "an_axis_against_features": (lambda x, y: x * x.transpose(1, 2), "permute or unsqueeze"),
    "a_dense_batch_of_other_length": (
        lambda x, y: x + torch.zeros(3, 7, 4),
        "has 7 where the largest length",
    ),
    "a_dense_batch_of_other_size": (lambda x, y: x + torch.zeros(8, 1, 4), "has 8 where the batch size is 3"),
    "rows_of_the_payload": (lambda x, y: x + x.values, "slice it to x.shape, or keep a size of 1"),
    "too_many_dims": (lambda x, y: x + torch.zeros(1, 1, 1, 4), "has more dims than the packed operand's 3"),
    "into_dense": (
        lambda x, y: torch.zeros(3, 5, 4).add_(x),
        "would write packed values into a dense tensor",
    ),
    "into_fewer_dims": (lambda x, y: x[:, :, :1].unsqueeze(1).add_(x[:, :, None]), "cannot add ragged dims"),
    "out": (lambda x, y: torch.exp(x, out=torch.empty(3)), "no 'out='.*in-place form"),
    "where_alone": (lambda x, y: torch.where(x > 0), "give it values"),
    "a_list": (lambda x, y: x + [1, 2], "unsupported operand"),
    "a_truth_value": (lambda x, y: bool(x > 0), "[Tt]ruth|ambiguous|bool"),
}


@pytest.mark.parametrize(("fn", "message"), list(MISTAKES.values()), ids=list(MISTAKES))
def test_mistakes_are_named(fn: Callable, message: str) -> None:
    x, y = pack(make([3, 0, 5]))[0], pack(make([2, 1, 5]))[0]
    with pytest.raises((ValueError, TypeError, RuntimeError, NotImplementedError), match=message):
        fn(x, y)

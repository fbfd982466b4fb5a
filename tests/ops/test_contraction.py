from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.utils import counters

import ops
from ops import PackedTensor
from ops.axis import same_grid
from ops.testing import Dense, Ragged, assert_matches, check, pack
from tests.strategies import PROFILES, dim_orders, make, rotated

EACH_PROFILE = pytest.mark.parametrize("lengths", list(PROFILES.values()), ids=list(PROFILES))


def dense(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def several(lengths: list[int], *patterns: str) -> list[Ragged]:
    """Operands whose axes ``n``, ``m`` and ``k`` have the same lengths, dealt to other samples."""
    named = {name: rotated(lengths, by) for by, name in enumerate("nmk")}
    return [
        make({a: n for a, n in named.items() if a in p.split()}, p, seed=i) for i, p in enumerate(patterns)
    ]


# ---------------------------------------------------------------- einsum

EQUATIONS = {
    "triangle_outgoing": ("bikc,bjkc->bijc", "n n 4", "n n 4"),
    "triangle_incoming": ("bkic,bkjc->bijc", "n n 4", "n n 4"),
    "pairs": ("bic,bjc->bij", "n 4", "m 4"),
    "pairs_of_one_axis": ("bic,bjc->bij", "n 4", "n 4"),
    "pairs_of_heads": ("bhid,bhjd->bhij", "2 n 3", "2 m 3"),
    "weighted_sum": ("bij,bjc->bic", "n m", "m 4"),
    "weighted_sum_of_heads": ("bhij,bhjd->bhid", "2 n m", "2 m 3"),
    "transposed_weights": ("bji,bjc->bic", "n m", "n 4"),
    "outer_product_mean": ("bsic,bsjd->bijcd", "3 n 4", "3 n 2"),
    "covariance": ("bnc,bnd->bcd", "n 4", "n 3"),
    "elementwise": ("bnc,bnc->bnc", "n 4", "n 4"),
    "dot_of_rows": ("bnc,bnc->bn", "n 4", "n 4"),
    "products_without_sums": ("bic,bjd->bijcd", "n 2", "m 3"),
    "rows_by_columns": ("bijc,bjd->bijcd", "n m 2", "m 3"),
    "a_letter_of_one_operand": ("bijc,bje->bic", "n m 4", "m 5"),
    "results_without_a_ragged_letter": ("bijc,bijd->bcd", "n m 2", "n m 3"),
    "an_order_of_its_own": ("bijc,bjid->dbjc", "n m 2", "m n 3"),
    "rectangular_chain": ("bnm,bmk->bnk", "n m", "m k"),
}


@pytest.mark.parametrize("name", list(EQUATIONS))
@EACH_PROFILE
def test_einsum_of_two_packed_operands(name: str, lengths: list[int]) -> None:
    equation, first, second = EQUATIONS[name]
    x, y = several(lengths, first, second)
    where = equation.split("->")[1].index("b")
    for share in (True, False):
        check(lambda x, y: torch.einsum(equation, x, y), x, y, batch_dim=where, share=share)


@given(st.data(), st.sampled_from(list(EQUATIONS)))
def test_einsum_on_any_layout_and_lengths(data: st.DataObject, name: str) -> None:
    equation, first, second = EQUATIONS[name]
    count = data.draw(st.integers(1, 4))
    sizes = st.lists(st.integers(0, 4), min_size=count, max_size=count)
    lengths = {axis: data.draw(sizes) for axis in "nmk"}
    operands, terms, orders = [], equation.split("->")[0].split(","), []
    for pattern in (first, second):
        used = {a: n for a, n in lengths.items() if a in pattern.split()}
        operands.append(make(used, pattern, seed=len(operands)))
        orders.append(data.draw(dim_orders(len(pattern.split()) + 1)))
    moved = ",".join("".join(term[d] for d in order) for term, order in zip(terms, orders))
    result = data.draw(st.permutations(equation.split("->")[1]).map("".join))

    def program(x: Any, y: Any) -> Any:
        return torch.einsum(f"{moved}->{result}", x.permute(orders[0]), y.permute(orders[1]))

    check(program, *operands, batch_dim=result.index("b"))


@EACH_PROFILE
def test_einsum_with_dense_operands(lengths: list[int]) -> None:
    x, p, longest, count = make(lengths), make(lengths, "n n 4"), max(lengths), len(lengths)
    check(lambda x, w: torch.einsum("bnc,cd->bnd", x, w), x, dense(4, 3))
    check(lambda w, x: torch.einsum("dc,bnc->dbn", w, x), dense(3, 4), x, batch_dim=1)
    check(lambda x, w: torch.einsum("bijc,cd->bid", x, w), p, dense(4, 3))
    check(lambda x, w: torch.einsum("bnc,bcd->bnd", x, w), x, Dense(dense(count, 4, 3), "batch 4 3"))
    check(lambda x, w: torch.einsum("bnc,bc->bn", x, w), x, Dense(dense(count, 4), "batch 4"))
    if longest:
        check(lambda x, w: torch.einsum("bnc,nd->bcd", x, w), x, Dense(dense(longest, 3), "n 3"))
        check(lambda x, w: torch.einsum("bnc,nc->bn", x, w), x, Dense(dense(longest, 4), "n 4"))
        check(
            lambda x, w: torch.einsum("bnc,bnd->bdc", x, w), x, Dense(dense(count, longest, 3), "batch n 3")
        )


@EACH_PROFILE
def test_einsum_of_one_and_of_many_operands(lengths: list[int]) -> None:
    x, y, p = make(lengths), make(lengths, seed=1), make(lengths, "n n 4", seed=2)
    check(lambda x: torch.einsum("bnc->bcn", x), x)
    check(lambda x: torch.einsum("bnc->bc", x), x)
    check(lambda p: torch.einsum("biic->bic", p), p)
    check(lambda x, p, y: torch.einsum("bic,bijc,bjc->bc", x, p, y), x, p, y)
    check(lambda x, p, y, w: torch.einsum("bic,bijd,bjc,cd->bij", x, p, y, w), x, p, y, dense(4, 4))


@EACH_PROFILE
def test_einsum_with_dots_and_without_a_result(lengths: list[int]) -> None:
    q, k = several(lengths, "2 n 3", "2 m 3")
    check(lambda q, k: torch.einsum("...id,...jd->...ij", q, k), q, k)
    check(lambda q, w: torch.einsum("...d,de->...e", q, w), q, dense(3, 5))
    check(lambda q, w: torch.einsum("...d,de", q, w), q, dense(3, 5))
    check(lambda x, w: torch.einsum("bnc,dc", x, w), make(lengths), dense(3, 4))


def test_the_batch_is_summed_where_every_ragged_letter_is() -> None:
    x, y = (Ragged([torch.randn(n, c, dtype=torch.float64) for n in (3, 0, 5)], "n _") for c in (4, 3))
    packed = pack(x, y)
    for equation in ("bnc,bnd->cd", "bnc,bnd->dc", "bnc,bmd->cd"):
        want = sum(torch.einsum(equation, a[None], b[None]) for a, b in zip(x.samples, y.samples))
        other = packed[1] if "m" not in equation else PackedTensor.from_list(list(y.samples), "m _")
        assert_matches(torch.einsum(equation, packed[0], other), want)
    want = sum(torch.einsum("bnc,cd->d", a[None], dense(4, 3)) for a in x.samples)
    assert_matches(torch.einsum("bnc,cd->d", packed[0], dense(4, 3)), want)


def test_products_share_the_structure_that_broadcasting_makes() -> None:
    (x,) = pack(make([3, 1, 5]))
    pairs = torch.einsum("bic,bjc->bij", x, x)
    assert same_grid(pairs.grid, (x[:, :, None] * x[:, None])[..., 0].grid)
    assert pairs.grid.part is (x[:, :, None] * x[:, None]).grid.part
    assert (x @ x.mT).grid.part is pairs.grid.part


# ---------------------------------------------------------------- matmul and its kin


@EACH_PROFILE
def test_matmul_of_packed_operands(lengths: list[int]) -> None:
    x, y, p, q, k = several(lengths, "n 4", "m 4", "n m", "2 n 3", "2 m 3")
    check(lambda x, y: x @ y.mT, x, y)
    check(lambda p, y: p @ y, p, y)
    check(lambda p, x: torch.matmul(p.mT, x), p, x)
    check(lambda q, k: q @ k.transpose(-2, -1), q, k)
    check(lambda q, k: (q @ k.mT) @ k, q, k)
    check(lambda q, x: q @ x[:, None, :, :3].mT, q, x)
    check(lambda x, y: torch.bmm(x, y.mT), x, y)


@EACH_PROFILE
def test_matmul_with_dense_operands(lengths: list[int]) -> None:
    x, q, count = make(lengths), make(lengths, "2 n 3"), len(lengths)
    check(lambda x, w: x @ w, x, dense(4, 3))
    check(lambda x, w: x @ w, x, dense(4))
    check(lambda x, w: w @ x.mT, x, dense(3, 4))
    check(lambda x, w: x @ w, x, Dense(dense(count, 4, 3), "batch 4 3"))
    check(lambda x, w: x @ w, x, dense(1, 4, 3))
    check(lambda q, w: q @ w, q, dense(2, 3, 5))
    check(lambda q, w: torch.matmul(q, w), q, dense(3, 5))
    check(lambda x, w: torch.linalg.matmul(x, w), x, dense(4, 2))
    if max(lengths):
        check(lambda x, w: w @ x, x, Dense(dense(1, max(lengths)), "1 n"))


OPERATORS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "baddbmm": (lambda a, x, y: torch.baddbmm(a, x, y.mT, beta=0.5, alpha=2), ("n m", "n 4", "m 4")),
    "baddbmm_": (lambda a, x, y: (a * 1).baddbmm_(x, y.mT), ("n m", "n 4", "m 4")),
    "baddbmm_without_input": (lambda a, x, y: a.baddbmm(x, y.mT, beta=0), ("n m", "n 4", "m 4")),
    "cdist": (lambda x, y: torch.cdist(x, y), ("n 4", "m 4")),
    "cdist_of_order_1": (lambda x, y: torch.cdist(x, y, p=1.0), ("n 4", "m 4")),
    "vecdot": (lambda x, y: torch.linalg.vecdot(x, y), ("n 4", "n 4")),
    "vecdot_along_the_axis": (lambda x, y: torch.linalg.vecdot(x, y, dim=1), ("n 4", "n 4")),
}


@pytest.mark.parametrize("name", list(OPERATORS))
@EACH_PROFILE
def test_operators_on_packed_operands(name: str, lengths: list[int]) -> None:
    program, patterns = OPERATORS[name]
    check(program, *several(lengths, *patterns))


@EACH_PROFILE
def test_operators_with_dense_operands(lengths: list[int]) -> None:
    x, y = make(lengths), make(lengths, "n 3", seed=1)
    check(lambda x, y, w, b: F.bilinear(x, y, w, b), x, y, dense(5, 4, 3), dense(5))
    check(lambda x, w: torch.inner(x, w), x, dense(3, 4))
    check(lambda x, w: torch.inner(w, x), x, dense(3, 4), batch_dim=1)
    check(lambda x, w: torch.tensordot(x, w, 1), x, dense(4, 2, 3))
    check(lambda x, w: torch.tensordot(x, w, dims=([2], [1])), x, dense(3, 4))
    check(lambda x, w: torch.kron(x, w), x, dense(1, 1, 3))
    check(lambda x, w: torch.kron(w, x), x, dense(3))


def test_operators_on_rows() -> None:
    (x,) = pack(make([3, 0, 5]))
    rows, w, v, b = x.flatten(0, 1), dense(4, 3), dense(4), dense(3)
    assert_matches((rows @ w).values, rows.values @ w)
    assert_matches(torch.mm(rows, w).values, torch.mm(rows.values, w))
    assert_matches(torch.mv(rows, v).values, torch.mv(rows.values, v))
    assert_matches(torch.addmm(b, rows, w, beta=2).values, torch.addmm(b, rows.values, w, beta=2))
    want = rows.values @ w @ dense(3, 2)
    assert_matches(torch.linalg.multi_dot([rows, w, dense(3, 2)]).values, want)
    assert_matches(torch.chain_matmul(rows, w, dense(3, 2)).values, want)
    assert_matches(rows.mT @ rows, rows.values.mT @ rows.values)
    want = torch.addmm(b, rows.values, w, beta=2, alpha=3)
    assert_matches(torch.addmm(input=b, mat2=w, mat1=rows, alpha=3, beta=2).values, want)
    assert_matches(torch.tensordot(rows, rows, 2), (rows.values * rows.values).sum())
    column = rows[:, 0]
    assert_matches(torch.dot(column, rows[:, 1]), torch.dot(rows.values[:, 0], rows.values[:, 1]))
    assert_matches(torch.outer(column, v).values, torch.outer(rows.values[:, 0], v))
    assert_matches(torch.outer(column, vec2=v).values, torch.outer(rows.values[:, 0], v))
    assert_matches(torch.vdot(column, rows[:, 1]), torch.vdot(rows.values[:, 0], rows.values[:, 1]))
    whole = torch.randint(5, (8, 4)), torch.randint(5, (4, 4))
    (numbers,) = pack(make([3, 0, 5], dtype=torch.int64))
    given = torch.addmm(whole[0], numbers.flatten(0, 1), whole[1], beta=2.6, alpha=1.5)
    assert_matches(given.values, torch.addmm(whole[0], numbers.values, whole[1], beta=2.6, alpha=1.5))
    table, u = dense(8, 4), dense(8)
    assert_matches(torch.addr(table, column, v).values, torch.addr(table, rows.values[:, 0], v))
    assert_matches(torch.addmv(u, rows, v, alpha=2).values, torch.addmv(u, rows.values, v, alpha=2))
    assert_matches((rows * 1).addmm_(rows, dense(4, 4)).values, rows.values + rows.values @ dense(4, 4))


def test_half_precision_is_as_close_as_dense() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = make([30, 0, 50], "n 64", dtype=dtype)
        (packed,) = pack(x)
        got = (packed @ packed.mT).to_list()
        for sample, pairs in zip(x.samples, got):
            assert pairs.dtype == dtype
            torch.testing.assert_close(
                pairs.double(), sample.double() @ sample.double().mT, rtol=1e-2, atol=0.2
            )


def test_a_batch_of_no_samples_and_samples_without_features() -> None:
    x = PackedTensor.from_list([], "n 4")
    y = PackedTensor.from_list([dense(3, 0), dense(0, 0)], "n 0")
    assert (x @ x.mT).batch_size == 0 and (x @ torch.ones(4, 3)).shape == (0, 0, 3)
    assert torch.equal(torch.einsum("bnc,bnd->cd", x, x), torch.zeros(4, 4))
    assert torch.equal((y @ y.mT).values, torch.zeros(9, dtype=torch.float64))


def test_complex_operands_have_conjugate_gradients() -> None:
    samples = [torch.randn(n, 2, dtype=torch.complex128) for n in (3, 0, 2)]
    x = PackedTensor.from_list(samples, "n 2").requires_grad_()
    (x @ x.mT.conj()).abs().sum().backward()
    for sample, grad in zip(samples, x.grad.to_list()):
        sample.requires_grad_()
        (sample @ sample.mT.conj()).abs().sum().backward()
        torch.testing.assert_close(grad, sample.grad)


def test_second_derivatives() -> None:
    x, y = pack(make([3, 0, 2], "n 2"), make([3, 0, 2], "m 2", seed=1))

    def program(a: Tensor, b: Tensor) -> Tensor:
        pairs = PackedTensor(a, x.grid, x.order) @ PackedTensor(b, y.grid, y.order).mT
        return pairs.values

    inputs = tuple(t.values.clone().requires_grad_() for t in (x, y))
    assert torch.autograd.gradcheck(program, inputs) and torch.autograd.gradgradcheck(program, inputs)


def test_autocast_decides_the_dtype_as_for_dense_tensors() -> None:
    (x,) = pack(make([3, 0, 2], dtype=torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x.mT).dtype == torch.bfloat16
        assert (x @ dense(4, 3).float()).dtype == torch.bfloat16


# ---------------------------------------------------------------- graphs

COMPILED: dict[str, Callable[..., Any]] = {
    "pairs": lambda x, y: x @ y.mT,
    "attention_like": lambda x, y: (x @ y.mT).softmax(-1) @ y,
    "triangle": lambda x, y: torch.einsum(
        "bikc,bjkc->bijc", x[:, :, None] * x[:, None], x[:, :, None] + x[:, None]
    ),
    "covariance": lambda x, y: torch.einsum("bnc,bnd->bcd", x, x),
    "summed": lambda x, y: torch.einsum("bnc,bnd->cd", x, x),
    "weight": lambda x, y: x @ torch.ones(4, 3),
    "distance": lambda x, y: torch.cdist(x, y),
}


@pytest.mark.parametrize("name", list(COMPILED))
def test_one_graph_for_all_lengths_and_batch_sizes(name: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    program = COMPILED[name]
    fn = torch.compile(program, fullgraph=True, backend="aot_eager")
    for lengths in ([4, 6, 3], [4, 4], [7], [5, 3, 0, 4], [1, 1]):
        operands = pack(make(lengths, dtype=torch.float32), make(lengths, "m 4", dtype=torch.float32, seed=1))
        results = []
        for call in (fn, program):
            x, y = (
                PackedTensor(t.values.clone().requires_grad_(), t.grid, t.order)
                for t in ops.mark_dynamic(operands)
            )
            out = call(x, y)
            values = out.values if isinstance(out, PackedTensor) else out
            (values * torch.arange(values.numel()).view(values.shape)).sum().backward()
            results.append((values.detach(), x.values.grad, y.values.grad))
        torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1


# ---------------------------------------------------------------- mistakes

X, Y, P = pack(make([3, 1, 5]), make({"m": [2, 2, 4]}, "m 4"), make([3, 1, 5], "n n 4"))
OTHER = pack(make([3, 2, 5]))[0]
MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "a letter of two axes": (lambda: torch.einsum("bnc,bnc->bn", X, Y), "letter 'n'.*3.*2"),
    "axes of other lengths": (lambda: torch.einsum("bnc,bnd->bcd", X, OTHER), "sample 1"),
    "two letters for the batch": (
        lambda: torch.einsum("anc,bnd->abn", X, X),
        "'a' and 'b' are both the batch",
    ),
    "the batch summed alone": (lambda: torch.einsum("bnc->nc", X), "'b' is summed but the ragged letter 'n'"),
    "an unknown letter": (lambda: torch.einsum("bnc->bnz", X), "no operand has the letter 'z'"),
    "too few letters": (lambda: torch.einsum("bn->b", X), "'bn' names 2 dims of a tensor of 3"),
    "too few terms": (lambda: torch.einsum("bnc->b", X, X), "1 terms for 2 operands"),
    "inner sizes": (lambda: X @ dense(5, 3), "4|5"),
    "a weight of another batch": (lambda: X @ dense(2, 4, 3), "3 samples here and a dim of size 2"),
    "a position table too short": (lambda: torch.einsum("bnc,nd->bcd", X, dense(4, 3)), "largest length"),
    "a letter static and ragged": (lambda: torch.einsum("bnc,bcm->bnm", X, P[..., 0]), "letter 'c'|ragged"),
    "out=": (lambda: torch.matmul(X, dense(4, 3), out=dense(3)), "no 'out='"),
    "bmm of three dims and two": (lambda: torch.bmm(X, dense(4, 3)), "bmm: a tensor of 3 dims"),
    "in place on a dense tensor": (
        lambda: dense(3, 5, 5).baddbmm_(X, X.mT),
        "write packed values into a dense",
    ),
    "kron of a ragged dim": (lambda: torch.kron(X, dense(1, 2, 3)), "kron: dim 1 is not static"),
    "samples with all others": (lambda: torch.tensordot(X, X, dims=([2], [2])), "both the batch"),
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistakes_are_named(name: str) -> None:
    call, message = MISTAKES[name]
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        call()

"""Linear algebra: each sample's matrices by themselves, static ones and such of every sample's own size."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ops import PackedTensor, is_packed, mark_dynamic
from ops.testing import Ragged, check, pack
from tests.strategies import NONEMPTY, PROFILES, make

L = torch.linalg


def matrices(lengths: Any, pattern: str, definite: bool = False, seed: int = 0) -> Ragged:
    """Well-conditioned matrices in the last two dims, symmetric and positive definite if asked for."""
    batch = make(lengths, pattern, seed=seed)
    samples = []
    for sample in batch.samples:
        if definite:
            sample = sample @ sample.mT / max(sample.shape[-1], 1)
        eye = torch.eye(*sample.shape[-2:], dtype=sample.dtype)
        samples.append(sample + (2 if definite else 3) * eye)
    return Ragged(samples, pattern)


#: Square matrices: of each sample's own size, under static and ragged batch dims, and of a fixed size.
SQUARE = ("n n", "2 n n", "k n n", "n 3 3", "k n 2 2", "2 k 3 n n")
RECTANGULAR = (*SQUARE, "n 3", "3 n", "2 n 3", "k 2 3 n", "n m", "k n m")
ONE: dict[str, Callable[[Any], Any]] = {
    "det": L.det,
    "torch.det": torch.det,
    "x.det": lambda x: x.det(),
    "logdet": lambda x: torch.logdet(x),
    "slogdet": lambda x: L.slogdet(x).logabsdet,
    "sign": lambda x: torch.slogdet(x)[0],
    "inv": L.inv,
    "inverse": lambda x: x.inverse(),
    "inv_ex": lambda x: L.inv_ex(x).inverse,
    "info": lambda x: L.inv_ex(x).info,
    "matrix_exp": lambda x: L.matrix_exp(0.3 * x),
    "x.matrix_exp": lambda x: (0.3 * x).matrix_exp(),
    "matrix_power": lambda x: L.matrix_power(x, 3),
    "negative power": lambda x: x.matrix_power(-2),
    "eigvals": lambda x: L.eigvals(x).abs().sum(-1),
    "eig": lambda x: L.eig(x).eigenvectors.abs(),
    "lu_factor": lambda x: L.lu_factor(x)[0],
    "pivots": lambda x: L.lu_factor_ex(x).pivots,
    "ldl_factor": lambda x: L.ldl_factor(x.tril())[0],
    "cond": lambda x: L.cond(x, 2),
}
DEFINITE: dict[str, Callable[[Any], Any]] = {
    "cholesky": L.cholesky,
    "upper": lambda x: L.cholesky(x, upper=True),
    "cholesky_ex": lambda x: L.cholesky_ex(x).L,
    "cholesky_inverse": lambda x: torch.cholesky_inverse(L.cholesky(x)),
    "eigvalsh": L.eigvalsh,
    "eigh": lambda x: L.eigh(x).eigenvectors.abs(),
    "eigenvalues": lambda x: L.eigh(x)[0],
    "logdet": torch.logdet,
}
ANY: dict[str, Callable[[Any], Any]] = {
    "svdvals": L.svdvals,
    "U": lambda x: L.svd(x, full_matrices=False).U.abs(),
    "Vh": lambda x: L.svd(x, False)[2].abs(),
    "V": lambda x: torch.svd(x).V.abs(),
    "Q": lambda x: L.qr(x).Q,
    "R": lambda x: L.qr(x)[1],
    "pinv": L.pinv,
    "pinverse": lambda x: x.pinverse(),
    "nuc": lambda x: L.matrix_norm(x, "nuc"),
    "spectral": lambda x: L.matrix_norm(x, 2, keepdim=True),
    "fro": lambda x: L.matrix_norm(x, dim=(-1, -2)),
    "norm": lambda x: L.norm(x, 2, dim=(-2, -1)),
    "L": lambda x: L.lu(x)[1],
}
FULL: dict[str, Callable[[Any], Any]] = {
    "full U": lambda x: L.svd(x).U.abs().sum((-2, -1)) * 0 + L.svd(x).S.sum(-1),
    "full Vh": lambda x: L.svd(x)[2].abs() ** 0,
    "full V": lambda x: torch.svd(x, some=False)[2].abs() ** 0,
    "only R": lambda x: L.qr(x, "r").R,
    "complete": lambda x: L.qr(x, mode="complete")[1],
    "P": lambda x: L.lu(x).P,
    "unpacked": lambda x: torch.lu_unpack(*L.lu_factor(x))[2],
    "rank": L.matrix_rank,
    "with pivots": lambda x: torch.lu(x)[1],
}


@pytest.mark.filterwarnings("ignore:torch.(lu|svd) is deprecated:UserWarning")
@pytest.mark.parametrize("pattern", SQUARE)
@pytest.mark.parametrize("name", ONE)
def test_of_square_matrices(name: str, pattern: str) -> None:
    check(ONE[name], matrices([3, 2, 5, 3], pattern), grad=name not in ("pivots", "info", "ldl_factor"))


@pytest.mark.filterwarnings("ignore:torch.(lu|svd) is deprecated:UserWarning")
@pytest.mark.parametrize("pattern", SQUARE)
@pytest.mark.parametrize("name", DEFINITE)
def test_of_definite_matrices(name: str, pattern: str) -> None:
    check(DEFINITE[name], matrices([3, 2, 5, 3], pattern, definite=True))


@pytest.mark.filterwarnings("ignore:torch.(lu|svd) is deprecated:UserWarning")
@pytest.mark.parametrize("pattern", RECTANGULAR)
@pytest.mark.parametrize("name", ANY)
def test_of_any_matrices(name: str, pattern: str) -> None:
    wide = pattern in ("3 n", "k 2 3 n", "n m", "k n m")
    grad = not (wide and name in ("Q", "R"))  # PyTorch has no gradient of a wide matrix's reduced Q
    check(ANY[name], matrices([3, 2, 5, 3], pattern), grad=grad)


@pytest.mark.filterwarnings("ignore:torch.(lu|svd) is deprecated:UserWarning")
@pytest.mark.parametrize("pattern", RECTANGULAR)
@pytest.mark.parametrize("name", FULL)
def test_of_full_decompositions(name: str, pattern: str) -> None:
    check(FULL[name], matrices([3, 2, 5, 3], pattern), grad=False)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("pattern", ["n n", "2 n n", "n 3 3", "k n n"])
def test_lengths_of_every_kind(profile: str, pattern: str) -> None:
    batch = matrices(PROFILES[profile], pattern)
    for fn in (L.det, L.inv, lambda x: L.svd(x, False)[0].abs() ** 2, lambda x: L.qr(x).R):
        check(fn, batch)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("pattern", ["n 4", "4 n", "n m"])
def test_lengths_of_every_kind_of_rectangles(profile: str, pattern: str) -> None:
    batch = matrices(PROFILES[profile], pattern)
    for fn in (L.svdvals, lambda x: L.svd(x, False).Vh.abs() ** 2):
        check(fn, batch)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_dims_in_any_order(data: st.DataObject) -> None:
    """The batch, ragged or not, in any order before the matrix dims, which may be exchanged."""
    pattern = data.draw(st.sampled_from(["n n", "2 n n", "k n n", "2 k n n", "n 3 3", "2 k 3 3"]))
    batch = matrices(data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4)), pattern)
    rank = len(pattern.split()) + 1
    lead = data.draw(st.permutations(range(rank - 2)))
    last = data.draw(st.permutations([rank - 2, rank - 1]))
    at = list(lead).index(0)
    check(lambda x: L.inv(x.permute(*lead, *last)), batch, batch_dim=at)
    check(lambda x: L.det(x.permute(*lead, *last)), batch, batch_dim=at)


@pytest.mark.parametrize(("pattern", "order"), [("n n 2", (0, 3, 1, 2)), ("n 2 n", (0, 2, 1, 3))])
def test_static_dims_stored_behind_ragged_ones(pattern: str, order: tuple[int, ...]) -> None:
    batch = make([3, 2, 4], pattern)
    check(lambda x: L.matrix_exp(x.permute(order)), batch)
    check(lambda x: L.svdvals(x.permute(order)), batch)


def test_equal_sizes_are_one_call() -> None:
    calls = []

    def counted(values: Tensor) -> Tensor:
        calls.append(tuple(values.shape))
        return torch.linalg.det(values)

    from ops import matrices as engine

    (x,) = pack(matrices([3, 5, 3, 3], "n n"))
    engine.apply("det", counted, "nn->", [x])
    assert calls == [(3, 3, 3), (1, 5, 5)]


# ------------------------------------------------------------------ several operands


SYSTEMS: dict[str, Callable[[Any, Any], Any]] = {
    "solve": L.solve,
    "solve_ex": lambda a, b: L.solve_ex(a, b).result,
    "triangular": lambda a, b: L.solve_triangular(a.tril(), b, upper=False),
    "cholesky_solve": lambda a, b: torch.cholesky_solve(b, a.tril()),
    "lu_solve": lambda a, b: L.lu_solve(*L.lu_factor(a), b),
    "torch.lu_solve": lambda a, b: torch.lu_solve(b, *L.lu_factor(a)),
    "lstsq": lambda a, b: L.lstsq(a, b).solution,
    "by name": lambda a, b: L.solve(A=a, B=b),
}
SHAPES = [("n n", "n 2"), ("2 n n", "2 n 3"), ("k n n", "k n 2"), ("n n", "n m"), ("n 3 3", "n 3 2")]
MORE = [("k n n", "k n m"), ("n 3 3", "n 3 m"), ("2 n n", "1 n 2")]
CALLS = [(name, *shapes) for name in SYSTEMS for shapes in (*SHAPES, *MORE)]
CALLS.remove(("lstsq", "2 n n", "1 n 2"))  # PyTorch's does not broadcast


@pytest.mark.filterwarnings("ignore:torch.(lu_solve|lu) is deprecated:UserWarning")
@pytest.mark.parametrize(("name", "left", "right"), CALLS)
def test_systems(name: str, left: str, right: str) -> None:
    check(SYSTEMS[name], matrices([3, 2, 5, 3], left), make([3, 2, 5, 3], right, seed=1))


@pytest.mark.parametrize(
    ("left", "right"), [("n n", "n"), ("2 n n", "2 n"), ("k n n", "k n"), ("n 3 3", "n 3")]
)
def test_a_vector_on_the_right(left: str, right: str) -> None:
    operands = matrices([3, 2, 5], left), make([3, 2, 5], right, seed=1)
    check(L.solve, *operands)
    check(lambda a, b: L.solve_ex(a, b)[0], *operands)
    check(lambda a, b: L.lstsq(a, b)[0], *operands)


@pytest.mark.parametrize(("left", "right"), [("n n", "2 n"), ("n n", "m n"), ("n 3 3", "n 2 3")])
def test_systems_from_the_right(left: str, right: str) -> None:
    lengths = {"n": [3, 2, 5], "m": [2, 0, 4]}
    operands = matrices(lengths, left), make(lengths, right, seed=1)
    check(lambda a, b: L.solve(a, b, left=False), *operands)
    check(lambda a, b: L.solve_triangular(a.triu(), b, upper=True, left=False), *operands)


def test_least_squares_of_more_equations_than_unknowns() -> None:
    operands = make([5, 7, 4, 5], "n 3"), make([5, 7, 4, 5], "n 2", seed=1)
    out = check(lambda a, b: L.lstsq(a, b).solution, *operands)
    assert isinstance(out, Tensor) and out.shape == (4, 3, 2)
    check(lambda a, b: L.lstsq(a, b, driver="gelsd").residuals, *operands, grad=False)
    check(lambda a, b: L.lstsq(a, b).rank, *operands, grad=False)
    check(lambda a, b: L.lstsq(a, b, driver="gelsd").singular_values, *operands, grad=False)
    assert L.lstsq(*pack(*operands)).singular_values.numel() == 0
    short = pack(make([5, 2], "n 3"), make([5, 2], "n 2"))
    assert L.lstsq(*short, driver="gelsd").residuals.numel() == 0  # the second sample has none


def test_a_dense_matrix_for_all() -> None:
    a = torch.randn(3, 3, dtype=torch.float64) + 3 * torch.eye(3)
    check(lambda b, a: L.solve(a, b), make([3, 2, 4], "n 3 2"), a)
    check(lambda b, a: L.solve(a, b), make([3, 2, 4], "3 n"), a)
    check(lambda a, b: L.solve(a, b), matrices([3, 2, 4], "n 3 3"), torch.randn(3, 2, dtype=torch.float64))


def test_operands_stored_in_different_orders() -> None:
    """Ragged and static batch dims at the same places, of other storage."""
    lengths = {"k": [2, 1, 3], "l": [1, 3, 0], "n": [3, 2, 5]}
    left = matrices(lengths, "k 2 l n n")
    right = make(lengths, "n l k 4 2", seed=1)

    def fn(a: Any, b: Any) -> Any:
        return L.solve(a, b.permute(0, 3, 5, 2, 1, 4))

    check(fn, left, right)
    check(lambda a, b: L.solve(a.permute(0, 3, 2, 1, 4, 5), b.permute(0, 2, 5, 3, 1, 4)), left, right)
    fixed = make(lengths, "l k 2 2 3", seed=2)
    check(lambda a, b: L.solve(a, b), matrices(lengths, "l k 2 2 2"), fixed)
    check(lambda a, b: L.solve(a.transpose(1, 2), b.transpose(1, 2)), matrices(lengths, "l k 2 2 2"), fixed)
    turned = matrices(lengths, "k l 2 2 2")
    check(lambda a, b: L.solve(a, b.transpose(1, 2)), turned, fixed)


def test_positions_of_one_operand_meet_all_of_another() -> None:
    """Ragged batch dims broadcast where matrix dims are static."""
    lengths = {"n": [3, 2], "m": [1, 4]}
    left, right = matrices(lengths, "n 1 2 2"), make(lengths, "1 m 2 3", seed=1)
    check(L.solve, left, right)


def test_products_of_reflections() -> None:
    for pattern, scales in (("n n", "n"), ("n 3 3", "n 3"), ("k n n", "k n")):
        batch = make([3, 2, 5], pattern, seed=2)
        check(L.householder_product, batch, make([3, 2, 5], scales, seed=3))
        check(torch.orgqr, batch, make([3, 2, 5], scales, seed=3))
    check(lambda x: torch.geqrf(x)[0], make([3, 2, 5], "n n"), grad=False)


def test_symmetric_systems() -> None:
    def fn(a: Any, b: Any) -> Any:
        return L.ldl_solve(*L.ldl_factor_ex(a)[:2], b)

    check(fn, matrices([3, 2, 5], "n n", definite=True), make([3, 2, 5], "n 2"), grad=False)


# ------------------------------------------------------------------ norms, cross, vander


@pytest.mark.parametrize("ord", [1, -1, 2, -2, float("inf"), -float("inf"), "fro", "nuc"])
@pytest.mark.parametrize(
    ("pattern", "dims"), [("n n", (1, 2)), ("n 3 m", (1, 3)), ("n 2 3", (3, 2)), ("k n n", (3, 2))]
)
def test_norms_of_matrices(pattern: str, dims: tuple[int, int], ord: Any) -> None:
    batch = make([3, 2, 4], pattern)
    check(lambda x: L.matrix_norm(x, ord, dims), batch)
    check(lambda x: L.norm(x, ord, dims, keepdim=True), batch)


def test_norms_of_vectors() -> None:
    for dim in (1, 2, (1, 2)):
        check(lambda x, dim=dim: L.norm(x, dim=dim), make([3, 2, 4]))
    check(lambda x: L.norm(x, 3, dim=1), make([3, 2, 4]))
    (x,) = pack(make([3, 2, 4]))
    torch.testing.assert_close(L.norm(x), x.values.norm())


@pytest.mark.parametrize("pattern", ["n 3", "3 n", "n m 3", "n 3 m"])
def test_cross_products(pattern: str) -> None:
    batch, other = make([3, 1, 4], pattern), make([3, 1, 4], pattern, seed=1)
    dim = pattern.split().index("3") + 1
    check(lambda x, y: L.cross(x, y, dim=dim), batch, other)
    check(lambda x, y: torch.cross(x, y, dim=dim), batch, other)
    check(lambda x, y: x.cross(y, dim), batch, other)


def test_cross_with_a_dense_vector() -> None:
    check(lambda x, y: L.cross(x, y), make([3, 1, 4], "n 3"), torch.randn(1, 1, 3, dtype=torch.float64))


@pytest.mark.parametrize("pattern", ["n", "n 3", "2 n", "n m"])
def test_powers(pattern: str) -> None:
    check(lambda x: L.vander(x, N=4), make([3, 1, 4], pattern))
    check(L.vander, make([3, 2, 4], pattern))


# ------------------------------------------------------------------ results, graphs, mistakes


def test_results_keep_their_names() -> None:
    (x,) = pack(matrices([3, 2], "n n"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for fn in (L.svd, L.qr, L.eigh, L.slogdet, L.lu, L.inv_ex, L.cholesky_ex, L.lu_factor_ex, torch.svd):
            assert type(fn(x)) is type(fn(torch.eye(3)[None])), fn
    assert torch.lu(x)[0].shape == (2, 3, 3)


def test_a_square_pair_stays_on_its_axis() -> None:
    (x,) = pack(matrices([3, 2, 4], "n n"))
    for part in (L.inv(x), L.svd(x).U, L.svd(x, False).Vh, L.qr(x).Q, L.cholesky_ex(x).L):
        assert part.grid is x.grid
    assert L.svdvals(x).axes[0] is x.axes[0]


def test_the_smaller_of_two_sizes_is_one_axis() -> None:
    (x,) = pack(make([3, 2, 6], "n 4"))
    u, s, vh = L.svd(x, full_matrices=False)
    assert s.axes[0] is u.axes[1] is vh.axes[0]
    assert s.axes[0].lengths.tolist() == [3, 2, 4]
    (y,) = pack(make([3, 2, 6], "n m"))
    q, r = L.qr(y)
    assert q.axes[1] is r.axes[0]


def test_no_samples() -> None:
    x = PackedTensor.from_list([], "n n")
    assert L.det(x).shape == (0,)
    assert L.inv(x).shape == (0, 0, 0)
    assert L.svdvals(PackedTensor.from_list([], "n 3")).shape == (0, 0)


def test_static_matrices_are_one_graph_over_all_lengths() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    fn = torch.compile(lambda x: (L.inv(x), L.svd(x).S, L.det(x)), fullgraph=True, backend="eager")
    for lengths in ([3, 2], [4, 1, 5], [2]):
        (x,) = pack(matrices(lengths, "n 3 3"))
        got, want = fn(mark_dynamic(x)), (L.inv(x), L.svd(x).S, L.det(x))
        for a, b in zip(got, want):
            assert is_packed(a)
            torch.testing.assert_close(a.values, b.values)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def mistakes() -> dict[str, tuple[Callable[[], Any], type[Exception], str]]:
    x, flat, wide = pack(matrices([3, 2], "n n"), make([3, 2], "n 4"), make([3, 2], "n 3 3"))
    (other,) = pack(make([2, 2], "n 2"))
    pair, tall = pack(make([3, 2], "n m"), make([3, 2], "3 m"))
    singular = PackedTensor.from_list([torch.eye(3), torch.zeros(2, 2), torch.eye(3)], "n n")
    rows = PackedTensor.from_list([torch.eye(2).repeat(2, 1, 1), torch.zeros(1, 2, 2)], "n _ _")
    return {
        "not square": (lambda: L.det(flat), ValueError, "ragged axis 'n' and the fixed size 4"),
        "not square, ragged": (lambda: L.det(pair), ValueError, r"one size.*sample 0 has 3 and 2"),
        "the batch": (lambda: L.det(x.transpose(0, 1)), ValueError, "dim 1 is the batch.*permute"),
        "rows": (lambda: L.det(flat.flatten(0, 1)), ValueError, "no 2 matrix dims behind the batch"),
        "a vector": (lambda: L.inv(flat[..., 0]), ValueError, "no 2 matrix dims behind the batch"),
        "lengths": (lambda: L.solve(x, other), ValueError, "sample 0 has 3 and 2"),
        "singular": (lambda: L.inv(singular), L.LinAlgError, "linalg_inv: sample 1: "),
        "a singular row": (lambda: L.inv(rows), L.LinAlgError, "linalg_inv: sample 1: "),
        "not definite": (lambda: L.cholesky(-singular), L.LinAlgError, "sample [01]: .*positive-definite"),
        "a dense operand": (lambda: L.solve(x, torch.ones(2, 3, 2)), ValueError, "fixed size 3.*from_padded"),
        "dense matrices": (lambda: L.solve(torch.ones(2, 3, 3), tall), ValueError, "one matrix.*from_padded"),
        "positions": (lambda: L.solve(wide, torch.ones(5, 3, 2)), ValueError, "5 where the largest length"),
        "other batch dims": (lambda: L.solve(x, flat[:, None]), ValueError, "at the same places"),
        "out": (lambda: L.inv(x, out=torch.empty(2)), TypeError, "no 'out='"),
        "a norm of matrices": (lambda: torch.norm(x, "nuc", (1, 2)), ValueError, "linalg.matrix_norm"),
        "tolerances": (lambda: L.pinv(x, rtol=torch.ones(2)), NotImplementedError, "one number.*to_list"),
        "cross without dim": (lambda: torch.cross(wide, wide), ValueError, "explicit dim="),
        "cross along an axis": (lambda: L.cross(wide, wide, dim=1), ValueError, "needs a static dim"),
        "norm of all dims": (lambda: L.norm(x, "nuc"), ValueError, "needs dim="),
        "vander": (lambda: L.vander(flat, N=1), ValueError, "greater than 1"),
        "in a graph": (
            lambda: torch.compile(L.det, fullgraph=True, backend="eager")(x),
            Exception,
            "varying size cannot be in a graph",
        ),
    }


@pytest.mark.parametrize("name", mistakes())
def test_mistakes(name: str) -> None:
    call, kind, message = mistakes()[name]
    with pytest.raises(kind, match=f"(?s){message}"):
        call()


@pytest.mark.parametrize("profile", NONEMPTY)
def test_autograd_twice(profile: str) -> None:
    (x,) = pack(matrices([min(n, 3) for n in NONEMPTY[profile]], "n n"))

    def fn(values: Tensor) -> Tensor:
        return L.inv(PackedTensor(values, x.grid, x.order)).values

    leaf = x.values.clone().requires_grad_()
    assert torch.autograd.gradcheck(fn, (leaf,))
    assert torch.autograd.gradgradcheck(fn, (leaf,))

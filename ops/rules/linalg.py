"""Linear algebra on each sample's matrices: a table of operators and the shapes of their results.

The last dims are matrices, all dims before them the batch. Static matrix dims are one dense call on the
payload; ragged ones, (B, n, n) or (B, n, C), one call for each size among the samples (:mod:`ops.matrices`).
The latter need the sizes while they run, so in a graph they raise; ``compiles`` in the table speaks of static
matrix dims.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from ..align import align
from ..cells import static_dim
from ..matrices import apply
from ..tensor import PackedTensor, is_packed
from .shape import on_operands

#: One operand: shapes by letter -> names in ``torch.linalg``. See :mod:`ops.matrices`.
UNARY = {
    "nn->": "det",
    "nn->,": "slogdet",
    "nn->n": "eigvals eigvalsh",
    "nn->n,nn": "eig eigh",
    "nn->nn": "inv cholesky matrix_exp matrix_power",
    "nn->nn,": "inv_ex cholesky_ex",
    "nn->nn,n": "ldl_factor",
    "nn->nn,n,": "ldl_factor_ex",
    "rc->": "matrix_rank cond",
    "rc->m": "svdvals",
    "rc->cr": "pinv",
    "rc->rc,m": "lu_factor",
    "rc->rc,m,": "lu_factor_ex",
    "rc->rr,rm,mc": "lu",
}
#: The same for functions of ``torch`` and methods.
SPELLED = {
    "nn->": "det logdet",
    "nn->,": "slogdet",
    "nn->nn": "inverse cholesky_inverse matrix_exp matrix_power",
    "rc->cr": "pinverse",
    "rc->rc,m": "geqrf",
}
#: Two and three operands, in ``torch.linalg`` and in ``torch``.
JOINT = {"nn,n,nk->nk": "ldl_solve", "rc,t->rc": "householder_product"}
JOINT_SPELLED = {
    "nk,nn->nk": "cholesky_solve",
    "nk,nn,n->nk": "lu_solve",
    "rc,m->rr,rm,mc": "lu_unpack",
    "rc,t->rc": "orgqr",
}
#: PyTorch asks these for a size that a graph for any batch does not know, or has no fake form of them.
UNTRACED = {
    *("linalg_matrix_rank", "linalg_cond", "linalg_pinv", "pinverse", "geqrf", "lu_solve"),
    *("linalg_solve_triangular", "linalg_lu_solve", "linalg_lstsq"),
}
#: How operands are called that are given by name, in turn.
NAMES = ("input A x LU LD LU_data", "other B pivots tau input2 L LU_pivots LU_data", "B LU_pivots")
Spec = str | Callable[[Callable[[int, str, Any], Any]], str]


def matrices(spec: Spec, count: int = 1) -> dispatch.Handler:
    """The handler of one operator on ``count`` operands.

    Args:
        spec: shapes by letter, or what gives them for ``argument(position, name, default)``.
    """

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = dispatch.name_of(func)
        dispatch.refuse_out(name, kwargs)
        operands, rest, kwargs = _operands(args, kwargs, count)
        for given in (*rest, *kwargs.values()):
            if is_packed(given) or (isinstance(given, Tensor) and given.dim()):
                raise NotImplementedError(
                    f"{name} of packed matrices takes one number for all samples, not a tensor of shape "
                    f"{tuple(given.shape)}; for one each, apply it to each of x.to_list()"
                )

        def argument(position: int, keyword: str, default: Any) -> Any:
            return args[position] if len(args) > position else kwargs.get(keyword, default)

        shapes = spec if isinstance(spec, str) else spec(argument)
        return apply(name, lambda *given: func(*given, *rest, **kwargs), shapes, operands)

    return handler


def _operands(
    args: tuple[Any, ...], kwargs: dict[str, Any], count: int
) -> tuple[list[Any], tuple[Any, ...], dict[str, Any]]:
    """The operands, and the other arguments."""
    operands, kwargs = list(args[:count]), dict(kwargs)
    for names in NAMES[len(operands) : count]:
        found = [name for name in names.split() if name in kwargs]
        operands.append(kwargs.pop(found[0]))
    return operands, args[count:], kwargs


def _svd(argument: Any) -> str:
    return "rc->rr,m,cc" if argument(1, "full_matrices", True) else "rc->rm,m,mc"


def _torch_svd(argument: Any) -> str:
    reduced = argument(1, "some", True) and argument(2, "compute_uv", True)
    return "rc->rm,m,cm" if reduced else "rc->rr,m,cc"


def _qr(argument: Any) -> str:
    return "rc->rr,rc" if argument(1, "mode", "reduced") == "complete" else "rc->rm,mc"


def _torch_lu(argument: Any) -> str:
    return "rc->rc,m," if argument(2, "get_infos", False) else "rc->rc,m"


def _sided(spec: str) -> Callable[[Any], str]:
    def choose(argument: Any) -> str:
        return spec if argument(9, "left", True) else spec.replace("nk", "kn")

    return choose


def of_system(spec: str, right: str, vector: str) -> dispatch.Handler:
    """Solvers, whose right side may be a vector for each matrix.

    Args:
        spec, right, vector: shapes by letter, those for ``left=False``, and those of a vector.
    """

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (a, b), rest, kwargs = _operands(args, kwargs, 2)
        shapes = spec if kwargs.get("left", True) else right
        if not _is_vector(a, b):
            return matrices(shapes, 2)(func, (a, b, *rest), kwargs)

        def call(matrix: Tensor, column: Tensor) -> Any:
            out = func(matrix, column.unsqueeze(-1), *rest, **kwargs)
            if isinstance(out, Tensor):
                return out.squeeze(-1)
            return type(out)([part.squeeze(-1) if i < 2 else part for i, part in enumerate(out)])

        dispatch.refuse_out(dispatch.name_of(func), kwargs)
        return apply(dispatch.name_of(func), call, vector, [a, b])

    return handler


def _is_vector(a: Any, b: Any) -> bool:
    if b.dim() != a.dim() - 1:
        return b.dim() == 1
    return is_packed(a) == is_packed(b) or tuple(b.shape) == tuple(a.shape)[:-1]


# ------------------------------------------------------------------ norms and products


def matrix_norm(
    A: PackedTensor, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """A norm of each matrix over two dims; the Frobenius norm is that of its entries."""
    if ord == "fro":
        return torch.linalg.vector_norm(A, 2, dim, keepdim, dtype=dtype)

    def call(values: Tensor) -> Tensor:
        return torch.linalg.matrix_norm(values, ord, dtype=dtype)

    places = sorted(A.dim_index(d) for d in dim)
    out = apply("matrix_norm", call, "rc->", [A.movedim(tuple(dim), (-2, -1))])
    for place in places if keepdim else ():
        out = out.unsqueeze(place)
    return out


def norm(
    A: PackedTensor, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """``torch.linalg.norm``: of vectors along one dim, of matrices along two."""
    if ord is not None and isinstance(dim, (tuple, list)) and len(dim) == 2:
        return matrix_norm(A, ord, dim, keepdim, dtype=dtype)
    if ord is not None and dim is None and A.dim() > 1:
        raise ValueError("linalg.norm with ord= of a packed tensor needs dim=: the batch is no matrix dim")
    return torch.linalg.vector_norm(A, 2 if ord is None else ord, dim, keepdim, dtype=dtype)


def cross(name: str, default: int | None) -> Callable[..., PackedTensor]:
    """The cross product along a static dim of size 3."""

    def rule(input: Any, other: Any, dim: int | None = default, *, out: Any = None) -> PackedTensor:
        dispatch.refuse_out(name, {"out": out})
        if dim is None:
            raise ValueError("torch.cross of packed tensors needs an explicit dim=")
        packed = input if is_packed(input) else other
        place = packed.dim_index(dim)
        static_dim(packed, dim, name)
        payloads, layout = align(name, [input, other])
        values = torch.linalg.cross(*payloads, dim=layout.order[place] - layout.k)
        return layout.wrap(values)

    return rule


def vander(x: PackedTensor, *, N: int | None = None) -> Any:
    """Powers 0 to ``N - 1`` of the entries along a new last dim, by default as many as the last dim has."""
    if N is None:
        return apply("vander", torch.linalg.vander, "n->nn", [x])
    if N < 2:
        raise ValueError(f"vander: N must be greater than 1; got {N}")
    return x.unsqueeze(-1) ** torch.arange(N, device=x.device)


def _file(spec: Spec, names: str, count: int = 1, inside: bool = True) -> None:
    handler = matrices(spec, count)
    for name in names.split():
        row = f"linalg_{name}" if inside else name
        if inside:
            function = getattr(torch.linalg, name)
            dispatch.register_function("linalg", handler, row, function, compiles=row not in UNTRACED)
        else:
            dispatch.register("linalg", handler, row, compiles=row not in UNTRACED)


for _spec, _names in UNARY.items():
    _file(_spec, _names)
for _spec, _names in SPELLED.items():
    _file(_spec, _names, inside=False)
for _spec, _names in JOINT.items():
    _file(_spec, _names, _spec.split("->")[0].count(",") + 1)
for _spec, _names in JOINT_SPELLED.items():
    _file(_spec, _names, _spec.split("->")[0].count(",") + 1, inside=False)
_file(_svd, "svd")
_file(_torch_svd, "svd", inside=False)
_file(_qr, "qr")
_file(_torch_lu, "lu", inside=False)
_file(_sided("nn,nk->nk"), "solve_triangular", 2)
_file(_sided("nn,n,nk->nk"), "lu_solve", 3)
for _name, _handler in {
    "solve": of_system("nn,nk->nk", "nn,kn->kn", "nn,n->n"),
    "solve_ex": of_system("nn,nk->nk,", "nn,kn->kn,", "nn,n->n,"),
    "lstsq": of_system("rc,rk->ck,k,,m", "", "rc,r->c,,,m"),
    "matrix_norm": on_operands(matrix_norm),
    "norm": on_operands(norm),
    "vander": on_operands(vander),
    "cross": on_operands(cross("linalg.cross", -1)),
}.items():
    _compiles = f"linalg_{_name}" not in UNTRACED
    _function = getattr(torch.linalg, _name)
    dispatch.register_function("linalg", _handler, f"linalg_{_name}", _function, compiles=_compiles)
dispatch.register("linalg", on_operands(cross("cross", None)), "cross")

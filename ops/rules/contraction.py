"""Contractions: every operator is an einsum, written as letters; :mod:`ops.contraction` does the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from ..contraction import einsum as contracted
from ..tensor import PackedTensor, is_packed
from .shape import on_operands

LETTERS = "abcdefghijklmnopqrstuvwxyz"

# ------------------------------------------------------------------ einsum and matmul


def einsum(equation: str, *operands: Any) -> Any:
    """``torch.einsum``: ragged dims are letters like any other, and the batch has one letter.

    ``"bnc,bmc->bnm"`` gives pairs, ``"bikc,bjkc->bijc"`` sums over a ragged letter.

    Raises:
        ValueError: an equation that does not fit the operands, or samples that would not line up.
    """
    if not isinstance(equation, str):
        raise TypeError("einsum of packed tensors takes an equation such as 'bnc,bmc->bnm'")
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != len(operands):
        raise ValueError(f"einsum: '{equation}' has {len(terms)} terms for {len(operands)} operands")
    spare = [c for c in LETTERS + LETTERS.upper() if c not in equation]
    widths = [x.dim() - len(term.replace("...", "")) for x, term in zip(operands, terms)]
    most = max([0, *[n for n, term in zip(widths, terms) if "..." in term]])
    dots = "".join(spare[:most])
    terms = [term.replace("...", dots[most - n :]) for n, term in zip(widths, terms)]
    if arrow:
        return contracted(operands, terms, result.replace("...", dots))
    once = sorted(c for c in set("".join(terms)) - set(dots) if "".join(terms).count(c) == 1)
    return contracted(operands, terms, dots + "".join(once))


def matmul(input: Any, other: Any, *, out: Any = None) -> Any:
    """Matrix products of the last two dims; the others broadcast, from the right.

    (B, n, C) with (C, D) or (B, C, D) gives (B, n, D); (B, n, C) with (B, C, m) gives pairs (B, n, m).
    """
    dispatch.refuse_out("matmul", {"out": out})
    p, q = input.dim(), other.dim()
    if not p or not q:
        raise RuntimeError("matmul: both operands need at least one dim")
    batch = LETTERS[: max(p, q, 2) - 2]
    first = batch[len(batch) - max(p - 2, 0) :] + ("Z" if p == 1 else "XZ")
    second = batch[len(batch) - max(q - 2, 0) :] + ("Z" if q == 1 else "ZY")
    return contracted((input, other), (first, second), batch + "X" * (p > 1) + "Y" * (q > 1), "matmul")


def fixed(name: str, equation: str) -> Callable[..., Any]:
    """An operator of two tensors whose number of dims is fixed."""
    inputs, result = equation.split("->")
    terms = inputs.split(",")

    def rule(*operands: Any, out: Any = None, **named: Any) -> Any:
        dispatch.refuse_out(name, {"out": out})
        operands += _by_name(named)
        for x, term in zip(operands, terms):
            if x.dim() != len(term):
                raise RuntimeError(f"{name}: a tensor of {len(term)} dims was expected, not of {x.dim()}")
        return contracted(operands, terms, result, name)

    return rule


def _by_name(named: dict[str, Any]) -> tuple[Any, ...]:
    """Operands given by name, as PyTorch orders them: ``input``, then ``mat1`` before ``mat2``, and so on."""
    return tuple(named[key] for key in sorted(named, key=lambda key: (key != "input", key)))


def added(name: str, product: Callable[..., Any]) -> Callable[..., Any]:
    """``beta * input + alpha * product(a, b)``."""

    def rule(*operands: Any, beta: Any = 1, alpha: Any = 1, out: Any = None, **named: Any) -> Any:
        dispatch.refuse_out(name, {"out": out})
        input, *factors = operands + _by_name(named)
        if not (input.is_floating_point() or input.is_complex()):
            beta, alpha = int(beta), int(alpha)  # as for dense integers
        found = product(*factors)
        if alpha != 1:
            found = found * alpha
        return found + (input if beta == 1 else input * beta) if beta != 0 else found

    return rule


def in_place(name: str, rule: Callable[..., Any]) -> Callable[..., Any]:
    """The form that writes into its first operand."""

    def changed(input: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_packed(input):
            raise RuntimeError(
                f"'{name}' would write packed values into a dense tensor of shape {tuple(input.shape)}; "
                "use the form that returns a new tensor"
            )
        return input.copy_(rule(input, *args, **kwargs))

    return changed


# ------------------------------------------------------------------ any number of dims


def inner(input: Any, other: Any, *, out: Any = None) -> Any:
    """Sums of products over the last dims of both."""
    dispatch.refuse_out("inner", {"out": out})
    if not input.dim() or not other.dim():
        return input * other
    first, second = LETTERS[: input.dim() - 1], LETTERS[::-1][: other.dim() - 1]
    return contracted((input, other), (first + "Z", second + "Z"), first + second, "inner")


def tensordot(a: Any, b: Any, dims: Any = 2, out: Any = None) -> Any:
    """Sums of products over pairs of dims."""
    dispatch.refuse_out("tensordot", {"out": out})
    if isinstance(dims, Tensor):
        dims = dims.tolist()
    if isinstance(dims, int):
        if dims > min(a.dim(), b.dim()):
            raise RuntimeError(f"tensordot: {dims} dims of tensors of {a.dim()} and {b.dim()} dims")
        dims = (range(a.dim() - dims, a.dim()), range(dims))
    pairs = [(p % a.dim(), q % b.dim()) for p, q in zip(*dims)]
    first = LETTERS[: a.dim()]
    second = list(LETTERS.upper()[: b.dim()])
    for p, q in pairs:
        second[q] = first[p]
    gone = {first[p] for p, _ in pairs}
    result = "".join(c for c in (*first, *second) if c not in gone)
    return contracted((a, b), (first, "".join(second)), result, "tensordot")


def kron(input: Any, other: Any, *, out: Any = None) -> Any:
    """The Kronecker product: every entry of the first times all of the second.

    Raises:
        ValueError: where one has the batch or a ragged dim, the other has no size of 1.
    """
    dispatch.refuse_out("kron", {"out": out})
    ndim = max(input.dim(), other.dim())
    input, other = (x[(None,) * (ndim - x.dim())] for x in (input, other))
    paired = []
    for d in range(ndim):
        structure = [is_packed(x) and x.order[d] <= len(x.grid.axes) for x in (input, other)]
        if all(structure) or any(structure) and (other if structure[0] else input).shape[d] != 1:
            raise ValueError(f"kron: dim {d} is not static; the other operand needs a size of 1 there")
        paired += [] if any(structure) else [d]
    for d in reversed(paired):
        input, other = input.unsqueeze(d + 1), other.unsqueeze(d)
    product = torch.mul(input, other)
    for d in paired:
        product = product.flatten(d, d + 1)
    return product


def bilinear(input1: Any, input2: Any, weight: Tensor, bias: Tensor | None = None) -> Any:
    """``F.bilinear``: x (*, I), y (*, J), weight (O, I, J) -> (*, O)."""
    lead = LETTERS[: input1.dim() - 1]
    terms = (lead + "X", "OXY", lead + "Y")
    out = contracted((input1, weight, input2), terms, lead + "O", "bilinear")
    return out if bias is None else out + bias


def cdist(x1: Any, x2: Any, p: float = 2.0, compute_mode: str | None = None) -> Any:
    """Distances of all pairs of rows of each sample: (B, n, C) with (B, m, C) -> (B, n, m)."""
    if x1.dim() < 2 or x2.dim() < 2:
        raise RuntimeError(
            f"cdist: tensors of at least 2 dims were expected, not of {x1.dim()} and {x2.dim()}"
        )
    return torch.norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1)


def vecdot(x: Any, y: Any, *, dim: int = -1, out: Any = None) -> Any:
    """Sums of products along one dim; the first operand is conjugated."""
    dispatch.refuse_out("vecdot", {"out": out})
    if x.dtype != y.dtype or not (x.is_floating_point() or x.is_complex()):
        raise RuntimeError(f"vecdot: one floating or complex dtype was expected, not {x.dtype} and {y.dtype}")
    return torch.sum(torch.conj(x) * y, dim)


def multi_dot(tensors: Sequence[Any], *, out: Any = None) -> Any:
    """One matrix product after the other."""
    dispatch.refuse_out("multi_dot", {"out": out})
    if any(x.dim() > 2 for x in tensors):
        raise RuntimeError("multi_dot takes tensors of at most 2 dims; use '@' for matrices in samples")
    return reduce(matmul, tensors)


def chain_matmul(*matrices: Any, out: Any = None) -> Any:
    """One matrix product after the other."""
    return multi_dot(matrices, out=out)


def vdot(input: Any, other: Any, *, out: Any = None) -> Any:
    """``dot`` of the conjugate."""
    return PRODUCTS["dot"](torch.conj(input), other, out=out)


#: Operators of two tensors of fixed numbers of dims.
PRODUCTS = {
    name: fixed(name, equation)
    for name, equation in {
        "mm": "ij,jk->ik",
        "bmm": "bij,bjk->bik",
        "mv": "ij,j->i",
        "dot": "i,i->",
        "outer": "i,j->ij",
        "ger": "i,j->ij",
    }.items()
}
ADDED = {
    name: added(name, product)
    for name, product in {
        "addmm": PRODUCTS["mm"],
        "baddbmm": PRODUCTS["bmm"],
        "addmv": PRODUCTS["mv"],
        "addr": PRODUCTS["outer"],
        "addbmm": fixed("addbmm", "bij,bjk->ik"),
    }.items()
}
RULES: dict[str, Callable[..., Any]] = {
    **PRODUCTS,
    **ADDED,
    **{f"{name}_": in_place(f"{name}_", rule) for name, rule in ADDED.items() if name != "addbmm"},
    "vdot": vdot,
    **{
        rule.__name__: rule
        for rule in (einsum, matmul, inner, tensordot, kron, bilinear, cdist, chain_matmul)
    },
}
for _name, _rule in RULES.items():
    dispatch.register("contraction", on_operands(_rule), _name)
for _name, _inside in {"matmul": matmul, "vecdot": vecdot, "multi_dot": multi_dot}.items():
    _function = getattr(torch.linalg, _name)
    dispatch.register_function("contraction", on_operands(_inside), f"linalg_{_name}", _function)


def _swapped(self: Any, other: Any) -> Any:
    return matmul(other, self)


for _name, _operator in {"__matmul__": matmul, "__rmatmul__": _swapped}.items():
    setattr(PackedTensor, _name, _operator)
    dispatch.PYTHON[_name] = on_operands(_operator)

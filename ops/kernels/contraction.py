"""Products of two packed operands summed over letters: matrix products inside each sample.

An equation such as ``"ikc,jkc->ijc"`` names the dims of one sample of both operands and of the result as
they are stored; the first letters of each may be ragged. A buffer is [cells, *static]: sample after sample,
row-major over its ragged letters, or [B, *static] if it has none.

Each sample is one batched matrix product: letters in both operands and the result are its batch, the others
its rows, columns and inner dim. Samples of equal sizes that follow each other are one product together. All
of it runs below autograd, as its gradients are products of the same kind, and writes into one result.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .define import define


class _Plan(NamedTuple):
    """How an equation is a batched matrix product [batch, m, k] x [batch, k, n].

    Dims count the run of samples as dim 0 of each operand.

    Attributes:
        first, second: the operands' dims in the order run, batch, m, k and run, batch, k, n.
        result: the result's dims in the order run, batch, m, n, as stored.
        swapped: the second operand gives the rows, so that the product comes out as stored.
        groups: how many letters batch, m, k and n have.
    """

    first: tuple[int, ...]
    second: tuple[int, ...]
    result: tuple[int, ...]
    swapped: bool
    groups: tuple[int, int, int, int]


@lru_cache(maxsize=1024)
def _plan(equation: str) -> _Plan:
    inputs, out = equation.split("->")
    x, y = inputs.split(",")
    batch = [c for c in out if c in x and c in y]
    left = [c for c in out if c in x and c not in y]
    right = [c for c in out if c in y and c not in x]
    inner = [c for c in x if c in y and c not in out]
    swapped = bool(left and right) and out.rfind(right[0]) < out.find(left[0])
    if swapped:
        x, y, left, right = y, x, right, left

    def dims(letters: str, *groups: list[str]) -> tuple[int, ...]:
        return (0, *(letters.index(c) + 1 for group in groups for c in group))

    return _Plan(
        dims(x, batch, left, inner),
        dims(y, batch, inner, right),
        dims(out, batch, left, right),
        swapped,
        (len(batch), len(left), len(inner), len(right)),
    )


def _grouped(x: Tensor, counts: Sequence[int]) -> list[int]:
    """The sizes of groups of neighbouring dims."""
    sizes, start = [], 0
    for count in counts:
        sizes.append(prod(x.shape[start : start + count]))
        start += count
    return sizes


def _aligned(x: Tensor) -> Tensor:
    """A batch of matrices [b, m, k] as the library's products read them without a copy of their own.

    Channels that are stored last come first, the rest as stored: the transposition of one matrix, which is
    1.3 to 2 times faster than that of three dims.
    """
    if x.stride(2) == 1 or x.stride(1) == 1:
        return x
    stored = x if x.stride(1) >= x.stride(2) else x.mT
    ready = stored.flatten(1).contiguous().view(stored.shape)
    return ready if stored is x else ready.mT


def _multiply(x: Tensor, y: Tensor, out: Tensor, plan: _Plan) -> None:
    """One run of samples; all three as stored, run first."""
    batch, left, inner, right = plan.groups
    x, y, target = x.permute(plan.first), y.permute(plan.second), out.permute(plan.result)
    b, m, k = _grouped(x, (1 + batch, left, inner))
    n = prod(y.shape[1 + batch + inner :])
    rows, columns = _aligned(x.reshape(b, m, k)), _aligned(y.reshape(b, k, n))
    if target.is_contiguous():
        torch.bmm(rows, columns, out=target.view(b, m, n))
    else:
        target.copy_(torch.bmm(rows, columns).view(target.shape))


def _multiply_matrices(sides: list[list[Tensor]], plan: _Plan) -> None:
    """Samples one by one whose operands are matrices: fewer calls, which count where samples are small."""
    dims = (plan.first, plan.second, plan.result)
    for k in range(3):
        if dims[k] != (0, 1, 2):
            sides[k] = [x.t() for x in sides[k]]
    for x, y, out in zip(*sides):
        torch.mm(x, y, out=out)


def _cut(
    buffer: Tensor, letters: str, lengths: dict[str, np.ndarray], runs: list[tuple[int, int]], alone: bool
) -> list[Tensor]:
    """A buffer as one tensor [run, *letters] for each run of samples; without ``run`` where all are alone."""
    starts = [start for start, _ in runs]
    counts = np.array([stop - start for start, stop in runs], dtype=np.int64)
    sizes = [lengths[c][starts] for c in letters if c in lengths]
    cells = counts
    for n in sizes:
        cells = cells * n
    columns = [n.tolist() for n in (sizes if alone else [counts, *sizes])]
    shapes = zip(*columns) if columns else [()] * len(runs)
    tail = buffer.shape[1:]
    return [rows.view(*shape, *tail) for rows, shape in zip(buffer.split(cells.tolist()), shapes)]


def _runs(lengths: Sequence[np.ndarray], samples: int) -> list[tuple[int, int]]:
    """Samples that follow each other and are of equal sizes: first and last + 1."""
    changed = np.zeros(max(samples - 1, 0), dtype=bool)
    for n in lengths:
        changed |= n[1:] != n[:-1]
    edges = [0, *(np.nonzero(changed)[0] + 1).tolist(), samples]
    return list(zip(edges[:-1], edges[1:])) if samples else []


def _contract(
    x: Tensor, y: Tensor, lengths: Tensor, ragged: str, equation: str, rows: int, batch: int
) -> Tensor:
    inputs, result = equation.split("->")
    first, second = inputs.split(",")
    host = dict(zip(ragged, lengths.numpy()))
    static = {c: n for side, t in ((first, x), (second, y)) for c, n in zip(side[::-1], t.shape[:0:-1])}
    tail = [static[c] for c in result if c not in host]
    out = x.new_empty((rows, *tail))
    runs, plan = _runs(list(host.values()), batch), _plan(equation)
    alone = plan.groups == (0, 1, 1, 1) and len(runs) == batch
    sides = [_cut(t, letters, host, runs, alone) for t, letters in ((x, first), (y, second), (out, result))]
    if plan.swapped:
        sides[0], sides[1] = sides[1], sides[0]
    if alone:
        _multiply_matrices(sides, plan)
    else:
        for left, right, target in zip(*sides):
            _multiply(left, right, target, plan)
    return out


def _contract_fake(
    x: Tensor, y: Tensor, lengths: Tensor, ragged: str, equation: str, rows: int, batch: int
) -> Tensor:
    inputs, result = equation.split("->")
    first, second = inputs.split(",")
    static = {c: n for side, t in ((first, x), (second, y)) for c, n in zip(side[::-1], t.shape[:0:-1])}
    return x.new_empty((rows, *[static[c] for c in result if c not in ragged]))


def _contract_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, y, lengths, ctx.ragged, ctx.equation, _, ctx.batch = inputs
    ctx.save_for_backward(x, y, lengths)


def _contract_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, y, lengths = ctx.saved_tensors
    inputs, out = ctx.equation.split("->")
    first, second = inputs.split(",")
    grads: list[Any] = [None, None]
    if ctx.needs_input_grad[0]:
        to_first = f"{out},{second}->{first}"
        grads[0] = contract(grad, y.conj(), lengths, ctx.ragged, to_first, x.shape[0], ctx.batch)
    if ctx.needs_input_grad[1]:
        to_second = f"{out},{first}->{second}"
        grads[1] = contract(grad, x.conj(), lengths, ctx.ragged, to_second, y.shape[0], ctx.batch)
    return (*grads, None, None, None, None, None)


#: Products of operands summed over letters, inside each sample: x [cells of x, *static], y [cells of y,
#: *static], host lengths [letters, B] of the ragged letters, the equation of one sample as stored ->
#: [rows, *static].
#: Every letter stands in two of the three; those of one operand alone are summed before.
contract = define(
    "contract(Tensor x, Tensor y, Tensor lengths, str ragged, str equation, SymInt rows, SymInt batch)"
    " -> Tensor",
    _contract,
    _contract_fake,
    setup=_contract_setup,
    backward=_contract_backward,
    differentiable=2,
)

"""Einsum over packed and dense operands: what each letter is, and how a product of two is computed.

A letter is the batch, a ragged axis, the rows of all samples, or a static dim. It has one meaning in all
operands; a size of 1 broadcasts, as everywhere. Letters of one operand alone are summed out first. The
product of two is one of these:

* no letter is summed: they are multiplied, broadcast to each other;
* a dense operand of static letters alone (a weight), or two operands on the same cells: one
  ``torch.einsum`` over the cells, which are one more letter;
* anything else: :data:`ops.kernels.contraction.contract`, matrix products inside each sample. The batch,
  if the result lacks it, is summed at the end.

More operands are multiplied two by two, those first that leave the fewest letters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from .align import Layout, dense_payload, over_cells, packed_payload
from .axis import Axis, Grid, require_same
from .kernels.contraction import contract
from .tensor import ROWS, PackedTensor, is_packed, stored_dims

#: What a letter is: an axis, or one of these.
BATCH, CELLS, STATIC = "the batch", "the rows of all samples", "a static dim"
Role = Axis | str
#: Spare letters of :func:`torch.einsum` for the cells of a grid.
SPARE = "ZYXWVUTSRQPONMLKJIHGFEDCBA"


@dataclass
class Operand:
    """A tensor and a letter for each of its logical dims."""

    tensor: Any
    letters: str

    def role(self, letter: str) -> Role:
        """What a letter of it is, as far as this operand shows."""
        if not is_packed(self.tensor):
            return STATIC
        c = self.tensor.order[self.letters.index(letter)]
        axes = self.tensor.grid.axes
        return BATCH if c == 0 else CELLS if c == ROWS else axes[c - 1] if c <= len(axes) else STATIC


def einsum(operands: Sequence[Any], inputs: Sequence[str], result: str, what: str = "einsum") -> Any:
    """The product of operands, summed over all letters that ``result`` lacks.

    Args:
        operands: packed and dense tensors.
        inputs: a letter for each dim of each.
        result: the letters of the result, each once.

    Raises:
        ValueError: a letter that means two things, structures that differ, or the batch summed where a
            ragged letter is kept; names the letter.
    """
    if not any(is_packed(x) for x in operands):
        return torch.einsum(f"{','.join(inputs)}->{result}", *operands)
    parts = [_distinct(Operand(x, letters), what) for x, letters in zip(operands, inputs)]
    roles = _roles(parts, what)
    sized = {c for part in parts for c in part.letters if not _is_one(part, c)}
    parts = [_without_ones(part, roles, sized) for part in parts]
    _check_result(roles, result, what)
    samples = next((x.batch_size for x in operands if is_packed(x)), None)
    if samples is None:
        raise TypeError(f"{what}: one of the operands that are multiplied must be packed")
    parts = [_per_sample(part, roles, samples, what) for part in parts]
    while len(parts) > 1:
        i, j = _cheapest(parts, roles, result)
        others = [part for n, part in enumerate(parts) if n not in (i, j)]
        wanted = set(result).union(*(part.letters for part in others))
        first, second = (_summed(parts[n], wanted | set(parts[m].letters)) for n, m in ((i, j), (j, i)))
        parts = [_product(first, second, wanted, roles, what), *others]
    (part,) = parts
    part = _summed(part, set(result))
    return part.tensor.permute([part.letters.index(c) for c in result])


# ------------------------------------------------------------------ letters


def _distinct(part: Operand, what: str) -> Operand:
    """A letter that stands twice in one operand takes its diagonal."""
    if part.tensor.dim() != len(part.letters):
        raise ValueError(
            f"{what}: '{part.letters}' names {len(part.letters)} dims of a tensor of {part.tensor.dim()}"
        )
    for c in dict.fromkeys(part.letters):
        while part.letters.count(c) > 1:
            a, b = part.letters.index(c), part.letters.rindex(c)
            rest = "".join(e for d, e in enumerate(part.letters) if d not in (a, b))
            part = Operand(torch.diagonal(part.tensor, 0, a, b), rest + c)
    return part


def _roles(parts: list[Operand], what: str) -> dict[str, Role]:
    """What each letter is; the axes of packed operands agree."""
    roles: dict[str, Role] = {}
    for part in parts:
        for c in part.letters:
            role = part.role(c)
            known = roles.setdefault(c, role)
            if known == STATIC:
                roles[c] = role
            elif isinstance(known, Axis) and isinstance(role, Axis):
                require_same(known, role, f"{what}, letter '{c}'")
            elif role != STATIC and known != role:
                raise ValueError(f"{what}: the letter '{c}' is {_name(known)} here and {_name(role)} there")
    for part in parts:
        for c in part.letters:
            if is_packed(part.tensor) and part.role(c) == STATIC != roles[c] and not _is_one(part, c):
                raise ValueError(f"{what}: the letter '{c}' is {_name(roles[c])} here and {STATIC} there")
    batch = [c for c, role in roles.items() if role == BATCH]
    if len(batch) > 1:
        raise ValueError(
            f"{what}: '{batch[0]}' and '{batch[1]}' are both the batch; a product of each sample with every "
            "other one is not packed: give them one letter, or use to_padded()"
        )
    return roles


def _name(role: Role) -> str:
    return f"the ragged axis '{role.label}'" if isinstance(role, Axis) else role


def _size(part: Operand, c: str) -> Any:
    """The size of a static letter of an operand."""
    d = part.letters.index(c)
    x = part.tensor
    return x.values.shape[x.order[d] - len(x.grid.axes)] if is_packed(x) else x.shape[d]


def _is_one(part: Operand, c: str) -> bool:
    """Whether a letter is a static dim of size 1 in an operand."""
    return part.role(c) == STATIC and guard_or_false(_size(part, c) == 1)


def _without_ones(part: Operand, roles: dict[str, Role], sized: set[str]) -> Operand:
    """Without dims of size 1 that broadcast: the letter is sized in another operand."""
    gone = [d for d, c in enumerate(part.letters) if c in sized and _is_one(part, c)]
    if not gone:
        return part
    letters = "".join(c for d, c in enumerate(part.letters) if d not in gone)
    return Operand(part.tensor.squeeze(tuple(gone)), letters)


def _check_result(roles: dict[str, Role], result: str, what: str) -> None:
    unknown = [c for c in result if c not in roles]
    if unknown:
        raise ValueError(f"{what}: no operand has the letter '{unknown[0]}' of the result")
    batch = next((c for c, role in roles.items() if role == BATCH), None)
    kept = [c for c in result if isinstance(roles[c], Axis)]
    if batch is not None and batch not in result and kept:
        raise ValueError(
            f"{what}: the batch '{batch}' is summed but the ragged letter '{kept[0]}' is kept; samples do "
            "not line up"
        )


# ------------------------------------------------------------------ operands made ready


def _per_sample(part: Operand, roles: dict[str, Role], samples: int, what: str) -> Operand:
    """A dense operand with ragged letters as a packed one, read by position.

    Without them it stays dense, (B, ...) if it has the batch.
    """
    if is_packed(part.tensor):
        return part
    ragged = [c for c in part.letters if isinstance(roles[c], Axis)]
    batch = [c for c in part.letters if roles[c] == BATCH]
    static = [c for c in part.letters if roles[c] == STATIC]
    cells = [c for c in part.letters if roles[c] == CELLS]
    letters = "".join(batch + cells + ragged + static)
    x = part.tensor.permute([part.letters.index(c) for c in letters])
    if batch and not torch.compiler.is_compiling() and x.shape[0] != samples:
        raise ValueError(
            f"{what}: '{batch[0]}' is {samples} samples here and a dim of size {x.shape[0]} there"
        )
    if batch:
        torch._check(x.shape[0] == samples)
    if not ragged:
        return Operand(x, letters)
    grid = Grid([roles[c] for c in ragged])  # type: ignore[misc]
    if not batch:
        x, letters = x.unsqueeze(0), _batch_letter(roles) + letters
    layout = Layout(grid, tuple(range(len(letters))))
    return Operand(layout.wrap(over_cells(dense_payload(what, x, layout), x, layout)), letters)


def _batch_letter(roles: dict[str, Role]) -> str:
    return next(c for c, role in roles.items() if role == BATCH)


def _summed(part: Operand, wanted: set[str]) -> Operand:
    """Without the letters that nothing needs, which are summed."""
    dims = [d for d, c in enumerate(part.letters) if c not in wanted]
    letters = "".join(c for c in part.letters if c in wanted)
    return Operand(torch.sum(part.tensor, dims), letters) if dims else part


def _cheapest(parts: list[Operand], roles: dict[str, Role], result: str) -> tuple[int, int]:
    """The two operands whose product has the fewest ragged letters, then the fewest letters."""

    best, found = None, (0, 1)
    for j in range(len(parts)):
        for i in range(j):
            others = set(result).union(*(p.letters for n, p in enumerate(parts) if n not in (i, j)))
            left = (set(parts[i].letters) | set(parts[j].letters)) & others
            cost = (sum(isinstance(roles[c], Axis) for c in left), len(left))
            if best is None or cost < best:
                best, found = cost, (i, j)
    return found


# ------------------------------------------------------------------ products of two


def _product(x: Operand, y: Operand, wanted: set[str], roles: dict[str, Role], what: str) -> Operand:
    """The product of two operands on the letters that are wanted."""
    if not is_packed(x.tensor) and not is_packed(y.tensor):
        return _dense(x, y, wanted)
    if not is_packed(x.tensor):
        x, y = y, x
    shared = set(x.letters) & set(y.letters)
    varying = {c for c in y.letters if roles[c] != STATIC}
    if not varying or (is_packed(y.tensor) and _in_step(x, y, wanted)):
        return _over_cells(x, y, wanted, what)
    if CELLS in (roles[c] for c in varying | set(x.letters)):
        raise ValueError(
            f"{what}: rows of all samples meet an operand that is not on the same rows; unflatten them first"
        )
    if shared <= wanted:
        return _multiplied(x, y)
    return _inside_samples(x, y, wanted, roles)


def _dense(x: Operand, y: Operand, wanted: set[str]) -> Operand:
    letters = "".join(c for c in dict.fromkeys(x.letters + y.letters) if c in wanted)
    return Operand(torch.einsum(f"{x.letters},{y.letters}->{letters}", x.tensor, y.tensor), letters)


def _in_step(x: Operand, y: Operand, wanted: set[str]) -> bool:
    """Whether both lie on the same cells, all of which are kept, or all summed."""
    letters = _structure(x)
    return letters == _structure(y) and (letters <= wanted or not letters & wanted)


def _structure(part: Operand) -> set[str]:
    return {c for d, c in enumerate(part.letters) if part.tensor.order[d] <= len(part.tensor.grid.axes)}


def _over_cells(x: Operand, y: Operand, wanted: set[str], what: str) -> Operand:
    """One einsum over the cells of ``x``, with a dense operand or one on the same cells."""
    packed: PackedTensor = x.tensor
    k = len(packed.grid.axes)
    spare = next(c for c in SPARE if c not in x.letters + y.letters)
    static = "".join(x.letters[d] for d in stored_dims(packed) if packed.order[d] > k)
    if is_packed(y.tensor):
        inner = [c for c in y.letters if c not in _structure(y)]
        order = _aligned_order(packed, x.letters, y.letters, inner)
        other, letters = packed_payload(what, y.tensor, Layout(packed.grid, order)), spare + "".join(inner)
    else:
        other, letters = y.tensor, y.letters
    structure = [c for c in x.letters if c in _structure(x)]
    kept = [c for c in dict.fromkeys(static + letters.replace(spare, "")) if c in wanted]
    rows = spare if structure[0] in wanted else ""  # all are kept, or all summed
    values = torch.einsum(f"{spare}{static},{letters}->{rows}{''.join(kept)}", packed.values, other)
    if not rows:
        return Operand(values, "".join(kept))
    order = tuple(packed.order[x.letters.index(c)] for c in structure)
    out = PackedTensor(values, packed.grid, (*order, *range(k + 1, k + 1 + len(kept))))
    return Operand(out, "".join(structure + kept))


def _aligned_order(x: PackedTensor, x_letters: str, y_letters: str, inner: list[str]) -> tuple[int, ...]:
    """The order of an operand with its structure stored as that of ``x``, then ``inner``."""
    k = len(x.grid.axes)
    return tuple(k + 1 + inner.index(c) if c in inner else x.order[x_letters.index(c)] for c in y_letters)


def _multiplied(x: Operand, y: Operand) -> Operand:
    """Nothing is summed: a product that broadcasts."""
    letters = "".join(dict.fromkeys(x.letters + y.letters))
    return Operand(_spread(x, letters) * _spread(y, letters), letters)


def _spread(part: Operand, letters: str) -> Any:
    """With its dims in the order of ``letters``, and of size 1 where it has none."""
    x = part.tensor.permute([part.letters.index(c) for c in letters if c in part.letters])
    for d, c in enumerate(letters):
        if c not in part.letters:
            x = x.unsqueeze(d)
    return x


def _inside_samples(x: Operand, y: Operand, wanted: set[str], roles: dict[str, Role]) -> Operand:
    """Matrix products inside each sample."""
    batch = _batch_letter(roles)
    (first, a), (second, b) = _stored(x, roles), _stored(y, roles)
    letters = [c for c in dict.fromkeys(x.letters + y.letters) if c in wanted and c != batch]
    axes = [c for c in letters if isinstance(roles[c], Axis)]
    out = "".join(axes + [c for c in letters if c not in axes])
    ragged = "".join(c for c in dict.fromkeys(a + b) if isinstance(roles[c], Axis))
    owner = roles[ragged[0]]
    assert isinstance(owner, Axis)
    grid = Grid([roles[c] for c in axes]) if axes else None  # type: ignore[misc]
    rows = owner.batch_size if grid is None else grid.cells
    lengths = torch.stack([roles[c].lengths for c in ragged])  # type: ignore[union-attr]
    _check_static(x, y, roles)
    first, second = _autocast(first), _autocast(second)
    values = contract(first, second, lengths, ragged, f"{a},{b}->{out}", rows, owner.batch_size)
    if grid is not None:
        return Operand(PackedTensor(values, grid, tuple(range(len(out) + 1))), batch + out)
    return Operand(values, batch + out) if batch in wanted else Operand(values.sum(0), out)


def _stored(part: Operand, roles: dict[str, Role]) -> tuple[Tensor, str]:
    """The payload, and the letters of one sample as it stores them."""
    x = part.tensor
    if not is_packed(x):  # (B, *static)
        batch = part.letters.index(_batch_letter(roles))
        return x.movedim(batch, 0), part.letters[:batch] + part.letters[batch + 1 :]
    return x.values, "".join(part.letters[d] for d in stored_dims(x) if x.order[d] != 0)


def _autocast(x: Tensor) -> Tensor:
    """In the dtype that autocast gives matrix products."""
    kind = x.device.type
    if x.dtype == torch.float64 or not x.is_floating_point() or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))


def _check_static(x: Operand, y: Operand, roles: dict[str, Role]) -> None:
    for c in x.letters:
        if c in y.letters and roles[c] == STATIC:
            torch._check(_size(x, c) == _size(y, c))

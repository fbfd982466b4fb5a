"""The per-sample reference: what an operator on packed tensors has to equal.

The contract of the package is ``D(f(x)) == f(D(x))``, with ``D(x)`` the list of dense samples. A test
states its operands as dense samples and a pattern (:class:`Ragged`), or as a dense tensor whose dims are
declared (:class:`Dense`); :func:`check` runs a function once on the packed operands and once per sample,
and compares values, structure and gradients::

    check(lambda x, w: F.linear(x, w).mean(1), Ragged([torch.randn(3, 4), torch.randn(5, 4)], "n 4"), w)

The reference sees each sample as a dense batch of one, so dims have the same numbers on both sides. It
is made of dense tensors only: nothing that the package computed enters it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .axis import Axis, Grid
from .pattern import Pattern, parse
from .tensor import PackedTensor

__all__ = ["Dense", "Ragged", "assert_matches", "check", "pack", "per_sample"]

BATCH = "batch"
Samples = list[Tensor]


@dataclass(frozen=True, eq=False)
class Ragged:
    """A packed operand, stated as its dense samples and their pattern.

    Attributes:
        samples: one dense tensor a sample, without a batch dim.
        pattern: e.g. ``"n _"``; operands of one call that use a name share that axis.
    """

    samples: Sequence[Tensor]
    pattern: str

    def lengths(self) -> dict[str, list[int]]:
        """Axis name -> the length of every sample."""
        spec = parse(self.pattern)
        return {name: [s.shape[d] for s in self.samples] for name, d in zip(spec.names, spec.ragged)}


@dataclass(frozen=True, eq=False)
class Dense:
    """A dense operand that broadcasts against packed ones, with its dims declared.

    Attributes:
        tensor: the whole operand.
        pattern: one token a dim: ``batch`` is sliced by sample, an axis name is cut to the sample's
            length, anything else stays: ``"batch n _"`` is read by sample and position.
    """

    tensor: Tensor
    pattern: str

    def sample(self, index: int, lengths: dict[str, list[int]]) -> Tensor:
        """What sample ``index`` sees of the operand, as a batch of one."""
        part = self.tensor
        for dim, token in enumerate(self.pattern.split()):
            if token == BATCH:
                part = part.narrow(dim, index, 1)
            elif token in lengths:
                part = part.narrow(dim, 0, lengths[token][index])
        return part


def pack(*operands: Ragged, share: bool = True) -> list[PackedTensor]:
    """Pack operands by the layout rule, without the package's own constructors.

    Args:
        share: one Axis a name and one Grid a tuple of names for all operands, as a loader delivers
            them; else every operand is built apart by ``PackedTensor.from_list``.
    """
    if not share:
        return [PackedTensor.from_list(list(op.samples), op.pattern) for op in operands]
    axes: dict[str, Axis] = {}
    grids: dict[tuple[str, ...], Grid] = {}
    return [_pack_shared(op, axes, grids) for op in operands]


def _pack_shared(op: Ragged, axes: dict[str, Axis], grids: dict[tuple[str, ...], Grid]) -> PackedTensor:
    spec = parse(op.pattern)
    for name, lengths in op.lengths().items():
        if name not in axes:
            axes[name] = Axis(lengths, name=name)
    if spec.names not in grids:
        grids[spec.names] = Grid(tuple(axes[name] for name in spec.names))
    return PackedTensor(_payload(op.samples, spec), grids[spec.names], spec.order)


def _payload(samples: Sequence[Tensor], spec: Pattern) -> Tensor:
    if not samples:
        return torch.zeros(0, *(int(spec.tokens[d] or 0) for d in spec.static), dtype=torch.float64)
    rows = []
    for sample in samples:
        cells = math.prod(sample.shape[d] for d in spec.ragged)
        static = [sample.shape[d] for d in spec.static]
        rows.append(sample.permute(*spec.ragged, *spec.static).reshape(cells, *static))
    return torch.cat(rows)


def per_sample(fn: Callable[..., Tensor], *operands: Any, batch_dim: int = 0) -> Samples:
    """Run ``fn`` on each dense sample.

    Args:
        fn: a function of dense tensors with a batch dim.
        operands: :class:`Ragged` ones are fed sample by sample, :class:`Dense` ones as declared, all
            others as they are.
        batch_dim: where the batch dim stands in the result.

    Returns:
        One dense tensor a sample, without the batch dim.
    """
    lengths: dict[str, list[int]] = {}
    for op in operands:
        if isinstance(op, Ragged):
            lengths.update(op.lengths())
    count = next(len(op.samples) for op in operands if isinstance(op, Ragged))
    results = []
    for i in range(count):
        out = fn(*(_of_sample(op, i, lengths) for op in operands))
        if out.shape[batch_dim] != 1:
            raise ValueError(f"dim {batch_dim} of the reference's result {tuple(out.shape)} is not the batch")
        results.append(out.select(batch_dim, 0))
    return results


def _of_sample(op: Any, index: int, lengths: dict[str, list[int]]) -> Any:
    if isinstance(op, Ragged):
        return op.samples[index][None]
    if isinstance(op, Dense):
        return op.sample(index, lengths)
    return op


def assert_matches(
    actual: PackedTensor | Tensor,
    expected: Sequence[Tensor] | Tensor,
    *,
    batch_dim: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Check values, dtype and structure of a result.

    Args:
        actual: a packed result, or a plain tensor if no ragged axis is left.
        expected: one dense tensor a sample, without a batch dim; or one tensor for a result over the
            whole batch, which then has to be a plain tensor.
        batch_dim: where the batch dim stands in ``actual``.

    Raises:
        AssertionError: they differ.
    """
    if isinstance(actual, PackedTensor):
        assert not isinstance(expected, Tensor), f"a plain tensor was expected, not {actual!r}"
        assert len(actual.axes) > 0, "a result without a ragged axis has to be a plain tensor"
        _assert_structure(actual, expected, batch_dim)
    pieces = _pieces(actual)
    wanted = _wanted(actual, expected, batch_dim)
    assert len(pieces) == len(wanted), f"{len(pieces)} samples, expected {len(wanted)}"
    for i, (piece, want) in enumerate(zip(pieces, wanted)):
        torch.testing.assert_close(
            piece, want, rtol=rtol, atol=atol, equal_nan=True, msg=_prefixed(f"sample {i}")
        )


def _prefixed(place: str) -> Callable[[str], str]:
    return lambda text: f"{place}: {text}"


def _assert_structure(actual: PackedTensor, expected: Sequence[Tensor], batch_dim: int) -> None:
    shapes = [list(want.shape) for want in expected]
    assert actual.batch_size == len(expected)
    assert actual.sizes.tolist() == shapes, f"sizes {actual.sizes.tolist()}, expected {shapes}"
    assert actual.numel() == sum(want.numel() for want in expected)
    if shapes:
        envelope = [max(column) for column in zip(*shapes)]
        envelope.insert(batch_dim, len(shapes))
        assert list(actual.shape) == envelope, f"shape {tuple(actual.shape)}, expected {envelope}"


def _pieces(result: Any) -> Samples:
    return result.to_list() if isinstance(result, PackedTensor) else [result]


def _wanted(actual: Any, expected: Sequence[Tensor] | Tensor, batch_dim: int) -> Samples:
    if isinstance(actual, PackedTensor):
        return list(expected)
    if isinstance(expected, Tensor):
        return [expected]
    return [torch.stack(list(expected), batch_dim)]


@dataclass(eq=False)
class _Run:
    """One evaluation: the arguments, the tensors whose gradients count, and the result."""

    arguments: list[Any]
    leaves: list[Any]
    result: Any = None


def check(
    fn: Callable[..., Any],
    *operands: Any,
    reference: Callable[..., Sequence[Tensor] | Tensor] | None = None,
    params: Iterable[Tensor] = (),
    grad: bool = True,
    share: bool = True,
    batch_dim: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
) -> Any:
    """Compare ``fn`` on packed tensors with the same on each dense sample, values and gradients.

    Gradients are taken for random cotangents, with respect to every floating operand and ``params``.

    Args:
        fn: a function of the operands.
        operands: :class:`Ragged` and :class:`Dense` ones, plain tensors and anything else.
        reference: a function of the same operands (:class:`Ragged` and :class:`Dense` as they are) that
            gives what :func:`assert_matches` expects; the default is ``fn`` on each sample.
        params: parameters that ``fn`` uses beside its operands.
        grad: whether to compare gradients.
        share: whether operands share axes by name, see :func:`pack`.
        batch_dim: where the batch dim stands in the result.

    Returns:
        The packed side's result.

    Raises:
        AssertionError: they differ.
    """
    if reference is None:

        def reference(*ops: Any) -> Samples:
            return per_sample(fn, *ops, batch_dim=batch_dim)

    parameters = list(params)
    dense, packed = _dense_run(operands, grad), _packed_run(operands, grad, share)
    dense.result = reference(*dense.arguments)
    packed.result = fn(*packed.arguments)
    assert_matches(packed.result, dense.result, batch_dim=batch_dim, rtol=rtol, atol=atol)
    if grad:
        _compare_gradients(packed, dense, parameters, batch_dim, rtol, atol)
    return packed.result


def _leaf(tensor: Tensor, grad: bool) -> Tensor:
    fresh = tensor.detach().clone()
    return fresh.requires_grad_(grad and fresh.is_floating_point())


def _dense_run(operands: Sequence[Any], grad: bool) -> _Run:
    arguments: list[Any] = []
    leaves: list[Any] = []
    for op in operands:
        if isinstance(op, Ragged):
            op = replace(op, samples=[_leaf(s, grad) for s in op.samples])
            leaves.append(list(op.samples))
        elif isinstance(op, Dense):
            op = replace(op, tensor=_leaf(op.tensor, grad))
            leaves.append([op.tensor])
        elif isinstance(op, Tensor):
            op = _leaf(op, grad)
            leaves.append([op])
        arguments.append(op)
    return _Run(arguments, leaves)


def _packed_run(operands: Sequence[Any], grad: bool, share: bool) -> _Run:
    packed = iter(pack(*(op for op in operands if isinstance(op, Ragged)), share=share))
    arguments: list[Any] = []
    leaves: list[Any] = []
    for op in operands:
        if isinstance(op, Ragged):
            op = next(packed)
            if grad and op.dtype.is_floating_point:
                op.requires_grad_()
            leaves.append(op)
        elif isinstance(op, (Dense, Tensor)):
            op = _leaf(op.tensor if isinstance(op, Dense) else op, grad)
            leaves.append([op])
        arguments.append(op)
    return _Run(arguments, leaves)


def _compare_gradients(
    packed: _Run, dense: _Run, params: list[Tensor], batch_dim: int, rtol: float | None, atol: float | None
) -> None:
    wanted = _wanted(packed.result, dense.result, batch_dim)
    if not any(want.requires_grad for want in wanted):
        return
    cotangents = [torch.randn_like(want) for want in wanted]
    want_leaves, want_params = _gradients(wanted, cotangents, dense.leaves, params)
    got_leaves, got_params = _gradients(_pieces(packed.result), cotangents, packed.leaves, params)
    for k, (got, want) in enumerate(zip(got_leaves + got_params, want_leaves + want_params, strict=True)):
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            torch.testing.assert_close(
                a,
                b,
                rtol=rtol,
                atol=atol,
                equal_nan=True,
                msg=_prefixed(f"gradient {k}, piece {i}"),
            )


def _gradients(
    outputs: Samples, cotangents: Samples, leaves: list[Any], params: list[Tensor]
) -> tuple[list[Samples], list[Samples]]:
    for param in params:
        param.grad = None
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    assert pairs, "the result has no gradient, the reference has one"
    torch.autograd.backward([o for o, _ in pairs], [c for _, c in pairs])
    return [_grads_of(leaf) for leaf in leaves], [[_grad_of(p)] for p in params]


def _grads_of(leaf: Any) -> Samples:
    if not isinstance(leaf, PackedTensor):
        return [_grad_of(t) for t in leaf]
    if leaf.grad is None:
        return [torch.zeros_like(s) for s in leaf.to_list()]
    return leaf.grad.to_list()


def _grad_of(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.clone()

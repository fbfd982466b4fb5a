"""Tests that nobody here wrote: PyTorch's own sample inputs for every operator of the table, made ragged.

``op_db`` holds, for each operator, calls that PyTorch tests it with. Each call's input is taken for a padded
batch: dim 0 is the batch, a choice of the other dims is cut to lengths of each sample's own, and further
operands of the same sizes are cut alike. The operator on the packed tensor has to give, for each sample,
what the same call gives on that sample alone, values and gradients; or it refuses. Every dtype that an
operator takes is tried. Single and half precision may differ from the same dtype's result where they are as
close to the result in double precision: packed sums accumulate in another order and, in half precision, in
single.

``UNCOMPARED`` is the ledger of operators of which no call can be compared, with the reason. An entry of which
a call compares fails the suite, and so does an operator without an entry of which none does.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.common_methods_invocations import op_db

from ops import PackedTensor, dispatch, is_packed
from ops.tensor import ROWS as MERGED

REFUSALS = (NotImplementedError, TypeError, ValueError, IndexError, RuntimeError)
CONDITIONS = ("ragged", "equal", "one sample", "an empty sample", "one position", "as many as another dim")
DTYPES = (torch.float64, torch.int64, torch.float32, torch.bfloat16, torch.bool)
#: Relative and absolute tolerance of values; gradients have ten times as much.
TOLERANCE = {
    torch.float32: (1e-5, 1e-5),
    torch.complex64: (1e-5, 1e-5),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (2e-2, 2e-2),
}
EXACT = (1e-7, 1e-8)
#: Kinds whose operands broadcast; an operand of fewer dims is something else for the others.
BROADCASTING = ("pointwise", "loss")
#: Operators whose results are random or uninitialised; tests of their own look at structure and statistics.
RANDOM = set(
    """rand_like randn_like randint_like empty_like new_empty new_empty_strided bernoulli multinomial normal
    uniform rrelu native_dropout dropout
    dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout""".split()
)
#: Operators whose sample inputs mean something else once they are cut; each has tests of its own.
APART = {
    "squeeze_copy": "the reference squeezes its batch of one",
    "squeeze": "the reference squeezes its batch of one",
    "unbind": "the batch unbound is samples, not a batch",
    "argwhere": "what it finds in the whole batch may be as many as samples",
    "nonzero": "what it finds in the whole batch may be as many as samples",
    "diff": "what is prepended is cut where its size happens to be the input's",
    "embedding": "the table is the input's place here, and would be packed",
    "lu_unpack": "PyTorch 2.11 ends the process over the gradient of an empty matrix",
    "unique": "its inverse points into the distinct entries of the whole batch",
    "unique_consecutive": "its inverse points into the distinct entries of the whole batch",
    "histogram": "it counts over the whole batch, into as many bins as there are samples, by chance",
    "histc": "it counts over the whole batch, into as many bins as there are samples, by chance",
    "linalg_norm": "most of its calls are norms of all dims, the batch among them",
    "batch_norm": "its statistics are those of the whole batch",
    "matmul": "beside an operand of more dims, what is the batch here is not the first dim of the result",
    **dict.fromkeys(
        ("addbmm", "addmv", "addr"), "the first dim, taken for the batch, belongs to one of two factors"
    ),
    "gaussian_nll_loss": "a variance of fewer dims is one a sample, and is cut as one a position",
    "multi_head_attention_forward": "its weights are cut where their sizes are the input's",
}
#: Operators that leave the order of equal values open, unless they are told not to.
STABLE = ("sort", "argsort")
#: Operators that give integers, against their own rule, for integers of a sample without positions.
FLOATING = ("trapezoid", "trapz", "cumulative_trapezoid")
#: Operators whose second result, positions, is open where values are equal, as they are in all but double
#: precision; and with it where a gradient goes.
OPEN = ("topk", "kthvalue")
#: The ledger: operators of which no call can be compared, by the reason.
LEDGER: dict[str, str] = {
    "its result belongs to the whole batch and is not compared by sample": """
        allclose bincount dist equal masked_select max.reduction_no_dim min.reduction_no_dim norm.fro
        norm.nuc ravel std.unbiased std_mean.unbiased var.unbiased var_mean.unbiased
    """,
    "on a dense batch of one they take the batch for no matrix": "corrcoef cov",
    "its calls name plain sizes, which never mean a ragged dim": """
        broadcast_to new_full new_ones new_zeros reshape reshape_as view view_as view_copy
    """,
    "its operands are of other shapes than the input, and stay dense": """
        broadcast_tensors diagonal_scatter expand_as isin nn.functional.nll_loss nn.functional.ctc_loss
        linalg.householder_product linalg.ldl_solve linalg.lu_solve lu_solve
        nn.functional.cross_entropy nn.functional.embedding_bag
        nn.functional.scaled_dot_product_attention searchsorted
    """,
    "its sample inputs have no second dim to cut, or not more than one sample": """
        alias_copy column_stack i0 nn.functional.l1_loss nn.functional.layer_norm
        nn.functional.mse_loss nn.functional.rms_norm nn.functional.smooth_l1_loss
        nn.functional.soft_margin_loss permute permute_copy special.i0e special.i1 special.i1e t
        t_copy view_as_complex vsplit
    """,
    "its inputs have no dim to cut but those that the operator works on, which are static": """
        native_layer_norm nn.functional.multi_margin_loss nn.functional.multilabel_margin_loss
        nn.functional.multilabel_soft_margin_loss nn.functional.cosine_embedding_loss
        nn.functional.triplet_margin_loss nn.functional.linear_cross_entropy
        nn.functional.linear_cross_entropy.chunked nn.functional.linear_cross_entropy.chunked_none
    """,
    "its vectors and matrices have no batch dim, and the first dim, taken for one, is paired or summed": """
        dot vdot inner outer kron tensordot linalg.multi_dot
    """,
    "its calls name positions that shorter samples lack": "index_add index_copy index_put select_scatter",
    "its call is a dense tensor's own method, which takes no other": "cdouble cfloat",
    "dim 0, which it turns, is the batch here": "flipud",
    "its positions are dense, and mean entries of one sample": "take",
}
UNCOMPARED = {name: reason for reason, names in LEDGER.items() for name in names.split()}
#: Operators of which no call can be compared in one dtype, while others compare, with the reason.
UNTYPED: dict[tuple[str, torch.dtype], str] = {
    **{
        (name, torch.int64): "its one call of integers has no dim to cut but those that it works on"
        for name in ("addmm", "addmm.decomposed", "nn.functional.local_response_norm")
    },
    **{
        ("masked_scatter", dtype): "each sample's mask chooses more entries than its source has"
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    },
}


@dataclass
class Tally:
    """What came of an operator's calls."""

    right: int = 0
    refused: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    """One call made ragged: which dims, each sample's lengths along them, and the order of storage."""

    dims: tuple[int, ...]
    lengths: tuple[tuple[int, ...], ...]
    backwards: bool
    condition: str


def lengths_of(size: int, others: Sequence[int], condition: str, seed: int) -> tuple[int, ...]:
    """Lengths of a batch's samples, the largest being ``size``; ``others`` are the sizes of the other dims.

    The first of these is the batch size; channels and heads are among the rest.
    """
    batch = 1 if condition == "one sample" else others[0]
    if condition == "equal":
        return (size,) * batch
    if condition == "as many as another dim":
        alike = [n for n in others if n <= size] or [size]
        return (size, *(alike[(seed + i) % len(alike)] for i in range(batch - 1)))
    if condition == "one position":
        return (1,) * (batch - 1) + (size,)
    drawn = torch.randint(1, size + 1, (batch,), generator=torch.Generator().manual_seed(seed)).tolist()
    drawn[seed % batch] = size
    if condition == "an empty sample" and batch > 1:
        drawn[(seed + 1) % batch] = 0
    return tuple(drawn)


def cases(shape: torch.Size, thorough: bool) -> Iterator[Case]:
    """The ways to make a call with an input of this shape ragged."""
    dims = [d for d in range(1, len(shape)) if shape[d] > 1]
    choices = [c for k in (1, 2) for c in itertools.combinations(dims, k)]
    conditions = CONDITIONS if thorough else ("ragged", "an empty sample", "equal")
    for number, (chosen, condition) in enumerate(itertools.product(choices, conditions)):
        lengths = tuple(
            lengths_of(shape[d], [*shape[:d], *shape[d + 1 :]], condition, number + d) for d in chosen
        )
        for backwards in (False, True) if thorough and len(chosen) > 1 else (False,):
            yield Case(chosen, lengths, backwards, condition)


class Call:
    """One sample input and one way to make it ragged; the first ``compared`` results count."""

    def __init__(self, sample: Any, case: Case, broadcasts: bool = True, compared: int | None = None) -> None:
        self.sample, self.case, self.broadcasts, self.compared = sample, case, broadcasts, compared
        self.shape = leading(sample.input).shape
        self.batch = len(case.lengths[0])
        self.dtype = leading(sample.input).dtype

    def is_like_input(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x.shape == self.shape

    def of_sample(self, x: Any, i: int) -> Any:
        """An operand as sample ``i`` sees it, with a batch dim of 1."""
        if isinstance(x, (list, tuple)):
            return type(x)(self.of_sample(item, i) for item in x)
        if not isinstance(x, Tensor) or not x.dim():
            return x
        lead = len(self.shape) - x.dim()
        if lead < 0:
            raise NotImplementedError("which dim of an operand of more dims is the batch is not known here")
        if lead and not self.broadcasts:
            return x
        for d, size in enumerate(self.shape):
            if d < lead or x.shape[d - lead] != size or size == 1:
                continue
            if d == 0:
                x = x.narrow(0, i, 1)
            elif d in self.case.dims:
                x = x.narrow(d - lead, 0, self.case.lengths[self.case.dims.index(d)][i])
        return x

    def packed(self, x: Any) -> Any:
        """An operand as the packed call takes it; operands of the input's shape are packed."""
        if isinstance(x, (list, tuple)):
            return type(x)(self.packed(item) for item in x)
        if not self.is_like_input(x):
            batch_first = (
                isinstance(x, Tensor) and x.dim() == len(self.shape) and x.shape[0] == self.shape[0] > 1
            )
            return x[: self.batch] if batch_first else x
        order = list(range(1, x.dim()))
        if self.case.backwards:
            order.reverse()
        names = [f"n{d}" if d in self.case.dims else "_" for d in order]
        samples = [self.of_sample(x, i)[0].permute([d - 1 for d in order]) for i in range(self.batch)]
        packed = PackedTensor.from_list(samples, " ".join(names))
        return packed.permute(0, *[order.index(d) + 1 for d in range(1, x.dim())])

    def arguments(self, convert: Callable[[Any], Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        s = self.sample
        keyed = {name: convert(value) for name, value in s.kwargs.items()}
        return convert(s.input), tuple(convert(a) for a in s.args), keyed


def leading(x: Any) -> Any:
    """The operand, or the first of a list of them, that decides what is made ragged."""
    return x[0] if isinstance(x, (list, tuple)) and x else x


def parts(result: Any) -> list[Any]:
    """The tensors of a result."""
    flat = result if isinstance(result, (list, tuple)) else [result]
    return [part for part in flat if isinstance(part, Tensor) or is_packed(part)]


def leaves(x: Any, differentiable: bool) -> Any:
    """A copy of the input, or of each of a list of inputs, that collects a gradient."""
    if isinstance(x, (list, tuple)):
        return type(x)(leaves(item, differentiable) for item in x)
    return x.clone().requires_grad_() if differentiable else x


def by_sample(part: Any, batch: int) -> tuple[list[Tensor], int] | None:
    """A packed call's result as samples, and the place of its batch dim; None if it has none."""
    if is_packed(part):
        return None if MERGED in part.order else (part.to_list(), part.order.index(0))
    return (list(part.unbind(0)), 0) if part.dim() and part.shape[0] == batch else None


def run(
    op: Callable, call: Call, convert: Callable[[Any], Any], differentiable: bool
) -> tuple[Any, list[Any]]:
    """The first input, as a leaf, and the results of one call."""
    x, args, kwargs = call.arguments(convert)
    x = leaves(x, differentiable)
    return leading(x), parts(op(x, *args, **kwargs))


def run_dense(op: Callable, call: Call, i: int, differentiable: bool, double: bool = False) -> Any:
    """:func:`run` of sample ``i`` alone, if asked for in double precision.

    An empty sample never meets PyTorch's fused attention, which divides by its size.
    """

    def convert(x: Any) -> Any:
        return widened(call.of_sample(x, i)) if double else call.of_sample(x, i)

    empty = any(0 in lengths for lengths in call.case.lengths)
    with sdpa_kernel(SDPBackend.MATH) if empty else contextlib.nullcontext():
        return run(op, call, convert, differentiable)


def widened(x: Any) -> Any:
    """Floating operands in double precision."""
    if isinstance(x, (list, tuple)):
        return type(x)(widened(item) for item in x)
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def has_gradient(op: Callable, call: Call) -> bool:
    """Whether PyTorch differentiates this call on a dense sample."""
    x = leading(call.sample.input)
    if not (x.is_floating_point() or x.is_complex()):
        return False
    try:
        y, results = run_dense(op, call, 0, True)
        loss = sum((r.sum().abs() for r in results if r.requires_grad), torch.zeros(()))
        return torch.autograd.grad(loss, y, allow_unused=True)[0] is not None
    except (RuntimeError, NotImplementedError):
        return False


def weighted(x: Tensor) -> Tensor:
    """A number that every entry has its own share in."""
    weight = torch.linspace(0.5, 1.5, x.numel(), dtype=torch.float64).view(x.shape)
    return (x * weight).sum().abs()


def close(got: Tensor, expected: Tensor, dtype: torch.dtype, factor: int = 1) -> None:
    """Raise AssertionError unless equal within the tolerance of the call's and the result's dtype."""
    rtol, atol = (factor * t for t in max(TOLERANCE.get(d, EXACT) for d in (dtype, got.dtype)))
    torch.testing.assert_close(got, expected, equal_nan=True, rtol=rtol, atol=atol)


def gradient_of(y: Tensor, results: list[Tensor]) -> Tensor:
    """The gradient of a sample's input from some of its results."""
    loss = sum((weighted(r) for r in results), torch.zeros((), requires_grad=True))
    return torch.autograd.grad(loss, y, allow_unused=True, materialize_grads=True)[0][0]


def compare(op: Callable, call: Call) -> int:
    """Compare one call; returns how many results were compared. Raises AssertionError where one is wrong."""
    differentiable = has_gradient(op, call)
    x, got = run(op, call, call.packed, differentiable)
    got = got[: call.compared]
    shown = {k: found for k, part in enumerate(got) if (found := by_sample(part, call.batch)) is not None}
    losses, wanted = [], []
    for i in range(call.batch):
        leaf, results = run_dense(op, call, i, differentiable)
        try:
            chosen = values_match(shown, results, i, call.dtype)
        except AssertionError:
            if call.dtype not in TOLERANCE:
                raise
            leaf, results = run_dense(op, call, i, differentiable, double=True)
            chosen = values_match(shown, results, i, call.dtype)
        losses += [weighted(shown[k][0][i]) for k in chosen]
        wanted.append((leaf, results, chosen))
    if losses:
        sum(losses).backward()
        if x.grad is None:  # as for dense tensors: no gradient is one of zeros
            x.grad = x.detach() * 0
        for i, (leaf, results, chosen) in enumerate(wanted):
            if all(r.isfinite().all() for r in results) and (
                call.compared is None or call.dtype == torch.float64
            ):
                gradients_match(op, call, i, x.grad.to_list()[i], leaf, chosen, shown)
    return len(shown)


def values_match(shown: dict[int, Any], results: list[Tensor], i: int, dtype: torch.dtype) -> dict[int, Any]:
    """Compare the results of sample ``i``; returns those that are finite and have a gradient."""
    chosen = {}
    for k, (samples, place) in shown.items():
        expected = results[k].select(place, 0)
        if expected.dtype != samples[i].dtype and dtype in TOLERANCE and expected.dtype == torch.float64:
            close(samples[i], expected.to(samples[i].dtype), dtype)
        else:
            close(samples[i], expected, dtype)
        if expected.requires_grad and expected.isfinite().all():
            chosen[k] = expected
    return chosen


def gradients_match(
    op: Callable, call: Call, i: int, got: Tensor, leaf: Tensor, chosen: dict[int, Tensor], shown: Any
) -> None:
    """Compare the gradient of sample ``i``."""
    try:
        close(got, gradient_of(leaf, list(chosen.values())).to(got.dtype), call.dtype, 10)
    except AssertionError:
        if call.dtype not in TOLERANCE or leaf.dtype == torch.float64:
            raise
        leaf, results = run_dense(op, call, i, True, double=True)
        selected = [results[k].select(shown[k][1], 0) for k in chosen]
        close(got, gradient_of(leaf, selected).to(got.dtype), call.dtype, 10)


def dtypes_of(info: Any) -> list[torch.dtype]:
    """The dtypes to try; the first is the one that the ledger speaks of."""
    tried = [d for d in DTYPES if d.is_floating_point] if info.name in FLOATING else DTYPES
    return [dtype for dtype in tried if dtype in info.dtypes] or [next(iter(info.dtypes))]


def usable_samples(info: Any, dtype: torch.dtype) -> list[Any]:
    """The sample inputs that can be taken for a batch; long vectors are folded for pointwise operators."""
    found = []
    for sample in info.sample_inputs("cpu", dtype):
        first = leading(sample.input)
        if not isinstance(first, Tensor) or not first.numel():
            continue
        others = [t for t in (sample.input if first is not sample.input else []) if t.shape != first.shape]
        alone = not any(isinstance(a, Tensor) for a in (*sample.args, *sample.kwargs.values()))
        if first.dim() == 1 and first.numel() % 4 == 0 and alone and first is sample.input:
            sample.input = first.view(4, -1)
            found.append(sample)
        elif first.dim() >= 2 and first.shape[0] > 1 and not others:
            found.append(sample)
    return found


def calls(info: Any, dtype: torch.dtype, thorough: bool) -> Iterator[Call]:
    """The calls of one operator in one dtype; without ``thorough`` a sample of them."""
    kind = dispatch.ROWS[row_of(info)].kind
    broadcasts = kind in BROADCASTING or info.variant_test_name == "binary"
    usable = usable_samples(info, dtype)
    first = dtype == dtypes_of(info)[0]
    few = usable if thorough else usable[:: max(len(usable) // (16 if first else 3), 1)]
    for number, sample in enumerate(few):
        found = list(cases(leading(sample.input).shape, thorough))
        if not thorough and not first:
            found = found[number % max(len(found), 1) :][:1]
        if info.name in STABLE:
            sample.kwargs["stable"] = True
        for case in found:
            yield Call(sample, case, broadcasts, 1 if info.name in OPEN else None)


def sweep(info: Any, dtype: torch.dtype, thorough: bool) -> Tally:
    """All calls of one operator in one dtype."""
    tally = Tally()
    for call in calls(info, dtype, thorough):
        sample = call.sample
        label = f"{dtype} {tuple(call.shape)} {sample.args} {sample.kwargs} {call.case}"[:300]
        try:
            tally.right += compare(info.op, call) > 0
        except REFUSALS as error:
            tally.refused.append(f"{label}: {type(error).__name__} {error}"[:500])
        except AssertionError as error:
            tally.wrong.append(f"{label}: {error}"[:700])
    return tally


def row_of(info: Any) -> str:
    """The name of an operator's row."""
    return info.name.replace("linalg.", "linalg_").split(".")[-1]


def operators() -> dict[str, Any]:
    """The operators of the table for which PyTorch has sample inputs."""
    found = {}
    for info in op_db:
        name = row_of(info)
        if (
            name in dispatch.ROWS
            and name not in {*RANDOM, *APART}
            and not info.name.startswith(("masked.", "sparse.", "_refs"))
            and (not info.name.startswith("nn.functional.") or getattr(F, name) in dispatch.TABLE)
        ):
            found[f"{info.name}.{info.variant_test_name}".rstrip(".")] = info
    return found


OPERATORS = operators()


def judge(name: str, thorough: bool) -> None:
    """No call is wrong in any dtype, and the ledger is right about the first one."""
    info = OPERATORS[name]
    first, *others = dtypes_of(info)
    if not thorough and others:  # one of them
        others = [others[sorted(OPERATORS).index(name) % len(others)]]
    for number, dtype in enumerate([first, *others]):
        tally = sweep(info, dtype, thorough)
        assert not tally.wrong, f"{len(tally.wrong)} wrong calls, e.g.\n" + "\n".join(tally.wrong[:3])
        if name in UNCOMPARED:
            reason = f"{name} is in the ledger ({UNCOMPARED[name]}), but compares: strike it"
            assert not tally.right, reason
        elif number == 0 or thorough:
            refused = "no call could be compared, e.g.\n" + "\n".join(tally.refused[:2])
            assert tally.right or (name, dtype) in UNTYPED, f"{dtype}: {refused}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_sample_inputs_made_ragged(name: str) -> None:
    judge(name, thorough=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_sample_inputs_made_ragged_in_every_way(name: str) -> None:
    judge(name, thorough=True)

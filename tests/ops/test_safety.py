"""Whatever PyTorch offers is right on packed tensors or refused: nothing works on the raw payload."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ops import PackedTensor
from ops.testing import assert_matches, pack
from tests.strategies import make

#: Functions whose result is random, or that are about the object and not about its entries.
LEFT_OUT = (
    "rand normal binomial dropout bernoulli poisson uniform exponential geometric cauchy rrelu gumbel "
    "multinomial __get__ __set__ __init__ __hash__ __repr__ storage set_ share_memory pin_memory apply_ map_ "
    "_backward empty_like backward register grad_fn data_ptr element_size version names"
).split()
#: Functions whose meaning a batch of one does not show; each has tests of its own: squeeze never takes the
#: batch, type_as of a dense tensor is dense, cross_entropy has its classes last where dim 1 is ragged,
#: what splits, repeats or counts along dim 0 does so with samples, distinct entries and histograms are those
#: of the whole batch, tensordot sums over the batch, cov takes a dense batch of one for no matrix, and lstsq
#: leaves some results empty.
TESTED_APART = {
    *(f"torch.{name}" for name in "chunk tensor_split unbind vsplit nonzero argwhere".split()),
    *(f"torch.{name}" for name in "histc histogram bincount cov corrcoef linalg.lstsq".split()),
    *(f"torch.{place}.unique{kind}" for place in ("functional", "Tensor") for kind in ("", "_consecutive")),
    "torch.functional.split",
    "torch.functional.tensordot",
    "torch.Tensor.split",
    "torch.repeat_interleave",
    "torch.squeeze",
    "torch.squeeze_copy",
    "torch.unbind_copy",
    "torch.Tensor.squeeze",
    "torch.Tensor.squeeze_",
    "torch.Tensor.type_as",
    "torch.nn.functional.cross_entropy",
}
SAMPLES = (make([3, 2, 5]), make([3, 2, 5], seed=1), make([3, 2, 5], "n", dtype=torch.int64))
REFUSALS = (
    NotImplementedError,
    TypeError,
    ValueError,
    AttributeError,
    RuntimeError,
    IndexError,
    AssertionError,
)


def offered() -> dict[str, Callable]:
    """Every function that PyTorch would hand to a foreign type, by name."""
    found = {}
    for functions in torch.overrides.get_overridable_functions().values():
        for function in functions:
            name = torch.overrides.resolve_name(function) or str(function)
            if not any(part in name for part in LEFT_OUT):
                found[name] = function
    return found


def arguments(x: Any, y: Any, ids: Any) -> list[tuple[Any, ...]]:
    """Ordinary ways to call a function of one to three operands."""
    feature, matrix = torch.linspace(0.5, 2, 4, dtype=torch.float64), torch.ones(3, 4, dtype=torch.float64)
    numbers = [(x, n) for n in (-1, 0, 1, 2, 0.5)]
    dense = [(x, feature), (feature, x), (x, matrix), (x, feature, feature), (ids, matrix)]
    dims = [(x, (1,)), (x, (4,)), (x, (-1,)), (x, 1, 2), (x, 1, 0), (x, 2, 0), (x, 2, 1), (x, 2, 0, 1)]
    packed = [
        (x,),
        (x, y),
        (x, y, y),
        (ids,),
        (ids, ids),
        (x, ids),
        (x > 0,),
        (x > 0, x, y),
        (x, x > 0),
        (x, y, 1),
    ]
    return [*packed, *numbers, *dense, *dims, (x.mT,), (x.mT, y.mT), (x[:, None],)]


def refused_or_result(function: Callable, args: tuple[Any, ...]) -> Any:
    try:
        return function(*args)
    except REFUSALS:
        return None


def parts(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def wrong_calls(name: str, function: Callable) -> Iterator[str]:
    for number in range(len(arguments(*pack(*SAMPLES)))):
        result = refused_or_result(function, arguments(*pack(*SAMPLES))[number])
        if not any(isinstance(part, (PackedTensor, Tensor)) for part in parts(result)):
            continue
        try:
            compare(function, number, result)
        except Exception as error:
            yield f"{name}, arguments {number}: {str(error)[:200]}"


def compare(function: Callable, number: int, result: Any) -> None:
    dense = refused_or_result(function, arguments(*(b.samples[0][None].clone() for b in SAMPLES))[number])
    if dense is NotImplemented:
        return
    samples = [arguments(*(b.samples[i][None].clone() for b in SAMPLES))[number] for i in range(3)]
    whole = arguments(*(torch.cat(list(b.samples)) for b in SAMPLES))[number]
    for k, part in enumerate(parts(result)):
        if isinstance(part, PackedTensor):
            if part.dim() == 1 or part.order[0] != 0 or part.batch_size != len(samples):
                continue
            assert_matches(part, [parts(function(*args))[k][0] for args in samples])
        elif part.dim() == 0:
            assert_matches(part, parts(function(*whole))[k])
        else:
            assert_matches(part, [parts(function(*args))[k][0] for args in samples])


@pytest.mark.filterwarnings("ignore")
def test_whatever_is_not_refused_is_right() -> None:
    functions = offered()
    assert len(functions) > 500
    wrong = [
        line for name, fn in functions.items() if name not in TESTED_APART for line in wrong_calls(name, fn)
    ]
    assert not wrong, "\n".join(wrong)

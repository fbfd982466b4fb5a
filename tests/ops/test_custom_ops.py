"""``torch.library.opcheck`` over every operator of the namespace ``packed``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ops import Axis, Grid
from ops.kernels import attention, contraction, ctc, norm, segment
from ops.kernels.define import NAMESPACE
from ops.kernels.structure import invert

#: Lengths of two axes; an empty sample, and one without keys.
N, M = Axis([3, 0, 5, 1], name="n"), Axis([2, 4, 1, 0], name="m")
PAIR = Grid((N, M))
SQUARE = Grid((N, N))


def _floats(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()


def _segments(grid: Grid, kept: tuple[int, ...]) -> tuple[Any, ...]:
    return grid.map_to(kept), grid.order_by(kept), grid.splits(kept)


def _both() -> Tensor:
    return torch.stack([N.lengths, M.lengths])


def _attention(
    causal: bool,
    dropout: float = 0.0,
    width: int = 4,
    bias: Tensor | None = None,
    shared: int = 2,
    window: bool = False,
) -> tuple[Any, ...]:
    q, k = (N, N) if causal else (N, M)
    query, key = _floats(q.total, 2, 4), _floats(k.total, shared, 4)
    value = _floats(k.total, shared, width)
    left = 1 if window else -1
    return query, key, value, bias, q.lengths, k.lengths, causal, left, -1, 0.5, dropout, torch.tensor(7)


def _spelled() -> tuple[Any, ...]:
    log_probs = _floats(6, 2, 4).detach().log_softmax(-1).requires_grad_()
    return log_probs, torch.tensor([1, 2, 3]), torch.tensor([6, 4]), torch.tensor([2, 1]), 0, False


def _detached(arguments: tuple[Any, ...]) -> list[Any]:
    return [a.detach() if isinstance(a, Tensor) else a for a in arguments]


def _attention_backward(bias: Tensor | None = None) -> tuple[Any, ...]:
    arguments = _attention(causal=True, bias=bias)
    query, key, value = (t.detach() for t in arguments[:3])
    out, lse = torch.ops.packed.attention(query, key, value, bias, *arguments[4:])
    return torch.ones_like(out), query, key, value, bias, out, lse, bias is not None, *arguments[4:]


def _attention_weights(causal: bool, bias: Tensor | None = None, dropout: float = 0.0) -> tuple[Any, ...]:
    query, key, _, *rest = _attention(causal, dropout, bias=bias)
    return query, key, rest[0], (SQUARE if causal else PAIR).cells, *rest[1:]


def _weights_backward() -> tuple[Any, ...]:
    query, key, bias, cells, *rest = _attention_weights(True, _floats(SQUARE.cells, 2).detach())
    return _floats(cells, 2).detach(), query.detach(), key.detach(), bias, True, *rest


#: Operator -> name of a case -> arguments.
CASES: dict[str, dict[str, tuple[Any, ...]]] = {
    "sum_rows": {
        "to_samples": (_floats(N.total, 4), *_segments(Grid((N,)), ()), 4),
        "along_the_outer_axis": (_floats(PAIR.cells, 2, 3), *_segments(PAIR, (1,)), M.total),
        "integers": (torch.arange(N.total), *_segments(Grid((N,)), ()), 4),
        "half_precision": (_floats(N.total, 4).detach().bfloat16(), *_segments(Grid((N,)), ()), 4),
    },
    "expand_rows": {
        "of_samples": (_floats(4, 3), *_segments(Grid((N,)), ())),
        "of_the_inner_axis": (_floats(M.total, 3), *_segments(PAIR, (1,))),
        "transposed": (_floats(SQUARE.cells, 3), *_segments(SQUARE, (1, 0))),
    },
    "peak_rows": {
        "largest": (_floats(N.total, 4), *_segments(Grid((N,)), ()), 4, [], True),
        "smallest_also_over_features": (
            _floats(PAIR.cells, 3, 2),
            *_segments(PAIR, (0,)),
            N.total,
            [2],
            False,
        ),
    },
    "reorder_rows": {
        "transposed": (_floats(SQUARE.cells, 3), SQUARE.map_to((1, 0)), invert(SQUARE.map_to((1, 0)))),
    },
    "softmax_rows": {
        "along_samples": (_floats(N.total, 3), *_segments(Grid((N,)), ()), 4, False),
        "logarithm": (_floats(PAIR.cells, 3), *_segments(PAIR, (1,)), M.total, True),
        "half_precision": (_floats(N.total, 4).detach().bfloat16(), *_segments(Grid((N,)), ()), 4, False),
    },
    "normalize_rows": {
        "samples": (_floats(N.total, 2, 3), *_segments(Grid((N,)), ()), 4, 1e-5),
        "pairs": (_floats(PAIR.cells, 1, 4), *_segments(PAIR, ()), 4, 1e-5),
        "half_precision": (_floats(N.total, 2, 3).detach().half(), *_segments(Grid((N,)), ()), 4, 1e-5),
    },
    "ctc_losses": {"two_samples": _spelled()},
    "ctc_gradient": {"two_samples": (torch.ones(2, dtype=torch.float64), *_detached(_spelled()))},
    "contract": {
        "pairs": (_floats(N.total, 4), _floats(M.total, 4), _both(), "nm", "nc,mc->nm", PAIR.cells, 4),
        "triangle": (
            *(_floats(SQUARE.cells, 2), _floats(SQUARE.cells, 2), torch.stack([N.lengths] * 3)),
            *("ijk", "ikc,jkc->ijc", SQUARE.cells, 4),
        ),
        "to_samples": (_floats(N.total, 4), _floats(N.total, 3), N.lengths[None], "n", "nc,nd->cd", 4, 4),
    },
    "argpeak_rows": {
        "largest": (_floats(N.total, 3).detach(), *_segments(Grid((N,)), ()), N.positions, 4, True),
    },
    "sort_rows": {"rising": (_floats(N.total, 3).detach(), N.sample_ids, False)},
    "running_peak": {"rising": (_floats(N.total, 3).detach(), 0, True)},
    "attention": {
        "two_axes": _attention(causal=False),
        "causal": _attention(causal=True),
        "wider_values": _attention(causal=False, width=3),
        "dropout": _attention(causal=True, dropout=0.5),
        "bias": _attention(causal=False, bias=_floats(PAIR.cells, 2)),
        "bias_of_all_heads": _attention(causal=True, bias=_floats(SQUARE.cells, 1), window=True),
        "bias_of_all_samples": _attention(causal=False, bias=_floats(2, 5, 4)),
        "mask": _attention(causal=True, bias=torch.arange(SQUARE.cells)[:, None] % 3 > 0),
        "grouped": _attention(causal=False, shared=1, bias=_floats(PAIR.cells, 2)),
        "window": _attention(causal=False, window=True),
    },
    "attention_backward": {
        "causal": _attention_backward(),
        "bias": _attention_backward(_floats(SQUARE.cells, 2).detach()),
    },
    "attention_weights": {
        "two_axes": _attention_weights(causal=False),
        "bias": _attention_weights(causal=True, bias=_floats(SQUARE.cells, 2)),
        "bias_of_all_samples": _attention_weights(causal=False, bias=_floats(1, 5, 4)),
        "dropout": _attention_weights(causal=True, dropout=0.5),
    },
    "attention_weights_backward": {"bias": _weights_backward()},
    "derive": {
        "slice": (N.lengths, N.offsets, -1, -1, 1),
        "stride_of_a_head": (N.lengths, N.offsets, 4, 1, 2),
    },
    "product": {
        "square": (N.lengths, N.offsets, [N.lengths]),
        "three": (N.lengths, N.offsets, [M.lengths] * 2),
    },
    "longest": {"of_four": (N.lengths,)},
    "grid_map": {
        "shifted": ([N.offsets], [N.offsets], [0], [1], [1], [4, N.total]),
        "last_of_each": ([], [N.offsets], [-1], [-1], [1], [4]),
    },
    "sample_ids": {"rows": (N.offsets, N.total)},
    "positions": {"rows": (N.offsets, N.total)},
    "ranges": {"rows": (N.offsets[:-1].clone(), N.offsets, N.total)},
    "interleave": {"two_axes": ([N.offsets, M.offsets], N.total + M.total)},
    "invert": {"transposed": (SQUARE.map_to((1, 0)),)},
    "splits": {"inner": (M.sample_ids, [N.offsets]), "of_nothing": (M.sample_ids, [])},
    "check_same": {"agree": (N.lengths, N.lengths.clone(), "a test")},
    "check_longer": {"long": (M.lengths, 0, "a test")},
    "check_not_single": {"pairs": (N.lengths * 2, "a test")},
    "check_inside": {"inside": (N.positions, N.lengths, N.sample_ids, "a test")},
    "select_mask": {"some": (N.positions > 0, N.offsets), "none": (N.positions < 0, N.offsets)},
}


def registered() -> set[str]:
    """The operators that the package has defined."""
    schemas = torch._C._jit_get_all_schemas()
    return {s.name.split("::")[1] for s in schemas if s.name.startswith(f"{NAMESPACE}::")}


def test_every_operator_has_a_case() -> None:
    assert registered() == set(CASES)


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name, cases in CASES.items() for case in cases], ids=lambda v: v
)
def test_an_operator_passes_pytorchs_checks(name: str, case: str) -> None:
    """Schema, fake implementation, autograd registration, and AOT with sizes that are not known."""
    operator = getattr(getattr(torch.ops, NAMESPACE), name).default
    torch.library.opcheck(operator, CASES[name][case])


#: Operator with a gradient -> the module that has its other way to be called.
WITH_GRADIENT = {
    **dict.fromkeys(("sum_rows", "expand_rows", "peak_rows", "reorder_rows", "softmax_rows"), segment),
    **dict.fromkeys(("attention", "attention_weights"), attention),
    "contract": contraction,
    "normalize_rows": norm,
    "ctc_losses": ctc,
}
#: PyTorch's gradient of this loss is that of the logits under the logarithms.
DIFFERENTIABLE = [(name, case) for name in WITH_GRADIENT if name != "ctc_losses" for case in CASES[name]]


@pytest.mark.parametrize(("name", "case"), DIFFERENTIABLE, ids=lambda v: v)
def test_an_operators_gradient_equals_finite_differences(name: str, case: str) -> None:
    arguments = CASES[name][case]
    if not arguments[0].requires_grad:
        pytest.skip("integers and half precision have no finite differences")
    operator = getattr(getattr(torch.ops, NAMESPACE), name).default
    places = [i for i, a in enumerate(arguments) if isinstance(a, Tensor) and a.requires_grad]

    def fn(*inputs: Tensor) -> Tensor:
        given = dict(zip(places, inputs))
        out = operator(*[given.get(i, a) for i, a in enumerate(arguments)])
        return out[0] if isinstance(out, tuple) else out

    assert torch.autograd.gradcheck(fn, [arguments[i] for i in places])


@pytest.mark.parametrize("name", WITH_GRADIENT)
def test_an_operator_in_eager_and_as_a_node_of_a_graph_agree(name: str) -> None:
    """One definition is called in two ways; values and gradients are the same bits."""
    direct = getattr(WITH_GRADIENT[name], name)
    operator = getattr(getattr(torch.ops, NAMESPACE), name).default
    for arguments in CASES[name].values():
        found = []
        for call in (direct, operator):
            fresh = [
                a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a
                for a in arguments
            ]
            out = call(*fresh)
            out = out[0] if isinstance(out, tuple) else out
            if out.requires_grad:
                out.square().sum().backward()
            grads = [a.grad for a in fresh if isinstance(a, Tensor) and a.requires_grad]
            found.append([out.detach(), *grads])
        torch.testing.assert_close(*found, rtol=0, atol=0)

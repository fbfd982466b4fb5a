"""What an eager operator on a tiny packed tensor costs: ``python -m examples.benchmarks.overhead``.

On tensors this small (8 samples of a few tokens, 16 features) an operator's time is its overhead. Each row
gives the operator on the dense payload (`values`), on the packed tensor, and what the second takes over
the first; beside them, where the package is installed and has the operator, danling's NestedTensor and
torch.nested (jagged). Rows of structure have no dense counterpart: there "dense" is what one would write by
hand, with index tensors computed beforehand. "fresh" rows get a new tensor at every call, so that nothing
is cached on its axis.
"""

import argparse
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from examples.benchmarks._timing import Case, interleaved, median_difference, threads
from ops import PackedTensor

try:
    from danling import NestedTensor as DanlingTensor
except ImportError:
    DanlingTensor = None

LENGTHS = (3, 1, 5, 2, 4, 6, 2, 3)
FEATURES = 16
BUDGET = 3.0
"""Microseconds that an operator may take over the same operator on the payload."""

Pair = tuple[Any, Any]


@dataclass(frozen=True)
class Operation:
    """One row: what to call on a pair (x, y) of ragged tensors, and on their payloads."""

    name: str
    ragged: Callable[[Pair], object]
    dense: Callable[[Pair], object] | None = None
    in_budget: bool = False

    @property
    def by_hand(self) -> Callable[[Pair], object]:
        """The same on payloads: the same code, if nothing else is given."""
        return self.dense or self.ragged


class Maps:
    """Index tensors for the operations written by hand."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        sizes = torch.tensor(lengths)
        ends = sizes.cumsum(0)
        starts = (ends - sizes).tolist()
        self.batch_size = len(lengths)
        self.sample_ids = torch.repeat_interleave(torch.arange(len(lengths)), sizes)
        spans = [range(start, end) for start, end in zip(starts, ends.tolist())]
        self.not_first = torch.tensor([row for span in spans for row in span[1:]])
        self.not_last = torch.tensor([row for span in spans for row in span[:-1]])
        self.counts = sizes[:, None]
        total = sum(lengths)
        self.joined = torch.tensor([row + part for span in spans for part in (0, total) for row in span])
        pairs = [(row, column) for span in spans for row in span for column in span]
        self.rows, self.columns = torch.tensor(pairs).unbind(1)


def operations() -> list[Operation]:
    """The rows of the table."""
    maps = Maps(LENGTHS)
    weight, bias = torch.randn(FEATURES, FEATURES), torch.randn(FEATURES)
    shape = (FEATURES,)
    return [
        Operation("x + y", lambda p: p[0] + p[1], in_budget=True),
        Operation("x * 2", lambda p: p[0] * 2, in_budget=True),
        Operation("gelu(x)", lambda p: F.gelu(p[0]), in_budget=True),
        Operation("linear(x)", lambda p: F.linear(p[0], weight, bias), in_budget=True),
        Operation("layer_norm(x)", lambda p: F.layer_norm(p[0], shape, bias, bias), in_budget=True),
        Operation("x[:, 1:]", lambda p: p[0][:, 1:], lambda p: p[0].index_select(0, maps.not_first)),
        Operation("x[:, :-1]", lambda p: p[0][:, :-1], lambda p: p[0].index_select(0, maps.not_last)),
        Operation("x.sum(1)", lambda p: p[0].sum(1), lambda p: _sum_by_hand(p[0], maps)),
        Operation("x.mean(1)", lambda p: p[0].mean(1), lambda p: _sum_by_hand(p[0], maps) / maps.counts),
        Operation("x.amax(1)", lambda p: p[0].amax(1), lambda p: _peak_by_hand(p[0], maps)),
        Operation("softmax(x, 1)", lambda p: F.softmax(p[0], 1), lambda p: _softmax_by_hand(p[0], maps)),
        Operation("cat((x, y), 0)", lambda p: torch.cat([p[0], p[1]], 0)),
        Operation("cat((x, y), -1)", lambda p: torch.cat([p[0], p[1]], -1)),
        Operation(
            "cat((x, y), 1)",
            lambda p: torch.cat([p[0], p[1]], 1),
            lambda p: torch.cat([p[0], p[1]]).index_select(0, maps.joined),
        ),
        Operation(
            "x[:, :, None] + y[:, None]",
            lambda p: p[0][:, :, None] + p[1][:, None],
            lambda p: p[0].index_select(0, maps.rows) + p[1].index_select(0, maps.columns),
        ),
    ]


def _sum_by_hand(values: Tensor, maps: Maps) -> Tensor:
    return values.new_zeros(maps.batch_size, FEATURES).index_add(0, maps.sample_ids, values)


def _peak_by_hand(values: Tensor, maps: Maps) -> Tensor:
    index = maps.sample_ids[:, None].expand(-1, FEATURES)
    peaks = values.new_zeros(maps.batch_size, FEATURES)
    return peaks.scatter_reduce(0, index, values, "amax", include_self=False)


def _softmax_by_hand(values: Tensor, maps: Maps) -> Tensor:
    powers = (values - _peak_by_hand(values, maps).index_select(0, maps.sample_ids)).exp()
    return powers / _sum_by_hand(powers, maps).index_select(0, maps.sample_ids)


def _samples() -> list[Tensor]:
    return [torch.randn(n, FEATURES) for n in LENGTHS]


def _packed() -> Pair:
    x: Any = PackedTensor.from_list(_samples(), "n _")
    return x, x * 0.5


def _payloads() -> Pair:
    x, y = _packed()
    return x.values, y.values


def _danling() -> Pair:
    x = DanlingTensor(_samples())
    return x, x * 0.5


def _jagged() -> Pair:
    x: Any = torch.nested.nested_tensor(_samples(), layout=torch.jagged)
    return x, torch.nested.nested_tensor_from_jagged(x.values() * 0.5, x.offsets())


def _works(case: Case) -> bool:
    """Whether a peer has the operator."""
    try:
        case.call(case.prepare())
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return False
    return True


def measure(operation: Operation, *, fresh: bool, rounds: int, calls: int) -> dict[str, list[float]]:
    """Seconds a call for each side that has the operation: "dense", "packed", "danling", "torch.nested"."""
    cases = {
        "dense": Case(operation.by_hand, _payloads, fresh),
        "packed": Case(operation.ragged, _packed, fresh),
    }
    peers = {"torch.nested": Case(operation.ragged, _jagged, fresh)}
    if DanlingTensor is not None:
        peers["danling"] = Case(operation.ragged, _danling, fresh)
    cases |= {name: case for name, case in peers.items() if _works(case)}
    return interleaved(cases, rounds=rounds, calls=calls)


def _row(name: str, seconds: dict[str, list[float]], in_budget: bool) -> list[str]:
    def median(side: str) -> str:
        return f"{statistics.median(seconds[side]) * 1e6:.1f}" if side in seconds else "-"

    over = median_difference(seconds["packed"], seconds["dense"]) * 1e6
    verdict = ("[green]yes" if over <= BUDGET else "[red]no") if in_budget else ""
    peers = [median("danling"), median("torch.nested")]
    return [name, median("dense"), median("packed"), f"{over:+.1f}", verdict, *peers]


def main() -> None:
    """Measure every operation and print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=100, help="calls a round")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    table = Table(title=f"microseconds a call, 1 thread, {len(LENGTHS)} samples, {FEATURES} features")
    table.add_column("operator")
    for column in ("dense", "packed", "over dense", f"within {BUDGET:.0f} us", "danling", "torch.nested"):
        table.add_column(column, justify="right")
    with threads(1), torch.no_grad():
        for operation in operations():
            for fresh in (False,) if operation.in_budget else (False, True):
                seconds = measure(operation, fresh=fresh, rounds=arguments.rounds, calls=arguments.calls)
                name = operation.name + (" (fresh)" if fresh else "")
                table.add_row(*_row(name, seconds, operation.in_budget))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()

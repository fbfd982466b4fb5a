"""Products over real protein lengths: packed, by hand one sample at a time, and padded.

    python -m examples.benchmarks.contraction

Two products on 2 threads: the triangle multiplication of pair representations, ``bikc,bjkc->bijc``, and the
scores ``q @ k.mT``. The loop by hand holds its samples apart and contracts each by one (batched) matrix
product; both sides end with one packed buffer.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from examples.benchmarks._timing import Case, interleaved, threads
from ops import PackedTensor

#: Residues of 24 protein chains of the Protein Data Bank: every eighth of 201 chains by length.
LENGTHS = (
    *(27, 59, 76, 85, 97, 99, 103, 118, 127, 132, 138, 145),
    *(150, 154, 161, 164, 169, 190, 203, 217, 245, 275, 307, 363),
)  # fmt: skip


def triangle_by_hand(x: Tensor, y: Tensor) -> Tensor:
    """[n, n, C] of one sample."""
    return torch.bmm(x.permute(2, 0, 1), y.permute(2, 1, 0)).permute(1, 2, 0)


def scores_by_hand(q: Tensor, k: Tensor) -> Tensor:
    """[n, C] -> [n, n]."""
    return torch.mm(q, k.mT)


class Product:
    """One product: its operands packed, apart and padded."""

    def __init__(self, pattern: str, channels: int, packed: Callable, by_hand: Callable) -> None:
        dims = pattern.count("n")
        self.apart = [[torch.randn(*[n] * dims, channels) for n in LENGTHS] for _ in range(2)]
        first = PackedTensor.from_list(self.apart[0], pattern)
        second = PackedTensor.from_list(self.apart[1], pattern)
        self.packed = [first, PackedTensor(second.values, first.grid, first.order)]
        self.padded = [x.to_padded() for x in self.packed]
        self.product, self.by_hand = packed, by_hand

    def run(self, side: str, backward: bool) -> Callable[[Any], None]:
        """A call of one side: "packed", "by hand" or "padded"."""

        def call(_: Any) -> None:
            if side == "by hand":
                leaves = [x.detach().requires_grad_(backward) for part in self.apart for x in part]
                half = len(LENGTHS)
                out = [self.by_hand(x, y) for x, y in zip(leaves[:half], leaves[half:])]
                values = torch.cat([part.flatten(0, 1) for part in out])
            else:
                operands = self.packed if side == "packed" else self.padded
                values = self.product(*[x.detach().requires_grad_(backward) for x in operands])
                values = values.values if side == "packed" else values
            if backward:
                values.backward(torch.ones_like(values))

        return call


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--channels", type=int, default=16)
    arguments = parser.parse_args()
    products = {
        "bikc,bjkc->bijc": Product(
            "n n _", arguments.channels, lambda x, y: torch.einsum("bikc,bjkc->bijc", x, y), triangle_by_hand
        ),
        "q @ k.mT": Product("n _", 64, lambda q, k: q @ k.mT, scores_by_hand),
    }
    table = Table(title=f"milliseconds a call, 2 threads, {len(LENGTHS)} proteins")
    for column in ("product", "pass", "packed", "by hand", "padded", "over by hand", "over padded"):
        table.add_column(column, justify="right")
    with threads(2):
        for name, product in products.items():
            for backward in (False, True):
                cases = {s: Case(product.run(s, backward)) for s in ("packed", "by hand", "padded")}
                seconds = interleaved(cases, rounds=arguments.rounds)
                ms = {s: statistics.median(t) * 1e3 for s, t in seconds.items()}
                ratios = [f"{ms['packed'] / ms[s]:.2f}" for s in ("by hand", "padded")]
                figures = [f"{ms[s]:.1f}" for s in cases]
                table.add_row(name, "forward + backward" if backward else "forward", *figures, *ratios)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()

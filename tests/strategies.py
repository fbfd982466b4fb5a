"""Operands for tests: named length profiles, and hypothesis strategies over patterns and layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ops.pattern import parse
from ops.testing import Ragged

#: Lengths that have broken ragged libraries. Tests use 2 heads and 4 channels.
PROFILES: dict[str, list[int]] = {
    "ragged": [3, 5, 1],
    "equal": [4, 4, 4],
    "one_sample": [6],
    "one_position": [1],
    "all_of_one": [1, 1],
    "an_empty_sample": [3, 0, 5],
    "all_empty": [0, 0],
    "as_many_as_heads": [2, 5, 2],
    "as_many_as_channels": [4, 2, 4],
    "as_many_as_samples": [3, 3, 1],
}
NONEMPTY = {name: lengths for name, lengths in PROFILES.items() if min(lengths) > 0}

#: Patterns of every rank and layout: static dims before, between and after the ragged ones.
PATTERNS = ("n", "n 4", "4 n", "n 3 4", "3 n 4", "n n", "n n 4", "n m 4", "n m", "4 n m", "n 4 m", "n m k")

Lengths = Sequence[int] | Mapping[str, Sequence[int]]


def make(
    lengths: Lengths, pattern: str = "n 4", *, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Ragged:
    """Samples of given lengths: one list for axis ``n`` (others get it rotated), or one list a name."""
    generator = torch.Generator().manual_seed(seed)
    shapes = _shapes(lengths, pattern)
    return Ragged([_values(shape, dtype, generator) for shape in shapes], pattern)


def rotated(lengths: Sequence[int], by: int) -> list[int]:
    """The same lengths, dealt to other samples."""
    by %= max(len(lengths), 1)
    return [*lengths[by:], *lengths[:by]]


def _shapes(lengths: Lengths, pattern: str) -> list[list[int]]:
    spec = parse(pattern)
    if not isinstance(lengths, Mapping):
        names = list(dict.fromkeys(spec.names))
        lengths = {name: rotated(lengths, k) for k, name in enumerate(names)}
    count = len(next(iter(lengths.values())))
    return [
        [lengths[token][i] if isinstance(token, str) else int(token or 4) for token in spec.tokens]
        for i in range(count)
    ]


def _values(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype == torch.bool:
        return torch.rand(*shape, generator=generator) > 0.5
    if not dtype.is_floating_point:
        return torch.randint(0, 6, tuple(shape), generator=generator, dtype=dtype)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


@st.composite
def batches(
    draw: st.DrawFn,
    patterns: Sequence[str] = PATTERNS,
    least: int = 0,
    most: int = 4,
    dtype: torch.dtype = torch.float64,
) -> Ragged:
    """A :class:`Ragged` of any of the patterns, 1 to 4 samples, axes of ``least`` to ``most`` positions."""
    pattern = draw(st.sampled_from(patterns))
    count = draw(st.integers(1, 4))
    sizes = st.lists(st.integers(least, most), min_size=count, max_size=count)
    lengths = {name: draw(sizes) for name in dict.fromkeys(parse(pattern).names)}
    return make(lengths, pattern, dtype=dtype, seed=draw(st.integers(0, 2**16)))


def dim_orders(rank: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Permutations of a batch's ``rank`` dims, the batch dim anywhere."""
    return st.permutations(range(rank)).map(tuple)


@st.composite
def laid_out(draw: st.DrawFn, **kwargs: Any) -> tuple[Ragged, tuple[int, ...]]:
    """A batch, and an order to permute its dims to before the operator under test."""
    batch = draw(batches(**kwargs))
    return batch, draw(dim_orders(parse(batch.pattern).rank + 1))


def subsets(items: Sequence[int], least: int = 1) -> st.SearchStrategy[tuple[int, ...]]:
    """Subsets of dims, in any order."""
    return st.lists(st.sampled_from(list(items)), min_size=least, unique=True).map(tuple)

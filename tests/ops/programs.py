"""Models for the tests of ``torch.compile``, with their operands and what they equal sample by sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops import PackedTensor, is_packed
from ops.testing import Ragged, pack
from tests.strategies import make, rotated

WIDTH, HEADS, VOCABULARY, LONGEST = 8, 2, 7, 24


class SquarePair(nn.Module):
    """Single to pair to single."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.v, self.h, self.g = (nn.Linear(4, 4) for _ in range(4))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Any) -> Any:
        p = self.u(x)[:, :, None] + self.v(x)[:, None, :]
        p = p + self.h(self.norm(p))
        return x + self.g(p.mean(2))


class RectangularPair(SquarePair):
    """A pair of two axes, read along both."""

    def forward(self, x: Any, y: Any) -> Any:
        p = self.u(x)[:, :, None] + self.v(y)[:, None, :]
        p = p + self.h(self.norm(p))
        return x + self.g(p.sum(2)), y + p.sum(1)


class NonLeadingPair(SquarePair):
    """Channels before positions; inside, positions before the batch; the pair added to its transpose."""

    def forward(self, x: Any) -> Any:
        t = x.movedim(1, -1).transpose(0, 1)
        p = self.u(t)[:, None] + self.v(t)[None]
        p = (p + self.h(self.norm(p))).permute(2, 3, 0, 1)
        p = p + p.transpose(2, 3)
        return x + self.g(p.mean(3).transpose(1, 2)).transpose(1, 2)


class Encoder(nn.Module):
    """Four unmodified layers, under a linear map."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True)
        self.input = nn.Linear(4, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, x: Any) -> Any:
        return self.encoder(self.input(x))


class EncoderDecoder(nn.Module):
    """An unmodified ``nn.Transformer`` over a source and a target axis; the target sees its past alone."""

    def __init__(self) -> None:
        super().__init__()
        self.input = nn.Linear(4, WIDTH)
        self.transformer = nn.Transformer(WIDTH, HEADS, 2, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Any, y: Any) -> Any:
        mask = None
        if isinstance(y, Tensor):  # PyTorch's own code asks for a mask beside the hint
            mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1])
        return self.transformer(self.input(x), self.input(y), tgt_mask=mask, tgt_is_causal=True)


class GPT(nn.Module):
    """One block with learned positions and the loss of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(1, LONGEST, WIDTH))
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Any) -> Any:
        x, target = self.token(ids[:, :-1]), ids[:, 1:]
        x = x + self.position[:, : x.shape[1]]
        size, longest, _ = x.shape
        y = self.norms[0](x)
        q, k, v = (f(y).view(size, longest, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(size, longest, WIDTH))
        x = x + self.mlp(self.norms[1](x))
        return F.cross_entropy(self.head(x).view(-1, VOCABULARY), target.reshape(-1))


@dataclass(frozen=True)
class Program:
    """A model and its operands.

    Attributes:
        model: makes it.
        operands: lengths -> dense samples for each argument.
        least: the smallest maximum at which a slice inside still has two positions.
    """

    model: Callable[[], nn.Module]
    operands: Callable[[list[int]], Sequence[Ragged]]
    least: int = 2


def _single(lengths: list[int]) -> Sequence[Ragged]:
    return (make(lengths, dtype=torch.float32),)


def _channels_first(lengths: list[int]) -> Sequence[Ragged]:
    return (make(lengths, "4 n", dtype=torch.float32),)


def _two_axes(lengths: list[int]) -> Sequence[Ragged]:
    other = {"m": rotated(lengths, 1)}
    return make(lengths, dtype=torch.float32), make(other, "m 4", dtype=torch.float32, seed=1)


def _tokens(lengths: list[int]) -> Sequence[Ragged]:
    return (make(lengths, "n", dtype=torch.int64),)


PROGRAMS = {
    "square": Program(SquarePair, _single),
    "rectangular": Program(RectangularPair, _two_axes),
    "non_leading": Program(NonLeadingPair, _channels_first),
    "encoder": Program(Encoder, _single),
    "encoder_decoder": Program(EncoderDecoder, _two_axes),
    "gpt": Program(GPT, _tokens, least=3),
}

BATCH_SIZES = (3, 1, 5, 2)

#: Lengths by batch size: what an ordinary batch may look like.
PATTERNS: dict[str, Callable[[int], list[int]]] = {
    "ragged": lambda b: [3 + 5 * i % 7 for i in range(b)],
    "rising": lambda b: [i + 3 for i in range(b)],
    "falling": lambda b: [b + 2 - i for i in range(b)],
    "equal": lambda b: [4] * b,
    "one_long": lambda b: [9] + [1] * (b - 1),
    "one_short": lambda b: [1] + [5] * (b - 1),
    "first_empty": lambda b: [0] * (b > 1) + [6] * (b - 1) or [6],
    "last_empty": lambda b: [5] * (b - 1) + [0] * (b > 1) or [5],
    "every_other_empty": lambda b: [6 * (i % 2 == 0) for i in range(b)],
    "as_many_as_samples": lambda b: [max(b, 3)] * b,
    "as_many_as_channels": lambda b: [WIDTH] * b,
    "of_one": lambda b: [1] * b,
}


def results(out: Any) -> list[Tensor]:
    """The payloads of what a program returns."""
    out = out if isinstance(out, tuple) else (out,)
    return [one.values if is_packed(one) else one for one in out]


def operands(program: Program, lengths: list[int]) -> list[PackedTensor]:
    """Fresh arguments, which collect gradients where they can."""
    packed = pack(*program.operands(lengths))
    return [x.requires_grad_() if x.is_floating_point() else x for x in packed]


def train(fn: Callable[..., Any], model: nn.Module, arguments: Sequence[Any]) -> list[Tensor]:
    """Forward and backward: outputs, then gradients of parameters and arguments; nan counts as 0."""
    model.zero_grad()
    outputs = results(fn(*arguments))
    torch.stack([out.nan_to_num().square().sum() for out in outputs]).sum().backward()
    found = [out.detach() for out in outputs]
    found += [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return found + [x.grad.values for x in arguments if x.requires_grad]

"""Patterns: the shape of one sample, written as a string.

A pattern names the dims of ONE sample, left to right, separated by spaces:

* a name (``n``, ``height``) is a ragged axis; a name that returns is the same axis;
* an integer is a static dim of that size;
* ``_`` is a static dim of any size, the same in every sample of a batch.

``"n"`` is a token list, ``"n _"`` embeddings, ``"n n _"`` a pair state, ``"_ h w"`` an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Pattern:
    """A parsed pattern.

    Attributes:
        text: the pattern in normal form.
        tokens: one entry a dim of a sample: a ``str`` for a ragged axis, an ``int`` for a static
            dim of that size, ``None`` for a static dim of any size.
        ragged: the dims of a sample that are ragged, in order. They become the grid's axes.
        static: the dims of a sample that are static, in order. They become the trailing dims of
            ``values``.
        names: the axis name of each entry of ``ragged``.
        order: the permutation that gives a :class:`~ops.PackedTensor` with this pattern its logical
            dims: entry ``d`` is 0 for the batch, ``1..k`` for a grid axis, ``k + 1..`` for a static.
    """

    text: str
    tokens: tuple[str | int | None, ...]
    ragged: tuple[int, ...]
    static: tuple[int, ...]
    names: tuple[str, ...]
    order: tuple[int, ...]

    @property
    def rank(self) -> int:
        """Number of dims of one sample."""
        return len(self.tokens)

    def __str__(self) -> str:
        return self.text


@cache
def parse(text: str) -> Pattern:
    """Parse a pattern string; the same text always gives the same object.

    Raises:
        ValueError: a token is neither a name, ``_`` nor an integer, or no token is a name.
    """
    tokens = tuple(_token(word, text) for word in text.split())
    ragged = tuple(d for d, token in enumerate(tokens) if isinstance(token, str))
    static = tuple(d for d, token in enumerate(tokens) if not isinstance(token, str))
    order = [0] * (len(tokens) + 1)
    for canonical, d in enumerate(ragged + static, start=1):
        order[d + 1] = canonical
    return Pattern(
        text=" ".join(text.split()),
        tokens=tokens,
        ragged=ragged,
        static=static,
        names=tuple(str(tokens[d]) for d in ragged),
        order=tuple(order),
    )


def _token(word: str, text: str) -> str | int | None:
    if word == "_":
        return None
    if word.isdigit():
        return int(word)
    if word.isidentifier():
        return word
    raise ValueError(
        f"pattern {text!r}: {word!r} is neither an axis name, '_' nor a size. "
        "Write a name for a ragged dim, '_' or an integer for a static one, e.g. 'n _' or 'n n 8'."
    )


def check_sample(pattern: Pattern, shape: Sequence[int], where: str) -> None:
    """Check one sample's shape against a pattern: rank, fixed sizes, repeated names.

    Args:
        shape: the sample's shape.
        where: what to call the sample in the error, e.g. ``"sample 3, field 'x'"``.

    Raises:
        ValueError: the shape does not fit; the message names ``where``, the pattern and the shape.
    """
    if len(shape) != pattern.rank:
        raise ValueError(
            f"{where}: shape {tuple(shape)} has {len(shape)} dims, the pattern '{pattern}' has "
            f"{pattern.rank}. Declare the pattern that this sample has."
        )
    sizes: dict[str, int] = {}
    for token, size in zip(pattern.tokens, shape):
        if isinstance(token, int) and token != size:
            raise ValueError(
                f"{where}: shape {tuple(shape)} does not fit the pattern '{pattern}': "
                f"a dim of size {token} has {size}."
            )
        if isinstance(token, str) and sizes.setdefault(token, size) != size:
            raise ValueError(
                f"{where}: shape {tuple(shape)} does not fit the pattern '{pattern}': axis "
                f"'{token}' would be both {sizes[token]} and {size}. Use two names if they may differ."
            )

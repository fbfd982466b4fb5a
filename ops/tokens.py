"""Tokens: where an axis came from, without a reference to an axis."""

from __future__ import annotations

from .lengths import Step


class Token:
    """Where an axis came from. Compared by identity, or by kind and parents if derived.

    A token refers to no axis, so that a cache may hold it without keeping a batch alive.
    """

    def __init__(self, kind: str = "root", parents: tuple[tuple[Token, tuple[Step, ...]], ...] = ()) -> None:
        self.kind = kind
        self.parents = parents


#: Axes, each by its token and its length function.
Factors = tuple[tuple[Token, tuple[Step, ...]], ...]


def same_token(a: Token, b: Token) -> bool:
    """Whether two tokens stand for the same origin."""
    if a is b:
        return True
    return a.kind != "root" and a.kind == b.kind and same_factors(a.parents, b.parents)


def same_factors(a: Factors, b: Factors) -> bool:
    """Whether two lists of axes are the same, by their tokens and steps."""
    return len(a) == len(b) and all(
        p_steps == q_steps and same_token(p, q) for (p, p_steps), (q, q_steps) in zip(a, b)
    )

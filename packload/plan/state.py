"""Where a run of batches stands, and how that is written down.

A position is a cursor in the epoch's order, where a window begins, and the steps done in that window. It
says nothing of workers, nor of the rank: one state serves all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from operator import index
from typing import Any

import numpy as np

from .window import Span

VERSION = 1
"""To be raised whenever the same arguments give another plan: a state is a place in a plan."""

Identity = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Position:
    """A place between two steps.

    Attributes:
        epoch: the epoch.
        cursor: units of the epoch's order before this window.
        window: windows before this one.
        step: steps done in this window.
        served: steps done in the windows before.
        world_size: ranks that this window is planned for.
    """

    epoch: int
    cursor: int = 0
    window: int = 0
    step: int = 0
    served: int = 0
    world_size: int = 1

    @property
    def steps(self) -> int:
        """Steps done in the epoch."""
        return self.served + self.step

    def after(self, window: Span) -> Position:
        """The position at the end of a window that begins at the cursor."""
        steps = self.served + window.steps
        return replace(self, cursor=window.end, window=self.window + 1, step=0, served=steps)


_PLACE = tuple(f.name for f in fields(Position))


def write(position: Position, seed: int, identity: Identity) -> dict[str, Any]:
    """A state: a new JSON-able dict."""
    place = {name: getattr(position, name) for name in _PLACE}
    return {"version": VERSION, "seed": seed, **place, **{k: dict(v) for k, v in identity.items()}}


def read(state: Mapping[str, Any], seed: int, identity: Identity, count: int) -> Position:
    """The position in a state of this plan.

    Args:
        state: from :func:`write`; it is not changed.
        seed: the plan's.
        identity: the plan's policy and data.
        count: units of an epoch.

    Raises:
        ValueError: it is no state, or one of another version, of other data, another policy or seed.
    """
    if not isinstance(state, Mapping) or "version" not in state:
        raise ValueError("this is no state of a plan: it has no version.")
    if state["version"] != VERSION:
        raise ValueError(
            f"the state has version {state['version']!r}, and this release makes plans of version {VERSION}, "
            "in which its place is not known. Finish the epoch with the release that saved it."
        )
    lost = [name for name in ("seed", *_PLACE, *identity) if name not in state]
    if lost:
        raise ValueError(f"this is no whole state of a plan: it lacks {lost}.")
    for what in identity:
        if not isinstance(state[what], Mapping):
            raise ValueError(f"this is no state of a plan: its {what} is {state[what]!r}.")
        if state[what] != identity[what]:
            raise ValueError(f"the state is of another {what}: {_differences(state[what], identity[what])}.")
    if state["seed"] != seed:
        raise ValueError(f"the state is of another seed: {state['seed']!r} in the state, {seed!r} here.")
    try:
        position = Position(**{name: index(state[name]) for name in _PLACE})
    except TypeError:
        place = {name: state[name] for name in _PLACE}
        raise ValueError(f"this is no state of a plan: its place {place} must be of integers.") from None
    if min(getattr(position, name) for name in _PLACE) < 0 or position.cursor > count:
        raise ValueError(f"the state's {position} is no place in an epoch of {count} units.")
    return position


def digest(*values: Any) -> str:
    """A short hash of arrays, or of mappings of arrays."""
    state = hashlib.blake2b(digest_size=12)
    for value in values:
        for name, array in value.items() if isinstance(value, Mapping) else [("", value)]:
            state.update(f"{name} {array.dtype.str} {array.shape}".encode())
            state.update(np.ascontiguousarray(array).data)
    return state.hexdigest()


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    return "; ".join(f"{name} is {there.get(name)!r} in the state, {here.get(name)!r} here" for name in names)

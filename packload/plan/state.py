"""Where a run of batches stands, and how that is written down.

A position is a cursor in the epoch's order where a window begins, and the steps done in that window. It says
nothing of workers, nor of the rank: one state serves all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

VERSION = 1
Identity = Mapping[str, Any]


@dataclass(frozen=True)
class Position:
    """A place between two steps.

    Attributes:
        epoch: the epoch.
        cursor: units of the epoch's order before this window.
        window: windows before this one.
        step: steps done in this window.
        served: steps done in the windows before.
        world_size: ranks that the window is planned for.
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


_PLACE = tuple(f.name for f in fields(Position))


def write(position: Position, seed: int, identity: Identity) -> dict[str, Any]:
    """A state: JSON-able, a new dict."""
    place = {name: getattr(position, name) for name in _PLACE}
    return {"version": VERSION, "seed": seed, **place, **identity}


def read(state: Mapping[str, Any], seed: int, identity: Identity, count: int) -> Position:
    """The position in a state, if it is one of this plan.

    Args:
        state: from :func:`write`; it is not changed.
        seed: the plan's.
        identity: the plan's policy and data.
        count: units of an epoch.

    Raises:
        ValueError: the state is none of this library, of another version, or of other data, policy or seed.
    """
    if not isinstance(state, Mapping) or "version" not in state:
        raise ValueError("this is no state of a plan: it has no version.")
    if state["version"] != VERSION:
        raise ValueError(f"the state has version {state['version']}; this release reads version {VERSION}.")
    lost = [name for name in ("seed", *_PLACE, *identity) if name not in state]
    if lost:
        raise ValueError(f"the state of a plan lacks {lost}.")
    if state["data"] != identity["data"]:
        raise ValueError(
            f"the state is of other data: lengths of {state['data']['samples']} samples, "
            f"{state['data']['hash']}; here {identity['data']['samples']}, {identity['data']['hash']}. Resume with "
            "the data set that the state was saved with, in its order."
        )
    if state["policy"] != identity["policy"]:
        raise ValueError(
            f"the state is of another policy: {_differences(state['policy'], identity['policy'])}."
        )
    if state["seed"] != seed:
        raise ValueError(f"the state has seed {state['seed']}; here {seed}.")
    position = Position(**{name: int(state[name]) for name in _PLACE})
    if not 0 <= position.cursor <= count or min(position.step, position.window, position.served) < 0:
        raise ValueError(f"the state stands at {position}, which is not in an epoch of {count} units.")
    return position


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    return "; ".join(f"{name} is {there.get(name)!r} in the state, {here.get(name)!r} here" for name in names)

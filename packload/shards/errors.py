"""What can be wrong with a shard."""

from __future__ import annotations

from typing import NamedTuple


class ShardError(ValueError):
    """A shard, its index or one of its samples cannot be used; the message names shard and member."""


class DamagedShardError(ShardError):
    """Bytes are missing or are not those that were indexed."""


class UnsafeShardError(ShardError):
    """A shard asks for what is refused by default; the message names the argument that allows it."""


class Place(NamedTuple):
    """A shard or a member of it, as errors name it: ``shard 'a.tar', member '000017.jpg'``."""

    shard: str
    member: str | None = None

    def __str__(self) -> str:
        shard = f"shard {self.shard!r}"
        return shard if self.member is None else f"{shard}, member {self.member!r}"

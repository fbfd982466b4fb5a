"""Shards: tar archives of samples in WebDataset's format, each with an index beside it."""

from .batched import batched
from .errors import DamagedShardError, ShardError, UnsafeShardError
from .index import ShardIndex, build_index, index_name
from .indexing import index_shards
from .read import Damage, ShardDataset
from .safety import Safety
from .stream import shard_sampler, shards
from .write import ShardWriter

__all__ = [
    "Damage",
    "DamagedShardError",
    "Safety",
    "ShardDataset",
    "ShardError",
    "ShardIndex",
    "ShardWriter",
    "UnsafeShardError",
    "batched",
    "build_index",
    "index_name",
    "index_shards",
    "shard_sampler",
    "shards",
]

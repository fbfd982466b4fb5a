"""packload: data of varying size to packed batches.

    loader = DataLoader(dataset, batch_size=32, collate_fn=packload.collate)
    for batch in loader:
        model(batch.tokens)

:func:`collate` and :class:`Collate` turn samples into a :class:`Batch` whose ragged fields are
:class:`PackedTensor`; :func:`ragged` marks a leaf with its pattern, :func:`infer_schema` proposes patterns.
Everything wrong with samples is a :class:`CollateError`.

:class:`RandomBatchSampler`, :class:`BucketBatchSampler`, :class:`BudgetBatchSampler` and, for evaluation,
:class:`FixedBatchSampler` plan batches from lengths, which :func:`lengths` reads; :mod:`packload.cost` says
what a sample is charged. :class:`Loader` makes batches ahead of the loop, on threads or in processes, in
memory that is used again, and copies them to a device.

:func:`shards` streams tar shards as packed batches; :class:`ShardWriter` writes them, :func:`index_shards`
indexes those that are there, :class:`ShardDataset` and :func:`shard_sampler` are its parts, :func:`batched`
is a stage for pipelines of one's own. What a shard may not do unless allowed stands in :class:`Safety`;
everything wrong with shards is a :class:`ShardError`.
"""

from . import cost
from ._guard import Axis, Grid, PackedTensor
from .batch import Batch
from .collate import Collate, collate
from .errors import CollateError
from .infer import infer_schema
from .loader import Loader
from .plan import (
    BucketBatchSampler,
    BudgetBatchSampler,
    CutDataset,
    FixedBatchSampler,
    Piece,
    RandomBatchSampler,
)
from .plan.lengths import lengths
from .schema import ragged
from .shards import (
    Safety,
    ShardDataset,
    ShardError,
    ShardWriter,
    batched,
    index_shards,
    shard_sampler,
    shards,
)
from .workers import batch_seed

__version__ = "0.1.0"
__all__ = [
    "Axis",
    "Batch",
    "BucketBatchSampler",
    "BudgetBatchSampler",
    "Collate",
    "CollateError",
    "CutDataset",
    "FixedBatchSampler",
    "Grid",
    "Loader",
    "PackedTensor",
    "Piece",
    "RandomBatchSampler",
    "Safety",
    "ShardDataset",
    "ShardError",
    "ShardWriter",
    "batch_seed",
    "batched",
    "collate",
    "cost",
    "index_shards",
    "infer_schema",
    "lengths",
    "ragged",
    "shard_sampler",
    "shards",
]

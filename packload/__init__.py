"""packload: data of varying size to packed batches.

    loader = DataLoader(dataset, batch_size=32, collate_fn=packload.collate)
    for batch in loader:
        model(batch.tokens)

:func:`collate` and :class:`Collate` turn samples into a :class:`Batch` whose ragged fields are
:class:`PackedTensor`; :func:`ragged` marks a leaf with its pattern, :func:`infer_schema` proposes patterns.
Everything wrong with samples is a :class:`CollateError`. :class:`Loader` makes batches ahead of the loop.
"""

from ._guard import Axis, Grid, PackedTensor
from .batch import Batch
from .collate import Collate, collate
from .errors import CollateError
from .infer import infer_schema
from .loader import Loader
from .schema import ragged
from .workers import batch_seed

__version__ = "0.1.0"
__all__ = [
    "Axis",
    "Batch",
    "Collate",
    "CollateError",
    "Grid",
    "Loader",
    "PackedTensor",
    "batch_seed",
    "collate",
    "infer_schema",
    "ragged",
]

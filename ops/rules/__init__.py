"""One module per kind of structural change; importing this package fills the registry."""

from . import (  # noqa: F401
    attention,
    creation,
    fallback,
    feature,
    indexing,
    join,
    loss,
    norm,
    pointwise,
    reduction,
    scan,
    shape,
)

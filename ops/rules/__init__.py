"""One module per kind of structural change; importing this package fills the registry."""

from . import (  # noqa: F401
    attention,
    contraction,
    counting,
    creation,
    fallback,
    feature,
    indexing,
    join,
    linalg,
    loss,
    multihead,
    norm,
    plane,
    pointwise,
    recurrent,
    reduction,
    scan,
    shape,
    variants,  # last: forms of the rows of all others
)

"""One module per kind of structural change; importing this package fills the registry."""

from . import attention, feature, indexing, loss, pointwise, reduction, shape

__all__ = ["attention", "feature", "indexing", "loss", "pointwise", "reduction", "shape"]

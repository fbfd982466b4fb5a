"""One module per kind of structural change; importing this package fills the registry."""

from . import attention, feature, indexing, join, loss, pointwise, reduction, scan, shape

__all__ = ["attention", "feature", "indexing", "join", "loss", "pointwise", "reduction", "scan", "shape"]

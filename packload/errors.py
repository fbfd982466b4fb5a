"""The one error that collation raises, and how it names a sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KEYS = ("__key__", "key", "id")


class CollateError(ValueError):
    """Samples do not fit together, or not their schema.

    The message names the sample (its index in the batch, and its key if it carries one), the field, the
    shapes or types that disagree, and what to do.
    """


def locate(samples: list[Any], index: int, path: str) -> str:
    """Name a field of a sample: ``sample 3 (key 'a/17'), field 'meta.mask'``."""
    key = _key(samples[index])
    sample = f"sample {index}" if key is None else f"sample {index} (key {key!r})"
    return f"{sample}, field '{path}'" if path else sample


def _key(sample: Any) -> str | None:
    for name in _KEYS:
        value = sample.get(name) if isinstance(sample, Mapping) else getattr(sample, name, None)
        if isinstance(value, str):
            return value
    return None

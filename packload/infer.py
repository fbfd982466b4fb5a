"""A schema from a look at some samples."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from PIL import Image

from ops.pattern import parse

from .errors import CollateError
from .schema import Ragged, container, is_number, is_text, join, part

Sizes = tuple[int, ...]
_LETTERS = "nmklpqrstuvxyz"


def infer_schema(dataset: Any, probe: int = 64) -> dict[str, str]:
    """Propose a schema: a name for every dim that varies, the size for every dim that does not.

    Dims that vary alike, in one field or in several, get one name: they are one axis. Print what comes out,
    look at it, and write it into your program: it is a guess from a few samples, and no more is known of
    the others. Numbers and text need no pattern and are left out, as is what :func:`ragged` marks.

    Args:
        dataset: a map-style dataset, a list, or an iterable of samples.
        probe: how many samples to look at, spread evenly over a dataset that has a length, else the first.

    Returns:
        Patterns by path, for ``Collate(schema=...)``: ``{"tokens": "n", "pair": "n n 8", "box": "4"}``.

    Raises:
        CollateError: there are fewer than two samples, or they differ in their fields or ranks.
    """
    samples = _probe(dataset, probe)
    if len(samples) < 2:
        raise CollateError(
            f"infer_schema needs two samples or more to see what varies, and has {len(samples)}"
        )
    fields = [dict(_leaves(sample, "")) for sample in samples]
    names: dict[Sizes, str] = {}
    marked = _marked(fields, names)
    schema = {}
    for path in fields[0]:
        shapes = _shapes(fields, path)
        if path not in marked and shapes is not None and shapes[0]:
            image = isinstance(fields[0][path], Image.Image)
            schema[path] = _pattern(list(zip(*shapes)), names, image)
    return schema


def _probe(dataset: Any, probe: int) -> list[Any]:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return list(islice(iter(dataset), probe))
    count = min(probe, len(dataset))
    return [dataset[int(i)] for i in np.linspace(0, len(dataset) - 1, count).round()] if count else []


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    parts = container(value)
    if parts is None:
        yield path, value
        return
    structure, names = parts
    for name in names:
        yield from _leaves(part(value, structure, name), join(path, name))


def _shapes(fields: list[dict[str, Any]], path: str) -> list[Sizes] | None:
    """The shapes of one leaf in all samples; None if it is text."""
    shapes = []
    for index, sample in enumerate(fields):
        if set(sample) != set(fields[0]):
            other = sorted(set(sample) ^ set(fields[0]))
            raise CollateError(f"probed sample {index} and sample 0 do not both have {other}")
        try:
            shapes.append(_shape(sample[path]))
        except ValueError as error:
            text = "a list that is not one array. Make it rectangular"
            raise CollateError(f"probed sample {index}, field '{path}': {text}: {error}") from error
    ranks = {shape and len(shape) for shape in shapes}
    if len(ranks) > 1:
        raise CollateError(f"field '{path}' has leaves of ranks {sorted(map(str, ranks))}; give all one rank")
    return None if None in shapes else [shape for shape in shapes if shape is not None]


def _shape(value: Any) -> Sizes | None:
    if isinstance(value, Ragged):
        value = value.value
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return tuple(value.shape)
    if isinstance(value, Image.Image):
        return len(value.getbands()), value.height, value.width
    if is_text(value) or (isinstance(value, list) and value and is_text(value[0])):
        return None
    return () if is_number(value) else tuple(np.shape(value))


def _marked(fields: list[dict[str, Any]], names: dict[Sizes, str]) -> set[str]:
    """The paths of marked leaves; the axes of their patterns keep their names."""
    marked = {path for path, value in fields[0].items() if isinstance(value, Ragged)}
    for path in marked:
        shapes = _shapes(fields, path) or []
        for token, sizes in zip(parse(fields[0][path].pattern).tokens, zip(*shapes)):
            if isinstance(token, str):
                names.setdefault(sizes, token)
    return marked


def _pattern(dims: list[Sizes], names: dict[Sizes, str], image: bool) -> str:
    words = []
    for d, sizes in enumerate(dims):
        if len(set(sizes)) == 1:
            words.append(str(sizes[0]))
            continue
        if sizes not in names:
            letters = ("hw"[d - 1] if image else "") + _LETTERS
            free = (name for name in (*letters, *(f"n{k}" for k in range(len(names) + 2))))
            names[sizes] = next(name for name in free if name not in names.values())
        words.append(names[sizes])
    return " ".join(words)

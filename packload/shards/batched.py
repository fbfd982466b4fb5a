"""Packed batches out of a stream of samples, for pipelines of one's own.

    wds.WebDataset(urls).decode("rgb8").compose(packload.batched(budget=16384, schema={"tokens": "n"}))

A stream has no lengths in advance, so there is no plan: samples are put into a few open batches as they come,
each where it fits best (best fit, D. S. Johnson, "Near-optimal bin packing algorithms", 1973). Equal steps
over ranks and an exact resume need an index; see :func:`packload.shards`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import Any, Literal, get_args

import numpy as np
from PIL import Image
from torch import Tensor

from ..collate import Collate
from ..schema import Field, Group, Ragged, Recipe, Schema, build, leaves, parse_schema, part, signature

Cost = Callable[[Any], float]
Oversize = Literal["raise", "skip", "alone"]


class Batched:
    """A stage from samples to batches that keep to a budget; made by :func:`batched`."""

    def __init__(
        self,
        budget: float,
        schema: Schema | None,
        cost: str | Cost | None,
        batch_size: int | None,
        oversize: Oversize,
        open_batches: int,
        collate: Callable[[list[Any]], Any] | None,
    ) -> None:
        if budget <= 0 or open_batches < 1 or (batch_size is not None and batch_size < 1):
            raise ValueError(
                f"budget {budget}, batch_size {batch_size} and open_batches {open_batches} must be above 0"
            )
        if oversize not in get_args(Oversize):
            raise ValueError(f"oversize={oversize!r} is none of {get_args(Oversize)}")
        self.budget = budget
        self.batch_size = batch_size
        self.oversize = oversize
        self.open_batches = open_batches
        self.cost = cost if callable(cost) else CellCost(schema, cost)
        self.collate = Collate(schema) if collate is None else collate
        self.counts = {"skipped": 0, "alone": 0}

    def __call__(self, samples: Iterable[Any]) -> Iterator[Any]:
        """Collated batches of a stream of samples.

        Raises:
            ValueError: a sample costs more than the budget, where ``oversize`` is ``"raise"``.
        """
        return map(self.collate, self.groups(samples))

    def groups(self, samples: Iterable[Any]) -> Iterator[list[Any]]:
        """The samples of each batch, before they are collated."""
        open_: list[_Bin] = []
        for sample in samples:
            cost = self.cost(sample)
            if cost > self.budget:
                if self._is_alone(sample, cost):
                    yield [sample]
                continue
            fitting = [one for one in open_ if one.takes(cost, self.budget, self.batch_size)]
            if fitting:
                best = max(fitting, key=lambda one: one.cost)
            else:
                if len(open_) == self.open_batches:
                    full = max(open_, key=lambda one: one.cost)
                    open_.remove(full)
                    yield full.samples
                best = _Bin()
                open_.append(best)
            best.add(sample, cost)
        for one in open_:
            yield one.samples

    def _is_alone(self, sample: Any, cost: float) -> bool:
        if self.oversize == "raise":
            key = sample.get("__key__") if isinstance(sample, Mapping) else None
            name = "a sample" if key is None else f"sample {key!r}"
            raise ValueError(
                f"{name} costs {cost}, more than the budget of {self.budget}. Raise the budget, or say what "
                "is to become of such samples: oversize='skip' or 'alone'."
            )
        self.counts["alone" if self.oversize == "alone" else "skipped"] += 1
        return self.oversize == "alone"


class _Bin:
    """An open batch."""

    def __init__(self) -> None:
        self.samples: list[Any] = []
        self.cost = 0.0

    def takes(self, cost: float, budget: float, most: int | None) -> bool:
        return self.cost + cost <= budget and (most is None or len(self.samples) < most)

    def add(self, sample: Any, cost: float) -> None:
        self.samples.append(sample)
        self.cost += cost


class CellCost:
    """The cost of a sample: the number of cells of one of its ragged fields.

    Args:
        schema: patterns by path, as for collation.
        field: the field's path; None where a sample has one ragged field, or several over the same axes.
    """

    def __init__(self, schema: Schema | None, field: str | None) -> None:
        self.schema = schema
        self.field = field
        self._patterns = parse_schema(schema)
        self._known: dict[Any, tuple[tuple[Any, ...], tuple[int, ...]]] = {}

    def __call__(self, sample: Any) -> int:
        """Cells of the field.

        Raises:
            ValueError: there is no such ragged field, or it is not clear which is meant.
        """
        sign = signature(sample)
        found = self._known.get(sign)
        if found is None:
            if len(self._known) > 256:
                self._known.clear()
            found = self._known[sign] = self._choose(build(sign, self._patterns))
        steps, ragged = found
        value = sample
        for structure, name in steps:
            value = part(value, structure, name)
        shape = shape_of(value)
        return prod(shape[d] for d in ragged)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.schema, self.field)

    def _choose(self, recipe: Recipe) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        ragged = [leaf for leaf in leaves(recipe) if leaf.axes]
        names = [leaf.path for leaf in ragged]
        if self.field is not None:
            ragged = [leaf for leaf in ragged if leaf.path == self.field]
            if not ragged:
                raise ValueError(f"cost={self.field!r} is no ragged field of samples; these are: {names}")
        if not ragged:
            raise ValueError(
                "samples have no ragged field whose cells could be counted. Encode text as numbers first, or "
                "give a cost: a function of a sample."
            )
        if len({leaf.axes for leaf in ragged}) > 1:
            raise ValueError(f"the fields {names} are ragged: say which one is charged, cost={names[0]!r}")
        pattern = ragged[0].pattern
        assert pattern is not None
        return _way(recipe, ragged[0]), pattern.ragged


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of a leaf: of an image as it is packed, of lists as nested."""
    if isinstance(value, Ragged):
        value = value.value
    if isinstance(value, (Tensor, np.ndarray)):
        return tuple(value.shape)
    if isinstance(value, Image.Image):
        return len(value.getbands()), value.height, value.width
    shape = []
    while isinstance(value, (list, tuple)):
        shape.append(len(value))
        value = value[0] if value else None
    return tuple(shape)


def _way(recipe: Recipe, leaf: Field) -> tuple[Any, ...]:
    """The steps from a sample to a leaf: kinds of containers and names."""
    if isinstance(recipe, Field):
        return ()
    for name, child in zip(recipe.names, recipe.parts):
        if child is leaf:
            return ((recipe.structure, name),)
        if isinstance(child, Group) and leaf in leaves(child):
            return ((recipe.structure, name), *_way(child, leaf))
    raise AssertionError("the leaf is of another recipe")


def batched(
    budget: float,
    *,
    schema: Schema | None = None,
    cost: str | Cost | None = None,
    batch_size: int | None = None,
    oversize: Oversize = "raise",
    open_batches: int = 4,
    collate: Callable[[list[Any]], Any] | None = None,
) -> Batched:
    """A stage that makes packed batches of a stream of samples: ``dataset.compose(packload.batched(...))``.

    It is a callable from an iterator to an iterator, can be pickled, and runs where the pipeline runs: with
    ``WebLoader(dataset, batch_size=None, num_workers=N)`` in each worker.

    Args:
        budget: what the costs of a batch's samples may sum to.
        schema: patterns by path, see :class:`packload.Collate`.
        cost: what a sample costs: the path of a ragged field, whose cells are counted (tokens, pixels,
            pairs), or a function of a sample. May be left out if there is only one ragged field.
        batch_size: most samples of a batch.
        oversize: what becomes of a sample above the budget: an error, or it is left out, or it is a batch by
            itself; counted in ``counts``.
        open_batches: batches that are filled at a time; more are fuller, and held longer.
        collate: what makes a batch of samples; by default ``packload.Collate(schema)``.

    Raises:
        ValueError: an argument is out of range.
    """
    return Batched(budget, schema, cost, batch_size, oversize, open_batches, collate)

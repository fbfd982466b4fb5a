"""Schemas: how a sample's leaves become fields.

A sample is a tree. Dicts, tuples, named tuples and dataclasses are its structure; everything else is a
leaf. A leaf's *path* is the way to it, joined by dots: ``tokens``, ``meta.mask``, ``0``, ``1.x``.

What a leaf becomes depends on its own type and rank and on what was declared for it; never on the other
samples of a batch, so a loader delivers the same types in every batch:

=========================================  =======  ==========================================
leaf                                       pattern  field
=========================================  =======  ==========================================
tensor, array, list of numbers: rank 1     ``n``    packed, values [T]
tensor, array, list of lists: rank 2       ``n _``  packed, values [T, C]
PIL image; tensor, array: rank 3           ``_ h w``  packed, values [T, C]
number, 0-d tensor or array                         tensor [B]
string, bytes, None, list of these                  list of B
=========================================  =======  ==========================================

These defaults give every field axes of its own, called by its path (``src``; ``image.h``,
``image.w``): fields that happen to have one length in common need not have it in the next sample.
To share an axis between fields, or for any other shape, declare the pattern, by path in a schema or at
the leaf by :func:`ragged`: axes that are declared with one name are one axis in the whole batch, and
their lengths must agree. A pattern without a name (``"4"``, ``"3 _"``) gives a dense tensor [B, 4].

Dtypes are those of tensors and arrays; Python ints give int64, floats float32, bools bool. An image has
the dtype and channels of its mode (``RGB`` uint8 and 3, ``L`` and the indices of ``P`` uint8 and 1),
channels first as a sample's shape and last in ``values``. Lists hold numbers or text: tuples are
structure, unless a pattern is declared for one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

from ops import PackedTensor
from ops.pattern import Pattern, parse

from .errors import CollateError

Schema = Mapping[str, str | None]
AxisKey = str | tuple[str, str]
"""A declared axis by its name, an undeclared one by (path, letter)."""

Structure = Literal["mapping", "tuple", "named tuple", "dataclass"]
Kind = Literal["data", "image", "text"]

_DEFAULTS = {0: "", 1: "n", 2: "n _", 3: "_ h w"}


@dataclass(frozen=True, slots=True)
class Ragged:
    """A leaf marked with its pattern; made by :func:`ragged`."""

    value: Any
    pattern: str


def ragged(x: Any, pattern: str) -> Ragged:
    """Mark a leaf of a sample with its pattern.

    Args:
        x: a tensor, an array, a PIL image, a (nested) list of numbers.
        pattern: the shape of ``x``, e.g. ``"n n _"``. The names are shared with all fields of the batch
            that declare them.

    Raises:
        ValueError: the pattern cannot be read.
    """
    return Ragged(x, parse(pattern).text)


@dataclass(frozen=True)
class Field:
    """The recipe of one leaf.

    Attributes:
        path: the way to it, joined by dots.
        kind: numbers, PIL images, or what is kept as a list.
        pattern: the shape of one sample's leaf; None for text.
        axes: what identifies each ragged dim in the batch, in the pattern's order.
        marked: the leaf is wrapped by :func:`ragged`.
        declared: the pattern was declared, not a default.
        cast: the dtype it is packed as; None for its own.
    """

    path: str
    kind: Kind
    pattern: Pattern | None
    axes: tuple[AxisKey, ...] = ()
    marked: bool = False
    declared: bool = False
    cast: torch.dtype | None = None


@dataclass(frozen=True)
class Group:
    """The recipe of a container.

    Attributes:
        structure: its kind.
        names: the names of its parts.
        parts: their recipes; None for one that is dropped.
        titles: what the parts are called in the batch.
    """

    path: str
    structure: Structure
    names: tuple[Any, ...]
    parts: tuple[Field | Group | None, ...]
    titles: tuple[Any, ...]


@dataclass(frozen=True)
class Changes:
    """What becomes of fields besides their pattern; all by path.

    Attributes:
        drop: fields, or whole containers, that a batch does not have.
        rename: new names, in the place of a path's last part.
        cast: dtypes.
    """

    drop: frozenset[str] = frozenset()
    rename: Mapping[str, str] = field(default_factory=dict)
    cast: Mapping[str, torch.dtype] = field(default_factory=dict)

    @property
    def paths(self) -> set[str]:
        """All paths that are named."""
        return {*self.drop, *self.rename, *self.cast}


Recipe = Field | Group


def container(value: Any) -> tuple[Structure, tuple[Any, ...]] | None:
    """The kind of a container and the names of its parts; None for a leaf."""
    if type(value) is dict or isinstance(value, Mapping):
        return "mapping", tuple(value)
    if isinstance(value, tuple):
        names = getattr(value, "_fields", None)
        return ("tuple", tuple(range(len(value)))) if names is None else ("named tuple", tuple(names))
    if is_dataclass(value) and not isinstance(value, (type, Ragged, PackedTensor)):
        return "dataclass", tuple(f.name for f in fields(value))
    return None


def signature(value: Any) -> Hashable:
    """What of a sample decides its recipe: containers, the types and ranks of leaves, marks.

    Two samples with equal signatures have equal recipes. The signature is a nested tuple:
    ``(structure, names, signatures)``, ``("ragged", pattern, signature)``, ``("data", rank)``,
    ``("image", 3)``, ``("text", 0)`` or ``("unknown", type name)``.
    """
    if isinstance(value, torch.Tensor):
        return "data", value.ndim
    if isinstance(value, np.ndarray):
        return ("data", value.ndim) if value.dtype.kind in "biufc" else ("unknown", f"array of {value.dtype}")
    if is_text(value):
        return "text", 0
    if is_number(value):
        return "data", 0
    if isinstance(value, list):
        return _list_signature(value)
    if isinstance(value, Image.Image):
        return "image", 3
    if isinstance(value, Ragged):
        return "ragged", value.pattern, signature(value.value)
    parts = container(value)
    if parts is None:
        return "unknown", type(value).__name__
    structure, names = parts
    return structure, names, tuple(signature(part(value, structure, name)) for name in names)


def is_text(value: Any) -> bool:
    """Whether a value is kept as it is, in a list."""
    return value is None or isinstance(value, (str, bytes))


def is_number(value: Any) -> bool:
    """Whether a value is one Python or numpy number."""
    if isinstance(value, np.generic):
        return value.dtype.kind in "biufc"
    return isinstance(value, (int, float, complex))


def part(value: Any, structure: Structure, name: Any) -> Any:
    """One part of a container."""
    if structure == "named tuple" or structure == "dataclass":
        return getattr(value, name)
    return value[name]


def _list_signature(value: list[Any]) -> tuple[str, Hashable]:
    rank, first = 0, value
    while isinstance(first, (list, tuple)):
        rank += 1
        if not first:
            return "data", rank
        first = first[0]
    if is_number(first):
        return "data", rank
    return ("text", 0) if is_text(first) else ("unknown", f"list of {type(first).__name__}")


def parse_schema(schema: Schema | None) -> dict[str, Pattern]:
    """Parse a schema.

    Raises:
        CollateError: a path is not a string, or a pattern cannot be read.
    """
    parsed = {}
    for path, pattern in (schema or {}).items():
        if not isinstance(path, str) or not (pattern is None or isinstance(pattern, str)):
            raise CollateError(
                f"schema: {path!r}: {pattern!r} is not a field's path and its pattern, both strings, "
                "e.g. {'tokens': 'n', 'meta.mask': 'n n'}"
            )
        try:
            parsed[path] = parse(pattern or "")
        except ValueError as error:
            raise CollateError(f"schema, field '{path}': {error}") from error
    return parsed


def build(sign: Hashable, schema: Mapping[str, Pattern], changes: Changes = Changes()) -> Recipe:
    """Work out the recipe of samples with a signature.

    Raises:
        CollateError: a leaf's type is not supported, a leaf of rank 4 or more has no pattern, or the
            schema or the changes do not fit: they name a field that is not there, declare a pattern or a
            dtype for one that has none, or give two fields one name.
    """
    seen: set[str] = set()
    recipe = _build(sign, "", schema, changes, seen)
    if recipe is None:
        raise CollateError("drop names the samples themselves")
    paths = [leaf.path for leaf in leaves(recipe)]
    for path in paths:
        if paths.count(path) > 1:
            raise CollateError(f"two fields of a sample have the path '{path}'. Rename one of them.")
    for path in schema:
        if path not in paths:
            inside = [p for p in paths if p.startswith(f"{path}.")]
            hint = f"it holds the fields {inside}; declare those" if inside else f"the fields are {paths}"
            raise CollateError(f"the schema declares field '{path}', which is not a leaf: {hint}.")
    for path in sorted(changes.paths - seen | set(changes.cast) - set(paths)):
        raise CollateError(
            f"'{path}' is to be dropped, renamed or cast, but is not there: there are {sorted(seen)}."
        )
    return recipe


def leaves(recipe: Recipe) -> Iterator[Field]:
    """All fields of a recipe, in order."""
    if isinstance(recipe, Field):
        yield recipe
    else:
        for child in recipe.parts:
            if child is not None:
                yield from leaves(child)


def _build(
    sign: Any, path: str, schema: Mapping[str, Pattern], changes: Changes, seen: set[str]
) -> Recipe | None:
    seen.add(path)
    if path in changes.drop:
        return None
    declared = schema.get(path)
    marked = sign[0] == "ragged"
    if marked:
        mark = parse(sign[1])
        if declared is not None and declared != mark:
            raise CollateError(
                f"field '{path}' is marked '{mark}', and the schema declares '{declared}'. Drop one of them."
            )
        declared, sign = mark, sign[2]
    head = sign[0]
    if head == "unknown":
        raise CollateError(f"field '{path}': {_unsupported(sign[1])}")
    if head == "ragged" or (head in ("mapping", "named tuple", "dataclass") and marked):
        raise CollateError(f"field '{path}': ragged() marks a leaf, not a {head}. Mark what is inside.")
    if head not in ("data", "image", "text") and not (head == "tuple" and declared is not None):
        return _group(sign, path, schema, changes, seen)
    leaf = _field(sign, path, declared, marked)
    cast = changes.cast.get(path)
    if cast is not None and leaf.pattern is None:
        raise CollateError(f"field '{path}' holds text, which cannot be cast to {cast}.")
    return leaf if cast is None else replace(leaf, cast=cast)


def _group(sign: Any, path: str, schema: Mapping[str, Pattern], changes: Changes, seen: set[str]) -> Group:
    structure, names, signs = sign
    paths = [join(path, name) for name in names]
    parts = tuple(_build(s, p, schema, changes, seen) for s, p in zip(signs, paths))
    titles = tuple(changes.rename.get(p, name) for p, name in zip(paths, names))
    kept = [title for title, part in zip(titles, parts) if part is not None]
    for title in kept:
        if kept.count(title) > 1:
            raise CollateError(
                f"two fields of '{path}' would be called {title!r}. Rename one to something else."
            )
    if not kept and names:
        raise CollateError(
            f"all fields of '{path}' are dropped; drop '{path}' itself." if path else "no field is left."
        )
    return Group(path, structure, names, parts, titles)


def _field(sign: Any, path: str, declared: Pattern | None, marked: bool) -> Field:
    kind: Kind
    kind, rank = ("data", 1) if sign[0] == "tuple" else sign
    if kind == "text":
        if declared is not None:
            raise CollateError(
                f"field '{path}' holds text, which has no pattern; '{declared}' was declared. Encode it as "
                "numbers first, or declare nothing: it is kept as a list."
            )
        return Field(path, "text", None)
    if declared is not None:
        if kind == "image" and declared.rank not in (2, 3):
            raise CollateError(
                f"field '{path}' holds PIL images; '{declared}' was declared. Their pattern is '_ h w', or "
                "'h w' if they have one channel."
            )
        return Field(path, kind, declared, declared.names, marked, True)
    if rank not in _DEFAULTS:
        text = " ".join(["n"] + ["_"] * (rank - 1))
        raise CollateError(
            f"field '{path}' has {rank} dims: say which of them vary, with a name for each of these, e.g. "
            f"packload.Collate(schema={{'{path}': '{text}'}}), or at the leaf packload.ragged(x, '{text}')."
        )
    pattern = parse(_DEFAULTS[rank])
    return Field(path, kind, pattern, tuple((path, name) for name in pattern.names))


def join(path: str, name: Any) -> str:
    """The path of a part of the container at ``path``."""
    return f"{path}.{name}" if path else str(name)


def axis_name(key: AxisKey) -> str:
    """How an axis is called in prints and errors."""
    if isinstance(key, str):
        return key
    path, letter = key
    if not path:
        return letter
    return path if letter == "n" else f"{path}.{letter}"


def _unsupported(kind: str) -> str:
    if kind.startswith("list of"):
        return (
            f"{kind} cannot be a field: lists hold numbers or strings. Use a tuple for parts of a fixed "
            "number, or join them to one tensor with its lengths."
        )
    return (
        f"{kind} cannot be a field. Make it a tensor, an array, a number or a string, a dict, a tuple or "
        "a dataclass of these, or leave it out."
    )


def suggest(path: str, pattern: Pattern, declared: bool, shapes: list[tuple[int, ...]]) -> str:
    """The schema to write for shapes that a pattern does not fit: a name for every dim that varies.

    Dims that vary alike get one name. Names that the user declared are kept.
    """
    names: dict[tuple[int, ...], str] = {}
    taken = set(pattern.names) if declared else set()
    fresh = (letter for letter in "nmklpqrstuvwxyz" if letter not in taken)
    words = []
    for d, token in enumerate(pattern.tokens):
        sizes = tuple(shape[d] for shape in shapes)
        if declared and isinstance(token, str):
            words.append(token)
        elif len(set(sizes)) == 1:
            words.append(str(sizes[0]) if isinstance(token, int) else "_")
        else:
            words.append(names.get(sizes) or names.setdefault(sizes, next(fresh)))
    return f"schema={{'{path}': '{' '.join(words)}'}}"

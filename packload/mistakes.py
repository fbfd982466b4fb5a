"""What is wrong with samples that cannot be collated: the checks that find it, and the messages.

The hot path lets numpy and torch notice that something does not fit. Only then these checks run, in the
order in which a user wants to hear of them: type, dtype, rank, sizes, agreement of axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from ops.pattern import Pattern, check_sample

from .errors import CollateError, locate
from .schema import AxisKey, Field, Group, Ragged, axis_name, container, join, suggest

Shape = tuple[int, ...]


def shape_of(array: Any) -> Shape:
    """The shape of an array or a tensor as a plain tuple."""
    return tuple(array.shape)


class Mistakes:
    """The samples of one batch, and every way to complain about them.

    All methods raise :class:`CollateError`, which names the sample and the field; those called ``check``
    return if there is nothing to complain about.
    """

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def fail(self, index: int, path: str, text: str, cause: Exception | None = None) -> NoReturn:
        """Raise the error about one field of one sample."""
        raise CollateError(f"{locate(self.samples, index, path)}: {text}") from cause

    def check_containers(self, group: Group, column: list[Any]) -> None:
        """Every sample has the container of sample 0, with the same parts."""
        for index, value in enumerate(column):
            structure, names = container(value) or (type(value).__name__, ())
            if structure != group.structure:
                self.fail(index, group.path, f"{structure} where sample 0 has a {group.structure}.")
            for name in (*group.names, *names):
                if name not in names or name not in group.names:
                    lacking = "is missing here" if name not in names else "is missing in sample 0"
                    self.fail(
                        index,
                        join(group.path, name),
                        f"{lacking}: the fields are {list(names)}, those of sample 0 {list(group.names)}. "
                        "Give every sample the same fields.",
                    )

    def check_arrays(self, field: Field, arrays: Sequence[Any]) -> None:
        """All have one dtype, and shapes that fit the field's pattern."""
        if len({array.dtype for array in arrays}) > 1:
            self._fail_dtype(field, arrays)
        if field.pattern is not None:
            self.check_shapes(field, field.pattern, [array.shape for array in arrays])

    def check_shapes(self, field: Field, pattern: Pattern, shapes: list[Shape]) -> None:
        """Ranks, static dims and repeated names fit."""
        if set(map(len, shapes)) != {pattern.rank}:
            index = next(i for i, shape in enumerate(shapes) if len(shape) != pattern.rank)
            self._fail_rank(field, pattern, index, shapes)
        for d in pattern.static:
            sizes = {shape[d] for shape in shapes}
            if len(sizes) != 1 or pattern.tokens[d] not in (None, *sizes):
                self._fail_static(field, pattern, d, shapes)
        if len(set(pattern.names)) < len(pattern.names):
            for index, shape in enumerate(shapes):
                try:
                    check_sample(pattern, shape, locate(self.samples, index, field.path))
                except ValueError as error:
                    raise CollateError(str(error)) from error

    def fail_type(self, field: Field, index: int, column: list[Any]) -> NoReturn:
        """A leaf is of another kind than that of sample 0."""
        kinds = [
            f"a leaf marked '{v.pattern}'" if isinstance(v, Ragged) else type(v).__name__
            for v in (column[index], column[0])
        ]
        what = {"data": "numbers", "image": "PIL images", "text": "text"}[field.kind]
        text = f"{kinds[0]} where sample 0 has {kinds[1]}. Give {what} in every sample."
        self.fail(index, field.path, text)

    def _fail_dtype(self, field: Field, arrays: Sequence[Any]) -> NoReturn:
        index = next(i for i, array in enumerate(arrays) if array.dtype != arrays[0].dtype)
        got, first = (str(array.dtype).removeprefix("torch.") for array in (arrays[index], arrays[0]))
        self.fail(
            index,
            field.path,
            f"dtype {got} (shape {shape_of(arrays[index])}) where sample 0 has {first} "
            f"(shape {shape_of(arrays[0])}). Convert one to the other where the samples are made.",
        )

    def _fail_rank(self, field: Field, pattern: Pattern, index: int, shapes: list[Shape]) -> NoReturn:
        got = shapes[index]
        rule = "declared" if field.declared else "of sample 0's type and rank"
        self.fail(
            index,
            field.path,
            f"shape {tuple(got)} has {len(got)} dims, the pattern '{pattern}' {rule} has {pattern.rank} "
            f"(sample 0 has shape {tuple(shapes[0])}). Give every sample one rank, or declare the pattern.",
        )

    def _fail_static(self, field: Field, pattern: Pattern, d: int, shapes: list[Shape]) -> NoReturn:
        size = shapes[0][d] if pattern.tokens[d] is None else pattern.tokens[d]
        index = next(i for i, shape in enumerate(shapes) if shape[d] != size)
        if field.kind == "image":
            way = "Bring all images to one mode: image.convert('RGB')"
        else:
            schema = suggest(field.path, pattern, field.declared, shapes)
            way = f"Declare what fits, with a name for every dim that varies: packload.Collate({schema})"
        other = f", sample 0 has shape {tuple(shapes[0])}" if index else ""
        self.fail(
            index,
            field.path,
            f"shape {tuple(shapes[index])}{other}: dim {d} of the pattern '{pattern}' is static and must "
            f"be {size}. {way}.",
        )

    def fail_axis(
        self,
        key: AxisKey,
        first: tuple[Field, Sequence[Any], list[int]],
        other: tuple[Field, Sequence[Any], list[int]],
    ) -> NoReturn:
        """Two fields, with their arrays and lengths, disagree about an axis."""
        (field, arrays, sizes), (earlier, before, known) = other, first
        index = next(i for i, (a, b) in enumerate(zip(known, sizes)) if a != b)
        self.fail(
            index,
            field.path,
            f"axis '{axis_name(key)}' has length {sizes[index]} (shape {shape_of(arrays[index])}), but "
            f"field '{earlier.path}' gave it {known[index]} (shape {shape_of(before[index])}). Make them "
            "agree, or declare two names.",
        )

    def fail_convert(self, field: Field, arrays: Sequence[Any], error: Exception) -> NoReturn:
        """Something else that numpy or torch refused."""
        text = f"cannot pack {arrays[0].dtype} of shape {shape_of(arrays[0])}: {error}"
        self.fail(0, field.path, text, error)

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ops import Axis, Grid
from ops.testing import pack
from tests.strategies import PROFILES, make

LENGTHS = list(PROFILES.values())
some_lengths = st.lists(st.integers(0, 5), max_size=5)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("lengths", [*LENGTHS, []], ids=[*PROFILES, "no_samples"])
def test_axis_holds_what_lengths_say(lengths: list[int]) -> None:
    axis = Axis(lengths, name="n")
    assert axis.name == "n"
    assert axis.batch_size == len(lengths)
    assert axis.total == sum(lengths)
    assert axis.max_length == max(lengths, default=0)
    assert axis.lengths.tolist() == lengths
    assert axis.offsets.tolist() == np.cumsum([0, *lengths]).tolist()
    assert axis.sample_ids.tolist() == [i for i, n in enumerate(lengths) for _ in range(n)]
    assert axis.positions.tolist() == [p for n in lengths for p in range(n)]


def test_lengths_are_int64_on_the_host_and_offsets_int32() -> None:
    axis = Axis([3, 0, 2])
    assert axis.lengths.dtype == torch.int64
    assert axis.lengths.device.type == "cpu"
    assert axis.offsets.dtype == torch.int32


def test_lengths_come_as_list_numpy_or_tensor() -> None:
    for lengths in ([2, 3], np.array([2, 3]), torch.tensor([2, 3])):
        axis = Axis(lengths)
        assert axis.lengths.tolist() == [2, 3]
        assert axis.max_length == 3


@pytest.mark.parametrize("convert", [np.array, torch.tensor])
def test_lengths_are_copied(convert: type) -> None:
    lengths = convert([2, 3])
    axis = Axis(lengths)
    lengths[0] = 9
    assert axis.lengths.tolist() == [2, 3]


def test_given_offsets_are_kept() -> None:
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    assert Axis([2, 3], offsets=offsets).offsets is offsets


@pytest.mark.parametrize("lengths", [[2, -1], [[1, 2]]], ids=["negative", "two_dims"])
def test_impossible_lengths_raise(lengths: list) -> None:
    with pytest.raises(ValueError):
        Axis(lengths)


def test_more_rows_than_32_bits_hold_raise_before_any_work() -> None:
    with pytest.raises(ValueError, match=str(2**31 - 1)):
        Axis([2**30, 2**30])


def test_more_cells_than_32_bits_hold_raise_before_any_work() -> None:
    with pytest.raises(ValueError, match=str(2**31 - 1)):
        Grid((Axis([50_000]), Axis([50_000]))).cells  # noqa: B018


def test_axis_and_grid_are_not_dataclasses() -> None:
    assert not is_dataclass(Axis)
    assert not is_dataclass(Grid)


def coordinates_of(lengths: list[list[int]], k: int) -> list[int]:
    """By hand: for each cell, the packed row of axis ``k``."""
    starts = np.cumsum([0, *lengths[k]])
    return [
        int(starts[i]) + cell[k]
        for i in range(len(lengths[0]))
        for cell in product(*(range(axis[i]) for axis in lengths))
    ]


def row_splits_of(lengths: list[list[int]], level: int) -> list[int]:
    """By hand: offsets of the cells under each cell of the first ``level`` axes."""
    counts = []
    for i in range(len(lengths[0])):
        rows = int(np.prod([axis[i] for axis in lengths[:level]], dtype=int))
        counts += [int(np.prod([axis[i] for axis in lengths[level:]], dtype=int))] * rows
    return [0, *np.cumsum(counts).tolist()]


@st.composite
def axes_lengths(draw: st.DrawFn) -> list[list[int]]:
    count, rank = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    column = st.lists(st.integers(0, 4), min_size=count, max_size=count)
    return [draw(column) for _ in range(rank)]


@given(axes_lengths())
def test_grid_is_the_product_sample_major_then_row_major(lengths: list[list[int]]) -> None:
    grid = Grid(tuple(Axis(column) for column in lengths))
    cells = [int(np.prod(sizes)) for sizes in zip(*lengths)]
    assert grid.lengths.tolist() == cells
    assert grid.cells == sum(cells)
    assert grid.offsets.tolist() == [0, *np.cumsum(cells).tolist()]
    for k in range(len(lengths)):
        assert grid.coordinates(k).tolist() == coordinates_of(lengths, k)
        assert grid.row_splits(k).tolist() == row_splits_of(lengths, k)


def test_a_pair_grid_uses_one_axis_twice() -> None:
    axis = Axis([2, 3])
    grid = Grid((axis, axis))
    assert grid.axes[0] is grid.axes[1]
    assert grid.offsets.tolist() == [0, 4, 13]
    assert grid.coordinates(0).tolist() == [0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    assert grid.coordinates(1).tolist() == [0, 1, 0, 1, 2, 3, 4, 2, 3, 4, 2, 3, 4]


def test_a_grid_of_one_axis_has_its_offsets() -> None:
    axis = Axis([2, 0, 3])
    grid = Grid((axis,))
    assert grid.cells == axis.total
    assert grid.offsets.tolist() == axis.offsets.tolist()


def test_axes_of_different_batch_sizes_make_no_grid() -> None:
    with pytest.raises(ValueError, match="2.*3|3.*2"):
        Grid((Axis([1, 2]), Axis([1, 2, 3]))).cells  # noqa: B018


def test_maps_are_computed_once() -> None:
    axis = Axis([2, 3])
    grid = Grid((axis, axis))
    assert axis.positions is axis.positions
    assert axis.sample_ids is axis.sample_ids
    assert grid.coordinates(1) is grid.coordinates(1)


@pytest.mark.parametrize("lengths", LENGTHS, ids=PROFILES)
def test_equal_length_functions_give_the_same_axis(lengths: list[int]) -> None:
    (x,) = pack(make(lengths))
    assert x[:, :-1].axes[0] is x[:, 1:].axes[0]
    assert x[:, ::2].axes[0] is x[:, ::2].axes[0]
    assert x[:, :3].axes[0] is x[:, :3].axes[0]
    assert x[:, 1:-1].axes[0] is x[:, 2:].axes[0]


def test_an_identity_slice_gives_the_parent_axis() -> None:
    (x,) = pack(make([3, 5, 1]))
    assert x[:, :].axes[0] is x.axes[0]
    assert x[:, 0:].axes[0] is x.axes[0]
    assert x[:, ::1].axes[0] is x.axes[0]


def test_different_length_functions_give_different_axes() -> None:
    (x,) = pack(make([3, 5, 1]))
    evens, odds = x[:, ::2].axes[0], x[:, 1::2].axes[0]
    assert evens.lengths.tolist() == [2, 3, 1]
    assert odds.lengths.tolist() == [1, 2, 0]
    assert evens is not odds


def test_derived_axes_are_shared_by_fields_that_share_the_parent() -> None:
    x, y = pack(make([3, 5, 1]), make([3, 5, 1], "n 2"))
    assert x.axes[0] is y.axes[0]
    assert x[:, 1:].axes[0] is y[:, :-1].axes[0]
    assert x[1:].axes[0] is y[1:].axes[0]


def test_products_are_shared() -> None:
    x, y = pack(make([3, 5, 1]), make([3, 5, 1]))
    first = x[:, :, None] + y[:, None, :]
    second = x[:, :, None] * x[:, None, :]
    assert first.axes == (x.axes[0], x.axes[0])
    assert first.offsets is second.offsets


def test_an_operator_keeps_the_grid_object() -> None:
    (x,) = pack(make([3, 5, 1]))
    assert (x + 1).grid is x.grid
    assert torch.nn.functional.layer_norm(x, (4,)).grid is x.grid


@pytest.mark.parametrize(
    "derive",
    [
        lambda x: x[:, 1:].axes[0],
        lambda x: x[:, ::2].axes[0],
        lambda x: (x[:, :, None] + x[:, None]).grid,
        lambda x: x[1:].axes[0],
        lambda x: (x[:, :, None] + x[:, None]).flatten(1, 2).axes[0],
        lambda x: (x[:, 1:, None] + x[:, None, ::2]).grid,
    ],
    ids=["slice", "stride", "product", "sub_batch", "flatten", "product_of_slices"],
)
def test_caches_keep_no_axis_alive(derive: Callable) -> None:
    with no_garbage_collection():
        (x,) = pack(make([3, 5, 1]))
        derived = derive(x)
        alive = [weakref.ref(x.axes[0]), weakref.ref(x.values)]
        del x, derived
        assert [ref() for ref in alive] == [None, None]


def test_a_derived_axis_does_not_keep_the_values_alive() -> None:
    with no_garbage_collection():
        (x,) = pack(make([3, 5, 1]))
        derived = x[:, 1:].axes[0]
        values = weakref.ref(x.values)
        del x
        assert values() is None
        assert derived.lengths.tolist() == [2, 4, 0]


def test_structure_made_in_inference_mode_serves_training() -> None:
    (x,) = pack(make([3, 0, 5]))
    with torch.inference_mode():
        _ = (x[:, 1:, None] + x[:, None, :-1]).mean(2)
        _ = x.mean(1)
    x.requires_grad_()
    out = (x[:, 1:, None] + x[:, None, :-1]).mean(2)
    torch.cat([s.flatten() for s in out.to_list()]).sum().backward()
    assert x.grad.to_list()[1].shape == (0, 4)


def test_pickle_and_deepcopy_keep_structure() -> None:
    axis = Axis([3, 0, 5], name="n")
    axis.positions  # noqa: B018  (a warm cache has to survive)
    for twin in (pickle.loads(pickle.dumps(axis)), copy.deepcopy(axis)):
        assert twin.lengths.tolist() == [3, 0, 5]
        assert twin.offsets.tolist() == [0, 3, 3, 8]
        assert twin.max_length == 5
        assert twin.name == "n"


def test_repr_shows_name_and_lengths() -> None:
    text = repr(Axis([3, 0, 5], name="words"))
    assert "words" in text
    assert "3, 0, 5" in text


@given(some_lengths)
def test_positions_and_samples_agree_with_offsets(lengths: list[int]) -> None:
    axis = Axis(lengths)
    rows = axis.offsets[axis.sample_ids.long()] + axis.positions
    assert rows.tolist() == list(range(sum(lengths)))

"""Delivered maps are what ops would build, and ops finds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import packload.maps
from ops import Axis, Grid, PackedTensor, mark_dynamic
from packload import Batch, Collate, CollateError

LENGTHS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=6)
SCHEMA = {"x": "n _", "y": "m", "z": "k", "square": "n n", "cross": "n m", "cube": "n m k 2", "late": "m n"}


def make(sizes: list[tuple[int, int, int]], **options: Any) -> Batch:
    samples = [
        {
            "x": torch.ones(n, 2),
            "y": torch.ones(m),
            "z": torch.ones(k),
            "square": torch.ones(n, n),
            "cross": torch.ones(n, m),
            "cube": torch.ones(n, m, k, 2),
            "late": torch.ones(m, n),
        }
        for n, m, k in sizes
    ]
    return Collate(SCHEMA, **options)(samples)


def reference(grid: Grid) -> Grid:
    """The same structure from lengths alone, every map built by loops."""
    fresh = {axis: Axis(axis.lengths.tolist()) for axis in grid.axes}
    return Grid([fresh[axis] for axis in grid.axes])


def by_loops(lengths: list[tuple[int, ...]]) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Of every cell the sample, the position and the row on each axis."""
    cells = []
    firsts = [0] * len(lengths[0])
    for sample, sizes in enumerate(lengths):
        for position in (
            torch.cartesian_prod(*(torch.arange(n) for n in sizes)).reshape(-1, len(sizes)).tolist()
        ):
            rows = tuple(first + p for first, p in zip(firsts, position))
            cells.append((sample, tuple(position), rows))
        firsts = [first + n for first, n in zip(firsts, sizes)]
    return cells


@given(LENGTHS)
@pytest.mark.parametrize("long", [0, 10_000])
def test_every_map_is_what_loops_over_the_cells_give(long: int, sizes: list[tuple[int, int, int]]) -> None:
    """By whole batches, as for short samples, and sample by sample, as for long ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packload.maps, "_LONG", long)
        patch.setattr(packload.maps, "_LARGE", long)
        batch = make(sizes, maps=["sample_ids", "positions", "coordinates", "row_splits", "columns"])
    for name in ("x", "y", "z"):
        axis = batch[name].axes[0]
        cells = by_loops([(n,) for n in axis.lengths.tolist()])
        assert axis.maps["sample_ids"].tolist() == [sample for sample, _, _ in cells]
        assert axis.maps["positions"].tolist() == [position[0] for _, position, _ in cells]
    for name in ("square", "cross", "cube", "late"):
        grid = batch[name].grid
        cells = by_loops(list(zip(*(axis.lengths.tolist() for axis in grid.axes))))
        assert grid.part.maps["sample_ids"].tolist() == [sample for sample, _, _ in cells]
        for k in range(len(grid.axes)):
            assert grid.part.maps[f"map ({k},)"].tolist() == [rows[k] for _, _, rows in cells]
            if k:
                order = sorted(range(len(cells)), key=lambda c: (cells[c][2][k], c))
                assert grid.part.maps[f"order ({k},)"].tolist() == order
        assert all(t.dtype == torch.int32 for t in grid.part.maps.values())


@given(LENGTHS)
def test_ops_reads_delivered_maps_and_they_are_those_it_builds(sizes: list[tuple[int, int, int]]) -> None:
    batch = make(sizes)
    for name in ("square", "cross", "cube", "late"):
        grid: Grid = batch[name].grid
        own = reference(grid)
        assert grid.part.maps, name
        for kind, found in grid.part.maps.items():
            assert torch.equal(found, _built(own, kind)), (name, kind)
        for k in range(len(grid.axes)):
            assert grid.coordinates(k) is grid.part.maps[f"map ({k},)"]
        for level in range(1, len(grid.axes)):
            assert torch.equal(grid.row_splits(level), own.row_splits(level))
            assert any(grid.row_splits(level) is found for found in grid.part.maps.values())
        assert torch.equal(grid.offsets, own.offsets) and torch.equal(grid.lengths, own.lengths)


def _built(grid: Grid, kind: str) -> torch.Tensor:
    what, kept = kind.split(" ", 1)
    axes = tuple(int(word) for word in kept.strip("()").split(",") if word.strip())
    found = {"map": grid.map_to, "splits": grid.splits, "order": grid.order_by}[what](axes)
    assert found is not None
    return found


def test_a_product_made_by_operators_is_the_one_that_was_delivered() -> None:
    batch = make([(3, 1, 1), (0, 2, 1), (2, 2, 2)])
    x = batch.x
    pair = x[:, :, None] + x[:, None]
    assert pair.grid.part is batch.square.grid.part
    assert pair.grid.coordinates(1) is batch.square.grid.part.maps["map (1,)"]


def test_a_product_without_a_field_is_delivered_where_it_is_asked_for() -> None:
    collation = Collate({"x": "n _"}, maps=["sample_ids", "n n"])
    x = collation([{"x": torch.randn(n, 2)} for n in (2, 0, 3)]).x
    pair = x[:, :, None] + x[:, None]
    assert set(pair.grid.part.maps) == {
        "sample_ids", "map (0,)", "map (1,)", "splits (0,)", "order (1,)", "splits (1,)"
    }  # fmt: skip
    expected = [s[:, None] + s[None] for s in x.to_list()]
    for found, right in zip(pair.to_list(), expected):
        torch.testing.assert_close(found, right)


def test_by_default_pairs_bring_maps_and_images_do_not() -> None:
    samples = [
        {
            "x": torch.ones(n),
            "y": torch.ones(n + 1),
            "xy": torch.ones(n, n + 1),
            "image": torch.ones(3, n, n + 2),
        }
        for n in (1, 3)
    ]
    batch = Collate({"x": "n", "y": "m", "xy": "n m", "image": "_ h w"})(samples)
    assert set(batch.x.axes[0].maps) == {"sample_ids", "positions"}
    assert "map (0,)" in batch.xy.grid.part.maps
    assert batch.image.grid.part.maps == {}


def test_a_pair_over_the_limit_brings_maps_only_if_they_were_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("packload.maps.PAIR_CELLS", 12)
    schema = {"p": "n n"}
    samples = [{"p": torch.ones(n, n)} for n in (3, 2)]
    assert Collate(schema)(samples).p.grid.part.maps == {}
    assert Collate(schema)(samples[:1]).p.grid.part.maps
    assert Collate(schema, maps=["coordinates"])(samples).p.grid.part.maps


def test_no_maps_on_request() -> None:
    batch = make([(2, 1, 1)], maps=[])
    assert batch.x.axes[0].maps == batch.square.grid.part.maps == {}


@pytest.mark.parametrize(
    ("maps", "words"),
    [
        (["positions", "rows"], ["'rows'", "coordinates"]),
        (["n q"], ["'n q'", "'q'"]),
        ("positions", ["lists"]),
    ],
)
def test_a_map_that_is_not_known_is_an_error(maps: Any, words: list[str]) -> None:
    with pytest.raises(CollateError) as error:
        make([(1, 1, 1)], maps=maps)
    for word in words:
        assert word in str(error.value), str(error.value)


def graph_of(maps: list[str]) -> set[str]:
    """The operators of the one graph of a pair program over batches that bring some maps."""
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def program(x: PackedTensor) -> torch.Tensor:
        pair = x[:, :, None] + x[:, None]
        return (pair * pair).sum(2).values

    collation = Collate({"x": "n _"}, maps=maps)
    compiled = torch.compile(program, backend=backend, fullgraph=True)
    for sizes in ([3, 2], [1, 4, 2], [5], [0, 3]):
        x = mark_dynamic(collation([{"x": torch.randn(n, 4)} for n in sizes])).x
        torch.testing.assert_close(compiled(x), program(x))
    assert len(graphs) == 1
    return {str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"}


def test_a_graph_reads_maps_and_builds_those_that_were_not_delivered() -> None:
    def builds(called: set[str]) -> set[str]:
        names = ("product", "sample_ids", "ranges", "splits", "invert")
        return {name for name in names if any(f".{name}" in target for target in called)}

    assert builds(graph_of(["sample_ids", "positions", "n n"])) == set()
    assert {"product", "splits"} <= builds(graph_of([]))

"""The figures of a policy, beside sums written out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packload.report import metrics as f
from packload.report.served import Served

Batches = list[list[list[int]]]


@dataclass
class Epoch:
    """Batches by rank and step, and the lengths of the samples."""

    batches: Batches
    lengths: np.ndarray

    @property
    def served(self) -> Served:
        return Served.of(self.batches)

    @property
    def in_time(self) -> list[list[int]]:
        return [rank[step] for step in range(len(self.batches[0])) for rank in self.batches]

    def size(self, index: int) -> int:
        return int(np.prod(self.lengths[index]))

    def padded(self, batch: Sequence[int]) -> int:
        rows = self.lengths.reshape(len(self.lengths), -1)
        return len(batch) * math.prod(max(rows[i][d] for i in batch) for d in range(rows.shape[1]))


@st.composite
def epochs(draw: st.DrawFn) -> Epoch:
    """1 to 3 ranks of 1 to 4 steps over up to 9 samples of one or two sizes; samples may repeat."""
    count, dims = draw(st.integers(1, 9)), draw(st.sampled_from([(), (2,)]))
    sizes = draw(st.lists(st.integers(0, 8), min_size=count * 2, max_size=count * 2))
    lengths = np.array(sizes, np.int64)[: count * (dims[0] if dims else 1)].reshape(count, *dims)
    ranks, steps = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    batch = st.lists(st.integers(0, count - 1), min_size=1, max_size=5)
    return Epoch([[draw(batch) for _ in range(steps)] for _ in range(ranks)], lengths)


@given(epochs())
def test_batches_are_put_together_in_the_order_of_time(epoch: Epoch) -> None:
    served = epoch.served
    cut = [served.indices[a:b].tolist() for a, b in zip(served.offsets, served.offsets[1:])]
    assert cut == epoch.in_time
    assert (served.steps, served.ranks) == (len(epoch.batches[0]), len(epoch.batches))
    assert served.sizes.tolist() == [len(batch) for batch in epoch.in_time]


@given(epochs())
def test_occupancy_is_valid_over_padded_cells(epoch: Epoch) -> None:
    valid = sum(epoch.size(i) for batch in epoch.in_time for i in batch)
    padded = sum(epoch.padded(batch) for batch in epoch.in_time)
    assert f.occupancy(epoch.served, epoch.lengths) == pytest.approx(valid / padded if padded else 1.0)
    assert f.padding(epoch.served, epoch.lengths) == padded - valid


@given(epochs())
def test_occupancy_of_another_measure_pads_to_the_largest_lengths(epoch: Epoch) -> None:
    def quadratic(lengths: np.ndarray) -> np.ndarray:
        return 3 * f.cells(lengths) + f.cells(lengths) ** 2

    valid = sum(3 * epoch.size(i) + epoch.size(i) ** 2 for batch in epoch.in_time for i in batch)
    padded = 0
    for batch in epoch.in_time:
        one = epoch.padded(batch) // len(batch)
        padded += len(batch) * (3 * one + one**2)
    assert f.occupancy(epoch.served, epoch.lengths, quadratic) == pytest.approx(
        valid / padded if padded else 1.0
    )


@given(epochs())
def test_fill_is_each_batchs_cost_over_the_budget(epoch: Epoch) -> None:
    cost = f.cells(epoch.lengths)
    expected = [sum(epoch.size(i) for i in batch) / 10 for batch in epoch.in_time]
    assert f.fill(epoch.served, cost, 10).tolist() == pytest.approx(expected)


@given(epochs())
def test_slowest_compares_the_ranks_of_each_step(epoch: Epoch) -> None:
    cost = f.cells(epoch.lengths)
    steps = [
        [sum(epoch.size(i) for i in rank[step]) for rank in epoch.batches]
        for step in range(len(epoch.batches[0]))
    ]
    means = [sum(step) / len(step) for step in steps]
    assert f.slowest(epoch.served, cost).tolist() == pytest.approx(
        [max(step) / mean if mean else 1.0 for step, mean in zip(steps, means)]
    )
    total = sum(means)
    expected = sum(map(max, steps)) / total if total else 1.0
    assert f.waiting(epoch.served, cost) == pytest.approx(expected)


@given(epochs())
def test_adjacent_samples_are_those_next_to_each_other_on_a_rank(epoch: Epoch) -> None:
    pairs = []
    for rank in epoch.batches:
        order = [epoch.size(i) for batch in rank for i in batch]
        pairs += list(zip(order, order[1:]))
    got = f.adjacent_correlation(epoch.served, epoch.lengths)
    if len({a for a, _ in pairs}) < 2 or len({b for _, b in pairs}) < 2:
        assert math.isnan(got)
        return
    mean = [sum(side) / len(pairs) for side in zip(*pairs)]
    cross = sum((a - mean[0]) * (b - mean[1]) for a, b in pairs)
    spread = [math.sqrt(sum((pair[k] - mean[k]) ** 2 for pair in pairs)) for k in (0, 1)]
    assert got == pytest.approx(cross / spread[0] / spread[1])


@given(epochs())
def test_shapes_are_counted_padded_and_packed(epoch: Epoch) -> None:
    rows = epoch.lengths.reshape(len(epoch.lengths), -1).tolist()
    padded = {(len(batch), *map(max, zip(*(rows[i] for i in batch)))) for batch in epoch.in_time}
    packed = {sum(epoch.size(i) for i in batch) for batch in epoch.in_time}
    assert f.padded_shapes(epoch.served, epoch.lengths) == len(padded)
    assert f.packed_shapes(epoch.served, epoch.lengths) == len(packed)


@given(epochs())
def test_the_largest_batch_and_what_was_left_out_are_counted(epoch: Epoch) -> None:
    got = f.figures("name", epoch.served, epoch.lengths, budget=10)
    everything = [i for batch in epoch.in_time for i in batch]
    assert got.samples == len(everything)
    assert got.dropped == len(set(range(len(epoch.lengths))) - set(everything))
    assert got.repeated == len(everything) - len(set(everything))
    assert got.largest_samples == max(map(len, epoch.in_time))
    assert got.largest_cells == max(sum(map(epoch.size, batch)) for batch in epoch.in_time)
    assert got.largest_padded == max(map(epoch.padded, epoch.in_time))
    assert got.fill == pytest.approx(np.mean([sum(map(epoch.size, batch)) / 10 for batch in epoch.in_time]))


def test_an_epoch_without_steps_has_figures() -> None:
    got = f.figures("name", Served.of([[], []]), np.array([3, 4]), budget=10)
    assert (got.steps, got.samples, got.dropped, got.fill) == (0, 0, 2, None)
    assert (got.occupancy, got.slowest, got.waiting) == (1.0, 1.0, 1.0)


def test_a_case_worked_out_by_hand() -> None:
    """Lengths 1, 3 | 2, 2 on rank 0 and 4 | 4 on rank 1; budget 4."""
    served = Served.of([[[0, 1], [2, 3]], [[4], [5]]])
    got = f.figures("name", served, np.array([1, 3, 2, 2, 4, 4]), budget=4)
    assert got.occupancy == pytest.approx(16 / 18)
    assert got.padding == 2
    assert (got.fill, got.slowest, got.waiting) == (1.0, 1.0, 1.0)
    assert got.padded_shapes == 3  # (2, 3), (1, 4), (2, 2)
    assert got.packed_shapes == 1


@pytest.mark.parametrize(
    ("batches", "said"),
    [([], "one number of steps"), ([[[0]], []], r"\[1, 0\]"), ([[[0], [1]], [[0], []]], "step 1 of rank 1")],
)
def test_what_no_epoch_can_be_is_refused(batches: Batches, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Served.of(batches)

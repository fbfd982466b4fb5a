from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ops import PackedTensor
from ops.testing import Dense, Ragged, check, pack
from tests.strategies import PROFILES, batches, dim_orders, laid_out, make, rotated

LENGTHS = pytest.mark.parametrize("lengths", list(PROFILES.values()), ids=list(PROFILES))
STRUCTURE_ERROR = (ValueError, RuntimeError)


# ---------------------------------------------------------------- dense operands


@LENGTHS
@pytest.mark.parametrize("kind", ["4", "1", "", "batch 1 4", "batch 1 1", "n 4", "1 n 4", "batch n 4", "n 1"])
def test_dense_operands_broadcast_by_feature_sample_and_position(lengths: list[int], kind: str) -> None:
    sizes = {"batch": len(lengths), "n": max(lengths)}
    shape = [sizes.get(token) or (0 if token in sizes else int(token)) for token in kind.split()]
    dense = Dense(torch.randn(shape, dtype=torch.float64), kind)
    check(lambda x, d: x + d, make(lengths), dense)
    check(lambda x, d: d * x, make(lengths), dense)
    check(lambda x, d: torch.maximum(d, x), make(lengths), dense)


@pytest.mark.parametrize(
    "kind", ["m 4", "n 1 4", "n m 4", "1 m 4", "batch n m 4", "batch 1 m 4", "batch n 1 1"]
)
def test_dense_operands_broadcast_against_pairs(kind: str) -> None:
    lengths = {"n": [3, 0, 2], "m": [1, 5, 4]}
    sizes = {"batch": 3, "n": 3, "m": 5}
    shape = [sizes.get(token) or int(token) for token in kind.split()]
    check(lambda p, d: p * d, make(lengths, "n m 4"), Dense(torch.randn(shape, dtype=torch.float64), kind))


@pytest.mark.parametrize("kind", ["n", "1 n", "4 1", "4 n", "batch 4 1", "batch 1 n", "batch 4 n"])
def test_dense_operands_broadcast_against_channels_first(kind: str) -> None:
    sizes = {"batch": 3, "n": 5}
    shape = [sizes.get(token) or int(token) for token in kind.split()]
    dense = Dense(torch.randn(shape, dtype=torch.float64), kind)
    check(lambda x, d: x * d, make([3, 0, 5], "4 n"), dense)


@given(laid_out(patterns=("n 4", "n m 4", "3 n 4")), st.data())
def test_dense_operands_broadcast_in_any_order(
    case: tuple[Ragged, tuple[int, ...]], data: st.DataObject
) -> None:
    batch, order = case
    lengths = batch.lengths()
    tokens = ["batch", *batch.pattern.split()]
    kept = [tokens[d] if data.draw(st.booleans()) else "1" for d in order]
    sizes = {"batch": len(batch.samples), **{name: max(column) for name, column in lengths.items()}}
    shape = [sizes[token] if token in sizes else int(token) for token in kept]
    dense = Dense(torch.randn(shape, dtype=torch.float64), " ".join(kept))
    check(lambda x, d: x.permute(order) * d, batch, dense, batch_dim=order.index(0))


def test_a_sliced_position_embedding_is_added() -> None:
    """Case 11b: a learned embedding (1, N, C), cut to the batch's length."""
    table = torch.randn(1, 9, 4, dtype=torch.float64)
    for lengths in PROFILES.values():
        check(lambda x, t: x + t[:, : x.shape[1]], make(lengths), table)
        check(lambda x, t: x + t[:, : x.size(1)], make(lengths), table)


def test_a_position_operand_of_another_length_raises() -> None:
    (x,) = pack(make([3, 5]))
    for rows in (3, 6):
        with pytest.raises(STRUCTURE_ERROR):
            x + torch.zeros(rows, 4, dtype=torch.float64)
        with pytest.raises(STRUCTURE_ERROR):
            torch.zeros(2, rows, 4, dtype=torch.float64) + x


def test_a_sample_operand_of_another_batch_size_raises() -> None:
    (x,) = pack(make([3, 5]))
    with pytest.raises(STRUCTURE_ERROR):
        x + torch.zeros(3, 1, 4, dtype=torch.float64)


def test_rows_of_the_payload_are_no_operand() -> None:
    (x,) = pack(make([3, 5]))
    with pytest.raises(STRUCTURE_ERROR):
        x + torch.zeros(8, 4, dtype=torch.float64)


def test_a_reduced_tensor_broadcasts_back() -> None:
    check(lambda x: x - x.mean(1, keepdim=True), make([3, 1, 5]))
    check(lambda x: x * x.sum(1)[:, None], make([3, 1, 5]))
    check(lambda p: p - p.mean(2, keepdim=True) - p.mean((1, 2), keepdim=True), make([3, 1, 5], "n m 4"))


# ---------------------------------------------------------------- broadcasting that creates axes


@LENGTHS
def test_rows_and_columns_make_pairs(lengths: list[int]) -> None:
    check(lambda x: x[:, :, None] + x[:, None, :], make(lengths))
    check(lambda x, y: x[:, :, None] * y[:, None, :], make(lengths), make(lengths, seed=1))
    check(lambda x, y: x[:, None, :] - y[:, :, None], make(lengths), make(lengths, seed=1))


def test_pair_sum_of_two_and_three() -> None:
    """Case 4: offsets [0, 4, 13], each block as dense, gradcheck."""
    x, y = pack(make([2, 3]), make([2, 3], seed=1))
    pair = x[:, :, None] + y[:, None, :]
    assert pair.offsets.tolist() == [0, 4, 13]

    def values(u: Tensor, v: Tensor) -> Tensor:
        a, b = (PackedTensor(t, x.grid, x.order) for t in (u, v))
        return (a[:, :, None] + b[:, None, :]).sin().values

    inputs = [t.values.clone().requires_grad_() for t in (x, y)]
    assert torch.autograd.gradcheck(values, inputs)
    check(lambda a, b: a[:, :, None] + b[:, None, :], make([2, 3]), make([2, 3], seed=1))


@LENGTHS
def test_two_axes_make_rectangular_pairs(lengths: list[int]) -> None:
    x, y = make({"n": lengths}, "n 4"), make({"m": rotated(lengths, 1)}, "m 4", seed=1)
    check(lambda a, b: a[:, :, None] + b[:, None], x, y)
    check(lambda a, b: a[:, None] * b[:, :, None], x, y)
    check(lambda a, b: torch.maximum(a.unsqueeze(2), b.unsqueeze(1)), x, y)


def test_channels_first_make_pairs() -> None:
    x, y = make({"n": [3, 0, 2]}, "4 n"), make({"m": [1, 4, 2]}, "4 m", seed=1)
    check(lambda a, b: a[..., :, None] + b[..., None, :], x, y)
    check(lambda a: a[..., :, None] * a[..., None, :], x)


def test_vectors_make_pairs() -> None:
    x = make([3, 0, 5], "n")
    check(lambda a: a[:, :, None] * a[:, None, :], x)
    check(lambda a: a[:, None, :] < a[:, :, None], x)


def test_a_pair_takes_rows_and_columns() -> None:
    lengths = {"n": [3, 0, 2], "m": [1, 5, 4]}
    p, x, y = make(lengths, "n m 4"), make({"n": lengths["n"]}, "n 4"), make({"m": lengths["m"]}, "m 4")
    check(lambda p, x, y: p + x[:, :, None] + y[:, None], p, x, y)
    check(lambda p, x, y: x[:, :, None] * p * y[:, None], p, x, y)


def test_three_axes_come_from_three_vectors() -> None:
    x, y, z = (make({name: [2, 0, 3]}, name, seed=k) for k, name in enumerate("nmk"))
    check(lambda x, y, z: x[:, :, None, None] + y[:, None, :, None] * z[:, None, None], x, y, z)


def test_statics_broadcast_too() -> None:
    check(lambda x, y: x * y, make([3, 0, 5], "n 1 4"), make([3, 0, 5], "n 3 1", seed=1))
    check(lambda x, y: x + y, make([3, 0, 5], "n 3 4"), make([3, 0, 5], "n 1 4", seed=1))
    check(lambda x, y: x[..., None] + y[:, :, None], make([3, 0, 5]), make([3, 0, 5], seed=1))


def test_a_packed_operand_of_lower_rank_aligns_right() -> None:
    """(B, n) against (B, n, n) would align the batch with an axis: an error, as for dense B != n."""
    x, p = pack(make([3, 5], "n"), make([3, 5], "n n"))
    with pytest.raises(STRUCTURE_ERROR):
        p + x


@given(st.data())
def test_broadcasting_in_any_order(data: st.DataObject) -> None:
    """Operands whose dims are dropped to 1 at random, then permuted alike."""
    tokens = ["n", "m", "4"]
    count = data.draw(st.integers(1, 3))
    sizes = st.lists(st.integers(0, 3), min_size=count, max_size=count)
    lengths = {"n": data.draw(sizes), "m": data.draw(sizes)}
    kept = data.draw(st.sampled_from(["n 1 4", "n 1 1", "n m 1", "n m 4"]))
    other = data.draw(st.sampled_from(["1 m 4", "1 m 1", "n m 4", "n 1 4"]))
    order = data.draw(dim_orders(len(tokens) + 1))
    x, y = (make({k: v for k, v in lengths.items() if k in p.split()}, p, seed=len(p)) for p in (kept, other))
    check(lambda a, b: a.permute(order) * b.permute(order), x, y, batch_dim=order.index(0))


# ---------------------------------------------------------------- layouts of one structure


def test_static_dims_in_another_order_are_aligned() -> None:
    x, y = make([3, 0, 5], "n 3 4"), make([3, 0, 5], "n 4 3", seed=1)
    check(lambda a, b: a + b.transpose(2, 3), x, y)
    check(lambda a, b: a * b.transpose(1, 2), make([3, 0, 5]), make([3, 0, 5], "4 n", seed=1))


@LENGTHS
def test_a_transposed_square_pair_is_laid_out_anew(lengths: list[int]) -> None:
    p = make(lengths, "n n 4")
    check(lambda p: p + p.transpose(1, 2), p)
    check(lambda p: p.transpose(1, 2) * p, p)
    check(lambda p: p - p.mT, make(lengths, "n n"))
    check(lambda p: torch.where(p > p.mT, p, p.mT), make(lengths, "n n"))


def test_a_transposed_rectangular_pair_is_laid_out_anew() -> None:
    lengths = {"n": [3, 0, 2], "m": [1, 5, 4]}
    p, q = make(lengths, "n m 4"), make(lengths, "m n 4", seed=1)
    check(lambda p, q: p + q.transpose(1, 2), p, q)
    check(lambda p, q: q * p.transpose(1, 2), p, q)


@given(batches(patterns=("n m 4", "n n 4", "4 n m", "n n")), st.data())
def test_two_layouts_of_one_tensor_agree(batch: Ragged, data: st.DataObject) -> None:
    """x + (x brought to another layout and back) is 2x, whatever the layouts."""
    rank = len(batch.pattern.split()) + 1
    order = data.draw(dim_orders(rank))
    check(lambda x: x.permute(order) + (x * 3).permute(order), batch, batch_dim=order.index(0))


# ---------------------------------------------------------------- structures that differ


def test_two_equal_structures_built_apart_are_equal() -> None:
    """Case 2, first half."""
    for lengths in PROFILES.values():
        check(operator.sub, make(lengths), make(lengths, seed=1), share=False)
        check(
            lambda a, b: a[:, :, None] + b[:, None] + a[:, None],
            make(lengths),
            make(lengths, seed=1),
            share=False,
        )


@pytest.mark.parametrize(
    ("left", "right", "said"),
    [
        ([3, 0, 5], [0, 3, 5], ["sample 0", "3", "0"]),
        ([3, 0, 5], [3, 1, 5], ["sample 1", "0", "1"]),
        ([2, 2, 2], [2, 2, 3], ["sample 2", "2", "3"]),
        ([6, 6], [4, 4, 4], ["2", "3"]),
        ([0, 3], [0, 7], ["sample 1", "3", "7"]),
    ],
    ids=["case_2", "second", "last", "case_3", "with_empty"],
)
@pytest.mark.parametrize("op", [operator.add, torch.maximum, lambda a, b: torch.where(a > 0, a, b)])
def test_structures_that_differ_raise_and_say_where(
    left: list[int], right: list[int], said: list[str], op: Callable
) -> None:
    a, b = (PackedTensor.from_list(list(make(lengths).samples), "n 4") for lengths in (left, right))
    for pair in ((a, b), (b, a)):
        with pytest.raises(STRUCTURE_ERROR) as error:
            op(*pair)
        for words in said:
            assert words in str(error.value)


def test_pairs_without_cells_still_differ() -> None:
    """Case 3: sizes (0, 3) and (0, 7) hold no cell, and are not the same structure."""
    a, b = (PackedTensor.from_list([torch.zeros(0, m, 4)], "n m 4") for m in (3, 7))
    assert a.values.shape == b.values.shape
    with pytest.raises(STRUCTURE_ERROR) as error:
        a + b
    for words in ("sample 0", "3", "7"):
        assert words in str(error.value)
    with pytest.raises(STRUCTURE_ERROR):
        PackedTensor.from_list([torch.zeros(0, 3)], "n 3") + PackedTensor.from_list(
            [torch.zeros(0, 7)], "n 7"
        )


def test_pairs_with_as_many_cells_still_differ() -> None:
    a, b = (PackedTensor.from_list([torch.zeros(n, 6 // n, 4)], "n m 4") for n in (2, 3))
    with pytest.raises(STRUCTURE_ERROR, match="sample 0"):
        a + b


def test_one_axis_against_a_static_dim_raises() -> None:
    a = PackedTensor.from_list([torch.zeros(4, 4)] * 2, "n 4")
    b = PackedTensor.from_list([torch.zeros(4, 4)] * 2, "4 n")
    with pytest.raises(STRUCTURE_ERROR):
        a + b

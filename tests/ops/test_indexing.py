from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ops import is_packed
from ops.testing import Ragged, assert_matches, check, pack
from tests.strategies import NONEMPTY, PROFILES, batches, make

LENGTHS = pytest.mark.parametrize("lengths", list(PROFILES.values()), ids=list(PROFILES))
NONEMPTY_LENGTHS = pytest.mark.parametrize("lengths", list(NONEMPTY.values()), ids=list(NONEMPTY))
PAIR = {"n": [3, 0, 5], "m": [4, 2, 1]}


# ---------------------------------------------------------------- samples


@pytest.mark.parametrize("pattern", ["n", "n 4", "4 n", "n m 4", "n 4 m"])
def test_an_integer_gives_a_dense_sample(pattern: str) -> None:
    batch = make([3, 0, 5], pattern)
    x = pack(batch)[0].requires_grad_()
    for i in (0, 1, 2, -1, -3, np.int64(2), torch.tensor(1)):
        assert type(x[i]) is Tensor
        assert torch.equal(x[i], batch.samples[int(i)])
    x[2].sum().backward()
    assert_matches(x.grad, [torch.zeros_like(s) + (i == 2) for i, s in enumerate(batch.samples)])


@pytest.mark.parametrize("i", [3, -4])
def test_a_sample_that_is_not_there_raises(i: int) -> None:
    (x,) = pack(make([3, 0, 5]))
    with pytest.raises(IndexError):
        x[i]


SELECTIONS: dict[str, Any] = {
    "list": [2, 0],
    "list_with_repeats": [1, 1, 2],
    "negative": [-1, 0],
    "nothing": [],
    "tensor": torch.tensor([2, 1]),
    "numpy": np.array([0, 2]),
    "bool_list": [True, False, True],
    "bool_tensor": torch.tensor([False, True, True]),
    "slice": slice(1, 3),
    "slice_from_end": slice(-2, None),
    "stride": slice(None, None, 2),
    "empty_slice": slice(2, 2),
    "all": slice(None),
    "ellipsis": ...,
}


def chosen(index: Any) -> list[int]:
    if index is ...:
        return [0, 1, 2]
    return np.arange(3)[
        np.asarray(index, dtype=int if index == [] else None) if isinstance(index, list) else index
    ].tolist()


@pytest.mark.parametrize("index", list(SELECTIONS.values()), ids=list(SELECTIONS))
@pytest.mark.parametrize("pattern", ["n 4", "n m 4", "4 n"])
def test_a_selection_of_samples_is_a_batch(index: Any, pattern: str) -> None:
    """Case 5, first part: x[[2, 0]] reorders."""
    batch = make([3, 0, 5], pattern)
    x = pack(batch)[0].requires_grad_()
    picked = chosen(index)
    y = x[index]
    assert is_packed(y)
    assert_matches(y, [batch.samples[i] for i in picked])
    (y * y).sum().backward()
    counts = [picked.count(i) for i in range(3)]
    assert_matches(x.grad, [2 * c * s for c, s in zip(counts, batch.samples)])


def test_samples_that_are_not_there_raise() -> None:
    (x,) = pack(make([3, 0, 5]))
    for index in ([0, 3], torch.tensor([-4]), [True, False]):
        with pytest.raises(IndexError):
            x[index]


def test_two_fields_keep_one_axis_through_a_selection() -> None:
    x, y = pack(make([3, 0, 5]), make([3, 0, 5], seed=1))
    assert_matches(x[1:] + y[1:], [s + t for s, t in zip(list(x)[1:], list(y)[1:])])
    assert_matches(x[[2, 0]] + y[torch.tensor([2, 0])], [x[2] + y[2], x[0] + y[0]])


def test_samples_and_positions_at_once() -> None:
    batch = make([3, 1, 5])
    (x,) = pack(batch)
    assert_matches(x[1:, :2], [s[:2] for s in batch.samples[1:]])
    assert_matches(x[1:, :, 0], [s[:, 0] for s in batch.samples[1:]])
    assert torch.equal(x[0, 1:3], batch.samples[0][1:3])
    assert torch.equal(x[2, -1], batch.samples[2][-1])
    assert torch.equal(x[2, 4, 3], batch.samples[2][4, 3])
    assert torch.equal(x[0, ..., 1], batch.samples[0][..., 1])
    with pytest.raises(IndexError):
        x[0, 3]


# ---------------------------------------------------------------- along the axis


SLICES: dict[str, Callable] = {
    "first": lambda x: x[:, :3],
    "from_second": lambda x: x[:, 1:],
    "to_last": lambda x: x[:, :-1],
    "inner": lambda x: x[:, 1:-1],
    "every_other": lambda x: x[:, ::2],
    "every_other_from_second": lambda x: x[:, 1::2],
    "every_third_inner": lambda x: x[:, 1:-1:3],
    "last_two": lambda x: x[:, -2:],
    "from_end": lambda x: x[:, -3:-1],
    "capped_stride": lambda x: x[:, :4:2],
    "beyond": lambda x: x[:, 7:],
    "all_but_many": lambda x: x[:, :-9],
    "nothing": lambda x: x[:, :0],
    "whole": lambda x: x[:, :],
    "far": lambda x: x[:, :100],
    "with_static": lambda x: x[:, 1:, 2:],
    "with_static_index": lambda x: x[:, :2, -1],
    "static": lambda x: x[..., 1:3],
    "static_index": lambda x: x[..., -1],
    "static_stride": lambda x: x[:, :, ::2],
    "static_list": lambda x: x[..., [2, 0]],
    "static_tensor": lambda x: x[..., torch.tensor([3, 3, 1])],
    "new_dim": lambda x: x[:, :, None],
    "new_dim_first": lambda x: x[:, None],
    "new_dim_last": lambda x: x[..., None],
    "new_dims": lambda x: x[:, None, 1:, None, :2, None],
    "ellipsis_only": lambda x: x[...],
    "slice_of_slice": lambda x: x[:, 1:][:, :-1],
    "stride_of_slice": lambda x: x[:, 1:][:, ::2],
    "slice_of_stride": lambda x: x[:, ::2][:, 1:],
    "cap_of_slice": lambda x: x[:, 1:][:, :2],
    "shift_difference": lambda x: x[:, 1:] - x[:, :-1],
    "shift_pair": lambda x: x[:, 1:, None] * x[:, None, :-1],
    "next_to_second": lambda x: x[:, 2:] + x[:, 1:-1] + x[:, :-2],
}


@LENGTHS
@pytest.mark.parametrize("name", list(SLICES))
def test_slices_are_taken_per_sample(name: str, lengths: list[int]) -> None:
    check(SLICES[name], make(lengths))


def test_the_first_three_of_four_five_and_two() -> None:
    """Case 5: x[:, :3] for lengths [4, 5, 2] gives [3, 3, 2]."""
    (x,) = pack(make([4, 5, 2]))
    assert x[:, :3].axes[0].lengths.tolist() == [3, 3, 2]


PAIR_SLICES: dict[str, Callable] = {
    "rows": lambda p: p[:, 1:],
    "columns": lambda p: p[:, :, :-1],
    "both": lambda p: p[:, :2, 1:],
    "strides": lambda p: p[:, ::2, 1::2],
    "columns_and_static": lambda p: p[:, :, 1:, ::3],
    "new_between": lambda p: p[:, :, None, 1:],
    "last_static": lambda p: p[..., -1],
    "ellipsis_then_columns": lambda p: p[..., 1:, :],
}


@pytest.mark.parametrize("fn", list(PAIR_SLICES.values()), ids=list(PAIR_SLICES))
def test_slices_of_pairs(fn: Callable) -> None:
    check(fn, make(PAIR, "n m 4"))
    check(fn, make([3, 0, 5], "n n 4"))
    check(lambda p: fn(p.transpose(1, 2)), make(PAIR, "n m 4"))


def test_slices_of_other_layouts() -> None:
    check(lambda x: x[..., 1:], make([3, 0, 5], "4 n"))
    check(lambda x: x[:, 1:3, ::2], make([3, 0, 5], "4 n"))
    check(lambda x: x.transpose(0, 1)[1:], make([3, 0, 5]), batch_dim=1)
    check(lambda x: x.transpose(0, 1)[:-1, :, 2:], make([3, 0, 5]), batch_dim=1)
    check(lambda x: x.permute(2, 1, 0)[0], make([3, 0, 5]), batch_dim=1)


def slices() -> st.SearchStrategy[slice]:
    """All but those that start from the end and stop from the front: see the test of odd slices."""
    bound, step = st.none() | st.integers(-5, 5), st.none() | st.integers(1, 3)
    return st.builds(slice, bound, bound, step).filter(lambda s: not is_odd(s))


def is_odd(s: slice) -> bool:
    return s.start is not None and s.start < 0 and s.stop is not None and s.stop >= 0


@given(batches(), st.data())
def test_any_mix_of_slices_integers_and_new_dims(batch: Ragged, data: st.DataObject) -> None:
    index: list[Any] = [slice(None)]
    ragged_left = False
    for token in batch.pattern.split():
        if data.draw(st.booleans()):
            index.append(None)
        static = token.isdigit()
        take = slices() | st.integers(-int(token), int(token) - 1) if static else slices()
        index.append(data.draw(take))
        ragged_left = ragged_left or not static
    assert ragged_left
    check(lambda x: x[tuple(index)], batch)


@pytest.mark.parametrize("start", [-4, -2, -1])
@pytest.mark.parametrize("stop", [0, 1, 3])
def test_odd_slices_are_right_or_refused(start: int, stop: int) -> None:
    """From the end to the front: no length function in normal form says how long the result is."""
    (x,) = pack(make([3, 0, 5]))
    try:
        x[:, start:stop]
    except NotImplementedError:
        return
    check(lambda x: x[:, start:stop], make([3, 0, 5]))


@given(batches(least=2), st.data())
def test_integers_in_a_mix_of_indices(batch: Ragged, data: st.DataObject) -> None:
    index: list[Any] = [slice(None)]
    for _ in batch.pattern.split():
        index.append(
            data.draw(st.integers(-2, 1) | st.just(slice(None)) | st.just(slice(1, None)) | st.none())
        )
    if None in index:
        index = index[: index.index(None)]
    check(lambda x: x[tuple(index)], batch)


ODD: dict[str, Callable] = {
    "matrix_of_features": lambda x: x[..., torch.tensor([[0, 1], [2, 3]])],
    "mask_of_features": lambda x: x[..., torch.tensor([True, False, True, True])],
    "list_of_one_feature": lambda x: x[..., [2]],
    "true_feature": lambda x: x[..., True],
    "true_position": lambda x: x[:, True],
    "features_and_slice": lambda x: x[:, 1:, [3, 0]],
    "features_and_new_dim": lambda x: x[:, None, :, [3, 0]],
    "two_lists": lambda x: x[:, :, None][..., [0], [1, 2]],
    "float_index": lambda x: x[:, 1.0],
    "numpy_slice": lambda x: x[:, np.int64(1) : np.int64(3)],
    "string": lambda x: x["a"],
}


@pytest.mark.parametrize("fn", list(ODD.values()), ids=list(ODD))
def test_odd_indices_are_right_or_refused(fn: Callable) -> None:
    batch = make([3, 5])
    try:
        fn(pack(batch)[0])
    except (NotImplementedError, TypeError, ValueError, IndexError):
        return
    check(fn, batch)


def test_a_scalar_bool_is_no_sample_number() -> None:
    (x,) = pack(make([3, 5]))
    for index in (True, False, torch.tensor(True)):
        with pytest.raises((NotImplementedError, TypeError, IndexError, ValueError)):
            x[index]


# ---------------------------------------------------------------- one position


@NONEMPTY_LENGTHS
def test_one_position_of_every_sample_is_dense(lengths: list[int]) -> None:
    for fn in (lambda x: x[:, 0], lambda x: x[:, -1], lambda x: x[:, 0, 1:], lambda x: x[:, -1, None]):
        result = check(fn, make(lengths))
        assert type(result) is Tensor
    check(lambda x: x[..., -1], make(lengths, "4 n"))
    check(lambda x: x[:, 0], make(lengths, "n"))


def test_one_row_or_column_of_pairs() -> None:
    pair = make({"n": [3, 1, 5], "m": [4, 2, 1]}, "n m 4")
    check(lambda p: p[:, 0], pair)
    check(lambda p: p[:, -1], pair)
    check(lambda p: p[:, :, 0], pair)
    check(lambda p: p[:, :, -1], pair)
    check(lambda p: p[:, 1:, -1], pair)
    check(lambda p: p[:, 0, -1], pair)
    check(lambda p: p[:, 0, 1:], pair)


def test_a_row_may_be_empty_where_it_exists() -> None:
    check(lambda p: p[:, 0], make({"n": [2, 1], "m": [0, 3]}, "n m 4"))


@pytest.mark.parametrize("i", [-1, 0])
def test_a_position_of_an_empty_sample_raises_and_names_it(i: int) -> None:
    """Case 5: x[:, -1] with an empty sample."""
    (x,) = pack(make([3, 0, 5]))
    with pytest.raises(IndexError, match="sample 1"):
        x[:, i]


@pytest.mark.parametrize("i", [2, -3])
def test_a_position_beyond_a_sample_raises_and_names_it(i: int) -> None:
    (x,) = pack(make([3, 5, 2, 1]))
    with pytest.raises(IndexError, match="sample 2" if i == 2 or i == -3 else ""):
        x[:, i]


def test_too_many_indices_raise() -> None:
    (x,) = pack(make([3, 5]))
    for index in ((0, 0, 0, 0), (..., 0, ...)):
        with pytest.raises(IndexError):
            x[index]


def test_a_static_index_out_of_range_raises() -> None:
    (x,) = pack(make([3, 5]))
    with pytest.raises(IndexError):
        x[..., 4]


# ---------------------------------------------------------------- what must not be silently wrong


OTHERS: dict[str, Callable] = {
    "packed_mask": lambda x: x[x > 0],
    "positions_by_list": lambda x: x[:, [0, 1]],
    "positions_by_tensor": lambda x: x[:, torch.tensor([1, 0])],
    "grid_of_indices": lambda x: x[[0, 1], [0, 1]],
    "negative_step": lambda x: x[:, ::-1],
    "dense_mask": lambda x: x[torch.ones(2, 5, dtype=torch.bool)],
}


@pytest.mark.parametrize("fn", list(OTHERS.values()), ids=list(OTHERS))
def test_unusual_indices_are_right_or_refused(fn: Callable) -> None:
    batch = make([3, 5])
    try:
        result = fn(pack(batch)[0])
    except (NotImplementedError, TypeError, ValueError, IndexError):
        return
    if isinstance(result, Tensor):
        torch.testing.assert_close(result, fn(pack(batch)[0].to_padded()))
    elif result.dim() == 1:
        assert torch.equal(result.values, torch.cat([fn(s[None]) for s in batch.samples]))
    else:
        assert_matches(result, [fn(s[None])[0] for s in batch.samples])


def test_assignment_is_right_or_refused() -> None:
    batch = make([3, 5])
    (x,) = pack(batch)
    before = x.values.clone()
    try:
        x[:, 0] = 0.0
    except (NotImplementedError, TypeError, ValueError):
        assert torch.equal(x.values, before)
        return
    assert_matches(x, [torch.cat([torch.zeros_like(s[:1]), s[1:]]) for s in batch.samples])


def test_the_samples_of_a_slice_do_not_read_their_neighbours() -> None:
    """Case 9, last part: a next-token shift never crosses a sample's end."""
    ids = Ragged([torch.arange(10, 17), torch.arange(20, 22), torch.arange(30, 31)], "n")
    (x,) = pack(ids)
    inputs, targets = x[:, :-1], x[:, 1:]
    assert inputs.axes[0] is targets.axes[0]
    assert_matches(
        targets - inputs,
        [
            torch.ones(6, dtype=torch.int64),
            torch.ones(1, dtype=torch.int64),
            torch.zeros(0, dtype=torch.int64),
        ],
    )


# ---------------------------------------------------------------- masks


@pytest.mark.parametrize("pattern", ["n", "n 4", "n m 4", "n 3 4", "n n"])
def test_a_packed_mask_chooses_valid_rows(pattern: str) -> None:
    names = " ".join(token for token in pattern.split() if not token.isdigit())
    x, m = make([3, 0, 5], pattern), make([3, 0, 5], names, dtype=torch.bool)
    wanted = [s[c] for s, c in zip(x.samples, m.samples)]
    (a,), (b,) = pack(x), pack(m)
    rows = a.requires_grad_()[b]
    assert rows.dim() == a.dim() - b.dim() + 1
    assert torch.equal(rows.values, torch.cat(wanted))
    assert_matches(rows.unflatten(0, (3, -1)), wanted)
    (rows * 3).sum().backward()
    assert_matches(
        a.grad, [torch.zeros_like(s).masked_fill(_over(c, s), 3) for s, c in zip(x.samples, m.samples)]
    )


def _over(mask: Tensor, sample: Tensor) -> Tensor:
    return mask.view(*mask.shape, *[1] * (sample.dim() - mask.dim()))


def test_masks_of_every_entry() -> None:
    (x,) = pack(make([3, 0, 5]))
    wanted = [s[s > 0] for s in x.to_list()]
    for rows in (x[x > 0], torch.masked_select(x, x > 0)):
        assert rows.dim() == 1
        assert_matches(rows.unflatten(0, (3, -1)), wanted)
    assert_matches(x[x > 9].unflatten(0, (3, -1)), [torch.zeros(0, dtype=torch.float64)] * 3)


def test_two_tensors_under_one_mask_meet_again() -> None:
    x, y = pack(make([3, 0, 5]), make([3, 0, 5], seed=1))
    mask = (x > 0).any(2)
    assert_matches(
        (x[mask] + y[mask]).unflatten(0, (3, -1)),
        [(s + t)[m] for s, t, m in zip(x.to_list(), y.to_list(), mask.to_list())],
    )
    with pytest.raises(ValueError, match="structures differ"):
        x[mask] + y[~mask]


def test_nonzero_counts_in_the_padded_shape() -> None:
    (x,) = pack(make([3, 0, 5], dtype=torch.int64))
    assert torch.equal(x.nonzero(), x.to_padded().nonzero())
    assert torch.equal(torch.argwhere(x), x.to_padded().nonzero())


# ---------------------------------------------------------------- a dense tensor by packed integers


@pytest.mark.parametrize("lengths", [*PROFILES.values(), [1] * 40], ids=[*PROFILES, "many_samples"])
def test_a_table_is_looked_up_at_every_position(lengths: list[int]) -> None:
    table = torch.randn(6, 4, dtype=torch.float64)
    ids, pairs = make(lengths, "n", dtype=torch.int64), make(lengths, "n n", dtype=torch.int64)
    check(lambda table, ids: table[ids], table, ids)
    check(lambda table, pairs: table[pairs], table, pairs)
    check(
        lambda table, i, j: table[i, j],
        table.repeat(1, 2)[:, :6],
        ids,
        make(lengths, "n", dtype=torch.int64, seed=1),
    )
    check(lambda table, pairs: table[:, pairs].movedim(0, -1), table.mT, pairs)


def _assign(x: Any, key: Any, value: Any) -> None:
    x[key] = value


MISTAKES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a_mask_of_other_lengths": (
        lambda x: x[pack(make([3, 1, 5], "n"))[0] > 0],
        "structures differ: sample 1",
    ),
    "a_mask_of_features": (
        lambda x: x[x.transpose(1, 2) > 0],
        "needs the batch and every ragged dim in front",
    ),
    "packed_integers": (lambda x: x[x.long()], "take_along_dim"),
    "gather_beyond": (lambda x: x.gather(1, x.argsort(1) + 1), "gather along 'n': position 3 in sample 0"),
    "gather_of_other_rank": (lambda x: x.gather(1, x.argsort(1)[..., 0]), "gather: an index of 2 dims"),
    "gather_over_the_batch": (lambda x: x.gather(0, x.long() * 0), "gather needs a static dim; dim 0"),
    "a_position_too_far": (lambda x: x[:, [0, 2]], "position 2 in sample 1, which has 2 positions"),
    "a_source_of_other_lengths": (
        lambda x: x.scatter(1, x.argsort(1), pack(make([3, 1, 5]))[0]),
        "structures differ: sample 1 has 1 and 2|structures differ: sample 1 has 2 and 1",
    ),
    "dense_by_a_mask": (lambda x: torch.zeros(9, 4)[x > 0], "packed integers"),
    "into_dense": (lambda x: _assign(torch.zeros(9, 4), x.long(), 1.0), "neither packed keys nor packed"),
    "assignment_of_other_lengths": (
        lambda x: x.__setitem__((slice(None), slice(1, None)), x),
        "structures differ: sample 0",
    ),
    "take_along_no_dim": (lambda x: torch.take_along_dim(x, x.argsort(1)), "needs dim="),
}


@pytest.mark.parametrize(("fn", "message"), list(MISTAKES.values()), ids=list(MISTAKES))
def test_mistakes_are_named(fn: Callable, message: str) -> None:
    (x,) = pack(make([3, 2, 5]))
    with pytest.raises((NotImplementedError, TypeError, ValueError, IndexError, RuntimeError), match=message):
        fn(x)

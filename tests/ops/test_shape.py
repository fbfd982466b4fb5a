from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from ops import PackedTensor, is_packed
from ops.testing import Ragged, assert_matches, check, pack
from tests.strategies import PROFILES, batches, laid_out, make

LENGTHS = pytest.mark.parametrize("lengths", list(PROFILES.values()), ids=list(PROFILES))
ERRORS = (ValueError, RuntimeError, TypeError, NotImplementedError)


# ---------------------------------------------------------------- orders of dims


@given(laid_out())
def test_permute(case: tuple[Ragged, tuple[int, ...]]) -> None:
    batch, order = case
    check(lambda x: x.permute(order), batch, batch_dim=order.index(0))
    check(lambda x: x.permute(*(d - len(order) for d in order)), batch, batch_dim=order.index(0))
    check(lambda x: torch.permute(x, order), batch, batch_dim=order.index(0))


@given(laid_out())
def test_permuting_is_free(case: tuple[Ragged, tuple[int, ...]]) -> None:
    batch, order = case
    (x,) = pack(batch)
    y = x.permute(order)
    assert y.values.data_ptr() == x.values.data_ptr()
    assert y.grid is x.grid
    back = y.permute(*(order.index(d) for d in range(len(order))))
    assert_matches(back, batch.samples)


@given(batches(), st.data())
def test_two_dims_change_places(batch: Ragged, data: st.DataObject) -> None:
    rank = len(batch.pattern.split()) + 1
    a, b = (data.draw(st.integers(-rank, rank - 1)) for _ in range(2))
    swap = {a % rank: b % rank, b % rank: a % rank}
    where = swap.get(0, 0)
    for fn in (torch.transpose, torch.swapaxes, torch.swapdims):
        check(lambda x, fn=fn: fn(x, a, b), batch, batch_dim=where)
    check(lambda x: x.transpose(a, b), batch, batch_dim=where)


@given(batches(), st.data())
def test_movedim(batch: Ragged, data: st.DataObject) -> None:
    rank = len(batch.pattern.split()) + 1
    source = data.draw(st.permutations(range(rank)))[: data.draw(st.integers(1, rank))]
    target = data.draw(st.permutations(range(rank)))[: len(source)]
    where = torch.zeros(tuple(range(rank))).movedim(source, target).shape.index(0) if rank else 0
    check(lambda x: x.movedim(source, target), batch, batch_dim=where)
    check(
        lambda x: torch.moveaxis(x, source[0], target[0]),
        batch,
        batch_dim=after_move(rank, source[0], target[0]),
    )


def after_move(rank: int, source: int, target: int) -> int:
    order = [d for d in range(rank) if d != source]
    order.insert(target, source)
    return order.index(0)


@pytest.mark.parametrize("pattern", ["n 4", "n n", "n m 4", "4 n m", "n 3 4"])
def test_matrix_transpose(pattern: str) -> None:
    check(lambda x: x.mT, make([3, 0, 5], pattern))


@LENGTHS
def test_contiguous_and_clone_of_a_permuted_tensor(lengths: list[int]) -> None:
    check(lambda x: x.transpose(1, 2).contiguous(), make(lengths, "n n 4"))
    check(lambda x: x.transpose(1, 2).clone(), make(lengths))


# ---------------------------------------------------------------- dims of size 1


@given(laid_out(), st.data())
def test_unsqueeze_and_squeeze(case: tuple[Ragged, tuple[int, ...]], data: st.DataObject) -> None:
    batch, order = case
    rank = len(order)
    dim = data.draw(st.integers(-rank - 1, rank))
    where = order.index(0) + ((dim % (rank + 1)) <= order.index(0))
    check(lambda x: x.permute(order).unsqueeze(dim), batch, batch_dim=where)
    check(lambda x: x.permute(order).unsqueeze(dim).squeeze(dim), batch, batch_dim=order.index(0))


def test_squeeze_takes_static_ones_only() -> None:
    check(lambda x: x.squeeze(-1), make([3, 0, 5], "n 1"))
    check(lambda x: x.squeeze((1, 3)), make([3, 0, 5], "1 n 1"))
    check(lambda x: x.squeeze(2), make([3, 0, 5], "n 4"))


@pytest.mark.parametrize("lengths", [[1], [1, 1], [3, 5]])
def test_squeeze_never_takes_the_batch_or_an_axis(lengths: list[int]) -> None:
    """A dim's kind does not depend on the lengths of one batch."""
    (x,) = pack(make(lengths, "n 1 4"))
    assert_matches(x.squeeze(), [s.squeeze(1) for s in make(lengths, "n 1 4").samples])
    assert x.squeeze(0).shape == x.shape
    assert x.squeeze(1).shape == x.shape


# ---------------------------------------------------------------- reshape


RESHAPES: dict[str, Callable] = {
    "heads_by_view": lambda x: x.view(x.shape[0], x.shape[1], 2, 2),
    "heads_by_reshape": lambda x: x.reshape(x.shape[0], x.shape[1], 2, 2),
    "heads_as_tuple": lambda x: x.view((*x.shape[:2], 2, 2)),
    "heads_as_size": lambda x: x.reshape(x.shape[:2] + (2, 2)),
    "heads_by_size": lambda x: x.view(x.size(0), x.size(1), 2, 2),
    "heads_by_torch": lambda x: torch.reshape(x, (*x.shape[:-1], 2, 2)),
    "heads_by_unflatten": lambda x: x.unflatten(-1, (2, 2)),
    "heads_by_unflatten_with_rest": lambda x: x.unflatten(2, (-1, 2)),
    "heads_and_back": lambda x: x.view(*x.shape[:2], 2, 2).transpose(2, 3).flatten(2),
    "heads_first": lambda x: x.view(*x.shape[:2], 2, 2).transpose(1, 2),
    "merged": lambda x: x.view(*x.shape[:2], 2, 2).transpose(1, 2).transpose(1, 2).reshape(*x.shape),
    "same_shape": lambda x: x.view(x.shape),
    "view_as": lambda x: x.view_as(x),
    "reshape_as": lambda x: x.view(*x.shape[:2], 2, 2).reshape_as(x),
    "with_one": lambda x: x.view(x.shape[0], 1, x.shape[1], 4),
    "flatten_statics": lambda x: x.view(*x.shape[:2], 2, 2).flatten(2, 3),
    "flatten_nothing": lambda x: x.flatten(2),
    "flatten_one_dim": lambda x: x.flatten(1, 1),
}


#: Dense tensors without elements have no answer to these, so empty samples are compared by hand.
INFERRED: dict[str, Callable] = {
    "heads": lambda x: x.view(x.shape[0], x.shape[1], -1, 2),
    "head_dim": lambda x: x.reshape(x.size(0), x.size(1), 2, -1),
    "features": lambda x: x.view(x.shape[0], x.shape[1], -1),
    "positions": lambda x: x.view(x.shape[0], -1, 4),
}


@pytest.mark.parametrize("fn", list(RESHAPES.values()), ids=list(RESHAPES))
@pytest.mark.parametrize("lengths", [[3, 0, 5], [4, 4], [2], [1], [3, 3, 1]], ids=str)
def test_reshape_with_entries_of_the_shape(fn: Callable, lengths: list[int]) -> None:
    check(fn, make(lengths))


@pytest.mark.parametrize("fn", list(INFERRED.values()), ids=list(INFERRED))
def test_a_size_of_minus_one_is_inferred(fn: Callable) -> None:
    for lengths in ([3, 2, 5], [4, 4], [2], [1]):
        check(fn, make(lengths))
    batch = make([3, 0, 5])
    (x,) = pack(batch)
    assert_matches(fn(x), [s.view(s.shape[0], *fn(x).shape[2:]) for s in batch.samples])


def test_reshape_of_other_layouts() -> None:
    check(lambda x: x.view(x.shape[0], 2, 2, x.shape[2]), make([3, 0, 5], "4 n"))
    check(lambda x: x.flatten(1, 2), make([3, 0, 5], "3 4 n"))
    check(lambda x: x.flatten(2, 3).flatten(2), make([3, 0, 5], "n 2 3 4"))
    check(lambda p: p.view(*p.shape[:3], 2, 2).permute(0, 3, 1, 2, 4), make([3, 0, 5], "n m 4"))
    check(lambda p: p.unflatten(3, (2, 2)), make([3, 0, 5], "n n 4"))
    check(lambda x: x.transpose(2, 3).flatten(2), make([3, 0, 5], "n 3 4"))
    check(lambda x: x.transpose(2, 3).reshape(*x.shape[:2], 12), make([3, 0, 5], "n 3 4"))


@given(laid_out(patterns=("n 2 3", "2 n 3", "n 4 m", "n m 4")), st.data())
def test_reshape_to_the_same_shape_in_any_order(
    case: tuple[Ragged, tuple[int, ...]], data: st.DataObject
) -> None:
    batch, order = case
    check(lambda x: x.permute(order).reshape(x.permute(order).shape), batch, batch_dim=order.index(0))


@pytest.mark.parametrize("lengths", [[3, 5], [5, 5], [5]], ids=str)
def test_a_plain_int_is_a_fixed_size_even_if_it_equals_the_maximum(lengths: list[int]) -> None:
    (x,) = pack(make(lengths))
    for call in (
        lambda: x.view(x.shape[0], 5, 4),
        lambda: x.reshape(len(lengths), 5, 2, 2),
        lambda: x.view(x.shape[0], int(x.shape[1]), 2, 2),
    ):
        with pytest.raises(ERRORS):
            call()


def test_reshapes_that_do_not_fit_raise() -> None:
    (x,) = pack(make([3, 5]))
    for call in (
        lambda: x.view(x.shape[0], x.shape[1], 3),
        lambda: x.view(x.shape[0], x.shape[1], -1, -1),
        lambda: x.view(x.shape[0] + 1, x.shape[1], 4),
        lambda: x.view(3, 7),
        lambda: x.flatten(1, 2),
        lambda: x.unflatten(2, (3, 2)),
    ):
        with pytest.raises(ERRORS):
            call()


def test_an_axis_of_another_batch_is_refused() -> None:
    x, y = pack(make([3, 5]))[0], pack(make([5, 3]))[0]
    with pytest.raises(ERRORS):
        x.view(x.shape[0], y.shape[1], 2, 2)


# ---------------------------------------------------------------- rows


@LENGTHS
def test_flatten_gives_the_valid_rows_and_view_brings_the_batch_back(lengths: list[int]) -> None:
    batch = make(lengths)
    (x,) = pack(batch)
    for rows in (x.flatten(0, 1), x.view(-1, 4), x.reshape(-1, x.shape[-1])):
        assert is_packed(rows)
        assert rows.shape == (sum(lengths), 4)
        assert len(rows) == sum(lengths)
        assert rows.dim() == 2
        assert torch.equal(rows.values, torch.cat(list(batch.samples)))
        for back in (
            rows.view(*x.shape),
            rows.view(x.shape[0], x.shape[1], 4),
            rows.unflatten(0, x.shape[:2]),
        ):
            assert_matches(back, batch.samples)
            assert back.axes[0] is x.axes[0]


@LENGTHS
def test_programs_on_rows_match_per_sample(lengths: list[int]) -> None:
    w = torch.randn(6, 4, dtype=torch.float64)
    check(lambda x, w: F.linear(x.flatten(0, 1), w).view(*x.shape[:2], 6), make(lengths), w)
    check(lambda x: (x.flatten(0, 1) * 2 + x.view(-1, 4)).unflatten(0, x.shape[:2]), make(lengths))
    check(lambda x: x.view(-1, 4).sum(-1).view(x.shape[0], x.shape[1]), make(lengths))
    check(lambda p: p.flatten(0, 2).relu().view(*p.shape), make(lengths, "n n 4"))
    check(lambda p: F.linear(p.view(-1, 4), w).view(*p.shape[:3], 6), make(lengths, "n m 4"))


@pytest.mark.parametrize("fn", [torch.sum, torch.mean, torch.amax])
def test_reducing_rows_is_over_valid_positions(fn: Callable) -> None:
    (x,) = pack(make([3, 0, 5]))
    for result in (fn(x.flatten(0, 1), 0), fn(x.view(-1, 4), (0,))):
        assert type(result) is torch.Tensor
        torch.testing.assert_close(result, fn(x.values, 0))


def test_flattening_everything_gives_all_entries() -> None:
    (x,) = pack(make([3, 0, 5]))
    for flat in (x.flatten(), x.view(-1), x.reshape(-1)):
        assert flat.shape == (32,)
        assert torch.equal(flat.values.flatten(), x.values.flatten())


def test_iterating_rows_gives_rows() -> None:
    (x,) = pack(make([2, 0, 1]))
    for row, want in zip(x.flatten(0, 1), x.values, strict=True):
        assert torch.equal(row, want)


@LENGTHS
def test_flattening_a_pair_makes_one_axis(lengths: list[int]) -> None:
    check(lambda p: p.flatten(1, 2), make(lengths, "n n 4"))
    check(lambda p: p.flatten(1, 2), make(lengths, "n m 4"))
    check(lambda p: p.flatten(2, 3), make(lengths, "4 n m"))
    check(lambda p: p.transpose(1, 2).flatten(1, 2), make(lengths, "n m 4"))


@LENGTHS
def test_a_flattened_pair_is_unflattened_by_its_shape(lengths: list[int]) -> None:
    check(lambda p: p.flatten(1, 2).view(*p.shape), make(lengths, "n m 4"))
    check(lambda p: p.flatten(1, 2).unflatten(1, p.shape[1:3]), make(lengths, "n m 4"))


def test_a_flattened_pair_has_one_axis_object() -> None:
    (p,) = pack(make([3, 0, 5], "n m 4"))
    first, second = p.flatten(1, 2), (p * 2).flatten(1, 2)
    assert first.axes[0] is second.axes[0]
    assert first.axes[0].lengths.tolist() == p.grid.lengths.tolist()


def test_rows_of_another_batch_do_not_fit() -> None:
    x, y = (PackedTensor.from_list(list(make(lengths).samples), "n _") for lengths in ([2, 4], [3, 3]))
    with pytest.raises(ERRORS):
        x.flatten(0, 1).view(*y.shape)


def test_rows_come_back_only_with_their_own_batch_size() -> None:
    (x,) = pack(make([3, 5]))
    rows = x.flatten(0, 1)
    for call in (
        lambda: rows.view(99, x.shape[1], 4),
        lambda: rows.view(x.shape[0], 5, 4),
        lambda: rows.view(x.shape[0], x.shape[1], 3),
        lambda: rows.unflatten(0, (3, x.shape[1])),
        lambda: rows.view(7, 4),
    ):
        with pytest.raises(ERRORS):
            call()


def test_expand_and_narrow_are_right_or_refused() -> None:
    check(lambda x: x[:, :, None].expand(-1, -1, 3, -1), make([3, 0, 5]))
    check(lambda x: x.unsqueeze(1).expand(x.shape[0], 6, x.shape[1], 4), make([3, 0, 5]))
    check(lambda x: x.narrow(2, 1, 2), make([3, 0, 5]))
    check(lambda x: x.narrow(1, 1, 2), make([3, 4, 5]))
    check(lambda x: x.select(1, 0), make([3, 4, 5]))
    check(lambda x: x.select(-1, -1), make([3, 4, 5]))
    (x,) = pack(make([3, 1, 5]))
    for call in (
        lambda: x.expand(7, 9, 4),
        lambda: x.expand(x.shape[0], 7, 4),
        lambda: x.expand(x.shape[0], 5, 4),
        lambda: x.expand(-1, -1, 8),
        lambda: x.narrow(1, 0, 2),
        lambda: x.narrow(1, 1, 1),
        lambda: x.narrow(2, 3, 2),
    ):
        with pytest.raises((*ERRORS, IndexError)):
            call()


def test_the_plain_transpose_and_the_conjugate_one() -> None:
    check(lambda x: x.t(), make([3, 0, 5], "n"), batch_dim=1)
    check(lambda x: torch.complex(x, x * x).adjoint().imag, make([3, 0, 5], "n m"))
    check(lambda x: torch.broadcast_to(x[..., None], (-1, -1, -1, 3)), make([3, 0, 5]))


# ---------------------------------------------------------------- mistakes


MISTAKES: dict[str, tuple[Callable, str]] = {
    "not_a_permutation": (
        lambda x: x.permute(0, 1, 1),
        r"permute: \(0, 1, 1\) is not a permutation of 3 dims",
    ),
    "too_few_dims": (lambda x: x.permute(1, 0), "is not a permutation of 3 dims"),
    "a_dim_too_many": (lambda x: x.transpose(1, 3), "dim 3 is out of range"),
    "a_place_too_far": (lambda x: x.unsqueeze(5), "unsqueeze: dim 5 is out of range for .* 3 dims"),
    "flattened_backwards": (lambda x: x.flatten(2, 1), "flatten: start_dim 2 comes after end_dim 1"),
    "an_axis_with_features": (lambda x: x.flatten(1, 2), "ragged|axis|static"),
    "narrow_of_a_short_sample": (
        lambda x: x.narrow(1, 0, 3),
        "narrow: sample 1 has 1 positions, 3 are needed",
    ),
    "narrow_beyond_features": (lambda x: x.narrow(2, 3, 2), "narrow: positions 3 to 5 of a dim of size 4"),
    "expand_of_an_axis": (lambda x: x.expand(3, 5, 4), "ragged dim of size 5 cannot become 5; give -1"),
    "expand_of_the_batch": (lambda x: x.expand(7, -1, 4), "batch or ragged dim of size 3 cannot become 7"),
    "expand_to_more_dims": (lambda x: x.expand(2, 3, -1, 4), "expand: 4 sizes for a packed tensor of 3 dims"),
    "a_matrix_of_three_dims": (lambda x: x.t(), r"t\(\) takes a tensor of 2 dims; got 3.*transpose"),
    "other_features": (lambda x: x.view(*x.shape[:2], 3), "3"),
}


@pytest.mark.parametrize(("fn", "message"), list(MISTAKES.values()), ids=list(MISTAKES))
def test_mistakes_are_named(fn: Callable, message: str) -> None:
    with pytest.raises((*ERRORS, IndexError), match=message):
        fn(pack(make([3, 1, 5]))[0])

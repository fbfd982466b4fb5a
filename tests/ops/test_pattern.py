from __future__ import annotations

import pytest

from ops.pattern import check_sample, parse


def test_same_text_gives_same_object() -> None:
    assert parse("n _") is parse("n _")


@pytest.mark.parametrize(
    ("text", "ragged", "static", "names", "order"),
    [
        ("n", (0,), (), ("n",), (0, 1)),
        ("n _", (0,), (1,), ("n",), (0, 1, 2)),
        ("n n _", (0, 1), (2,), ("n", "n"), (0, 1, 2, 3)),
        ("n m 8", (0, 1), (2,), ("n", "m"), (0, 1, 2, 3)),
        ("_ h w", (1, 2), (0,), ("h", "w"), (0, 3, 1, 2)),
        ("n 4 m 2", (0, 2), (1, 3), ("n", "m"), (0, 1, 3, 2, 4)),
    ],
)
def test_dims_are_sorted_by_kind(
    text: str,
    ragged: tuple[int, ...],
    static: tuple[int, ...],
    names: tuple[str, ...],
    order: tuple[int, ...],
) -> None:
    pattern = parse(text)
    assert (pattern.ragged, pattern.static, pattern.names, pattern.order) == (ragged, static, names, order)
    assert pattern.rank == len(text.split())


def test_spaces_do_not_matter() -> None:
    assert str(parse("  n   _ ")) == "n _"


def test_a_size_and_a_free_dim_are_kept_apart() -> None:
    assert parse("n 8 _").tokens == ("n", 8, None)


@pytest.mark.parametrize("text", ["n-m", "n _ 3.5", "n -1", "n *"])
def test_an_odd_token_is_named_in_the_error(text: str) -> None:
    with pytest.raises(ValueError, match="neither an axis name"):
        parse(text)


def test_a_fixed_pattern_or_a_fixed_sample_passes() -> None:
    check_sample(parse("n n 4"), (3, 3, 4), "sample 0")
    check_sample(parse("n _"), (0, 7), "sample 0")


@pytest.mark.parametrize(
    ("text", "shape", "said"),
    [
        ("n _", (3,), "1 dims"),
        ("n 4", (3, 5), "4"),
        ("n n _", (3, 2, 4), "both 3 and 2"),
    ],
)
def test_a_sample_that_does_not_fit_is_named_with_its_shape(
    text: str, shape: tuple[int, ...], said: str
) -> None:
    with pytest.raises(ValueError) as error:
        check_sample(parse(text), shape, "sample 3, field 'x'")
    message = str(error.value)
    assert "sample 3, field 'x'" in message
    assert str(shape) in message
    assert said in message
    assert text in message

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ops import PackedTensor, dispatch
from ops.rules.variants import OVERWRITTEN, RESTRUCTURED
from ops.testing import check, pack
from tests.strategies import make

INPLACE: dict[str, Callable] = {
    "transpose_": lambda x: x.transpose_(1, 2),
    "swapaxes_": lambda x: x.swapaxes_(1, 2),
    "swapdims_": lambda x: x.swapdims_(1, -1),
    "unsqueeze_": lambda x: x.unsqueeze_(2),
    "squeeze_": lambda x: x.unsqueeze_(2).squeeze_(2),
    "t_": lambda x: x[..., 0].t_().t_(),
    "cumsum_": lambda x: x.cumsum_(1),
    "cumprod_": lambda x: x.cumprod_(2),
    "tril_": lambda x: x.tril_(-1),
    "triu_": lambda x: x.triu_(),
    "masked_scatter_": lambda x: x.masked_scatter_(x > 9, torch.zeros(1, dtype=x.dtype)),
}


@pytest.mark.parametrize("fn", list(INPLACE.values()), ids=list(INPLACE))
def test_forms_in_place_give_what_the_others_give(fn: Callable) -> None:
    check(lambda x: fn(x * 1), make([3, 0, 5]))


def test_every_form_in_place_is_tested() -> None:
    assert {f"{name}_" for name in f"{RESTRUCTURED} {OVERWRITTEN}".split()} == {*INPLACE, "detach_"}


def test_forms_in_place_change_their_operand_and_what_shares_its_memory() -> None:
    (x,) = pack(make([3, 0, 5]))
    other, before = x.transpose(1, 2), x.values.clone()
    assert x.triu_() is x and not torch.equal(x.values, before)
    assert other.values is x.values
    assert x.transpose_(1, 2) is x and x.order == other.order
    y = x.requires_grad_() * 2
    assert y.detach_() is y and not y.requires_grad


COPIES: dict[str, Callable] = {
    "alias_copy": torch.alias_copy,
    "diagonal_copy": lambda x: torch.diagonal_copy(x[..., None].expand(-1, -1, -1, 3), 0, 2, 3),
    "expand_copy": lambda x: torch.expand_copy(x[..., None], (-1, -1, -1, 3)),
    "narrow_copy": lambda x: torch.narrow_copy(x, 2, 1, 2),
    "permute_copy": lambda x: torch.permute_copy(x, (0, 2, 1)),
    "select_copy": lambda x: torch.select_copy(x, 2, 0),
    "slice_copy": lambda x: torch.slice_copy(x, 1, 1, -1),
    "split_copy": lambda x: torch.split_copy(x, 2, 2)[1],
    "split_with_sizes_copy": lambda x: torch.split_with_sizes_copy(x, (1, 3), 2)[1],
    "squeeze_copy": lambda x: torch.squeeze_copy(x, 2),
    "t_copy": lambda x: torch.t_copy(x[..., 0]).t(),
    "transpose_copy": lambda x: torch.transpose_copy(x, 1, 2),
    "unbind_copy": lambda x: torch.unbind_copy(x, 2)[1],
    "unfold_copy": lambda x: torch.unfold_copy(x, 2, 2, 1),
    "unsqueeze_copy": lambda x: torch.unsqueeze_copy(x, 1),
    "view_as_complex_copy": lambda x: torch.view_as_complex_copy(x.unflatten(2, (2, 2))).real,
    "view_as_real_copy": lambda x: torch.view_as_real_copy(torch.complex(x, x)),
    "view_copy": lambda x: torch.view_copy(x, x.shape),
}


def _has_gradient(fn: Callable) -> bool:
    """Whether this version of PyTorch has a gradient of ``fn`` on dense tensors."""
    try:
        fn(torch.randn(2, 3, 4, requires_grad=True)).sum().backward()
    except RuntimeError as error:
        assert "not implemented" in str(error) or "does not support automatic" in str(error)
        return False
    return True


@pytest.mark.parametrize("fn", list(COPIES.values()), ids=list(COPIES))
def test_copies_have_memory_of_their_own(fn: Callable) -> None:
    check(fn, make([3, 0, 5]), grad=_has_gradient(fn))
    (x,) = pack(make([3, 2, 5]))
    before = x.values.clone()
    out = fn(x)
    if isinstance(out, PackedTensor):
        out.values.zero_()
        assert torch.equal(x.values, before)


def test_every_copy_is_tested() -> None:
    rows = {name for name in dispatch.ROWS if name.endswith("_copy") and name != "index_copy"}
    assert rows == {*COPIES, "detach_copy"}
    (x,) = pack(make([3, 0, 5]))
    assert not torch.detach_copy(x.requires_grad_()).requires_grad


def test_a_dense_tensor_is_never_written() -> None:
    (mask,) = pack(make([3, 0, 5], dtype=torch.bool))
    with pytest.raises(RuntimeError, match="into a dense tensor"):
        torch.zeros(3, 5, 4).masked_scatter_(mask, torch.ones(60))

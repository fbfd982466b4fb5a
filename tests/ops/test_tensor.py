from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor
from torch.utils import _pytree as pytree

import ops
from ops import Axis, Grid, PackedTensor
from ops.pattern import parse
from ops.testing import Ragged, assert_matches, check, pack
from tests.strategies import PATTERNS, PROFILES, batches, make

LENGTHS = pytest.mark.parametrize("lengths", list(PROFILES.values()), ids=list(PROFILES))


def padded_of(samples: list[Tensor], fill: float = 0.0) -> Tensor:
    """By hand: samples in the corner of a dense batch."""
    envelope = [max(column) for column in zip(*(s.shape for s in samples))]
    out = torch.full((len(samples), *envelope), fill, dtype=samples[0].dtype)
    for i, s in enumerate(samples):
        out[(i, *map(slice, s.shape))] = s
    return out


def same(a: PackedTensor, b: PackedTensor) -> None:
    assert_matches(a, b.to_list())
    assert a.order == b.order


# ---------------------------------------------------------------- constructors and views back


@given(batches())
def test_from_list_follows_the_layout_rule_and_to_list_undoes_it(batch: Ragged) -> None:
    (by_rule,) = pack(batch)
    built = PackedTensor.from_list(list(batch.samples), batch.pattern)
    assert torch.equal(built.values, by_rule.values)
    assert tuple(built.order) == parse(batch.pattern).order
    assert_matches(built, batch.samples)


@given(batches())
def test_to_padded_puts_samples_in_the_corner(batch: Ragged) -> None:
    x = PackedTensor.from_list(list(batch.samples), batch.pattern)
    for fill in (0.0, -1.5):
        torch.testing.assert_close(x.to_padded(fill), padded_of(list(batch.samples), fill))
    torch.testing.assert_close(x.to_padded(), padded_of(list(batch.samples)))


@LENGTHS
def test_from_padded_reads_valid_positions_only(lengths: list[int]) -> None:
    batch = make(lengths)
    padded = padded_of(list(batch.samples), float("nan"))
    for given_lengths in (lengths, torch.tensor(lengths), np.array(lengths)):
        assert_matches(PackedTensor.from_padded(padded, given_lengths), batch.samples)


def test_from_padded_keeps_a_padding_longer_than_the_longest_sample_out() -> None:
    x = PackedTensor.from_padded(torch.arange(14.0).view(2, 7), [2, 3])
    assert x.shape == (2, 3)
    assert x.values.tolist() == [0, 1, 7, 8, 9]


@pytest.mark.parametrize("lengths", [[2, 6], [2], [2, -1]], ids=["too_long", "too_few", "negative"])
def test_from_padded_refuses_lengths_that_do_not_fit(lengths: list[int]) -> None:
    with pytest.raises(ValueError):
        PackedTensor.from_padded(torch.zeros(2, 5, 4), lengths)


@LENGTHS
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_from_offsets_takes_cu_seqlens(lengths: list[int], dtype: torch.dtype) -> None:
    batch = make(lengths)
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=dtype)
    assert_matches(PackedTensor.from_offsets(torch.cat(list(batch.samples)), offsets), batch.samples)


@pytest.mark.parametrize("offsets", [[1, 2, 5], [0, 3, 2, 5], [0, 2, 4]], ids=["start", "falls", "end"])
def test_from_offsets_refuses_what_is_no_partition(offsets: list[int]) -> None:
    with pytest.raises(ValueError):
        PackedTensor.from_offsets(torch.zeros(5, 4), torch.tensor(offsets, dtype=torch.int32))


@LENGTHS
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=["strided", "jagged"])
def test_nested_tensors_go_in_and_out(lengths: list[int], layout: torch.layout) -> None:
    batch = make(lengths)
    nested = torch.nested.nested_tensor(list(batch.samples), layout=layout)
    x = PackedTensor.from_nested(nested)
    assert_matches(x, batch.samples)
    back = x.to_nested()
    assert back.is_nested
    for sample, want in zip(back.unbind(), batch.samples):
        torch.testing.assert_close(sample, want)


@pytest.mark.parametrize("lengths", [[3, 0, 5], [4, 4], [6]])
def test_one_value_built_in_four_ways_is_one_value(lengths: list[int]) -> None:
    """Case 10: equal structures and results; the largest length is known on the host."""
    samples = list(make(lengths).samples)
    row_splits = torch.tensor([0, *np.cumsum(lengths)])
    built = [
        PackedTensor.from_list(samples, "n _"),
        PackedTensor.from_padded(padded_of(samples), lengths),
        PackedTensor.from_offsets(torch.cat(samples), row_splits.int()),
        PackedTensor.from_offsets(torch.cat(samples), row_splits),
    ]
    for x in built:
        assert_matches(x, samples)
        assert isinstance(x.axes[0].max_length, int)
        assert x.axes[0].max_length == max(lengths)
        assert_matches(built[0] - x, [torch.zeros_like(s) for s in samples])
        assert_matches(x * built[0], [s * s for s in samples])
        torch.testing.assert_close(x.sum(1), built[0].sum(1))


def test_from_list_names_a_sample_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match="1"):
        PackedTensor.from_list([torch.zeros(3, 4), torch.zeros(2)], "n _")
    with pytest.raises(ValueError, match="5"):
        PackedTensor.from_list([torch.zeros(3, 4), torch.zeros(2, 5)], "n _")
    with pytest.raises(ValueError):
        PackedTensor.from_list([torch.zeros(3, 3), torch.zeros(2, 4)], "n n")


def test_lengths_declared_ragged_stay_ragged_whatever_the_batch() -> None:
    """Case 1: one pattern gives one type, for equal lengths, one sample and differing lengths."""
    for lengths in ([7, 7], [7], [7, 5]):
        samples = [torch.randn(4, n) for n in lengths]
        x = PackedTensor.from_list(samples, "4 n")
        assert x.order == (0, 2, 1)
        assert len(x.axes) == 1
        assert_matches(x.relu(), [s.relu() for s in samples])


def test_no_samples_is_an_ordinary_batch() -> None:
    for x in (
        PackedTensor.from_padded(torch.zeros(0, 5, 4), []),
        PackedTensor.from_offsets(torch.zeros(0, 4), torch.zeros(1, dtype=torch.int32)),
    ):
        assert x.batch_size == 0
        assert len(x) == 0
        assert x.to_list() == []
        assert x.shape == (0, 0, 4)
        assert (x + 1).to_list() == []
        assert x.sum(1).shape == (0, 4)
        assert torch.equal(x.sum((0, 1)), torch.zeros(4, dtype=x.dtype))


WITHOUT_SAMPLES: dict[str, Callable[[PackedTensor], Any]] = {
    "pointwise": lambda x: x.relu() * 2 + x,
    "by_feature": lambda x: x + torch.ones(4),
    "by_position": lambda x: x + torch.ones(1, 9, 4)[:, : x.shape[1]],
    "linear": lambda x: F.linear(x, torch.ones(4, 4)),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "softmax": lambda x: x.softmax(-1),
    "pair": lambda x: (x[:, :, None] + x[:, None]).mean(2),
    "transposed_pair": lambda x: (p := x[:, :, None] + 2 * x[:, None]) + p.transpose(1, 2),
    "slice": lambda x: x[:, 1:] - x[:, :-1],
    "samples": lambda x: x[:2],
    "heads": lambda x: x.view(*x.shape[:2], 2, 2).transpose(1, 2).transpose(1, 2).flatten(2),
    "rows": lambda x: x.flatten(0, 1).tanh().view(*x.shape),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "sum": lambda x: x.sum(1),
    "last": lambda x: x[:, -1],
    "peak": lambda x: x.amax(1),
    "encoder": lambda x: torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)(x),
}


@pytest.mark.parametrize("name", list(WITHOUT_SAMPLES))
def test_rules_take_a_batch_without_samples(name: str) -> None:
    x = PackedTensor.from_offsets(torch.zeros(0, 4), torch.zeros(1, dtype=torch.int32)).requires_grad_()
    out = WITHOUT_SAMPLES[name](x)
    assert out.shape[0] == 0
    assert out.shape[-1] == 4
    out.sum().backward()
    assert x.grad is not None and x.grad.values.shape == (0, 4)


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        PackedTensor.from_list([], "n _")


@pytest.mark.parametrize(("pattern", "dims"), [("n 4", 1), ("n m 4", 2), ("n n", 2), ("n", 1)])
def test_mask_is_true_on_valid_positions(pattern: str, dims: int) -> None:
    batch = make([3, 0, 5], pattern)
    (x,) = pack(batch)
    ones = [torch.ones(s.shape[:dims], dtype=torch.bool) for s in batch.samples]
    assert x.mask().dtype == torch.bool
    assert torch.equal(x.mask(), padded_of(ones, False))


@given(batches(patterns=[p for p in PATTERNS if p != "n m k"]))
def test_views_back_are_differentiable(batch: Ragged) -> None:
    for view in (lambda x: x.to_padded(2.0), lambda x: torch.cat([s.flatten() for s in x.to_list()])):
        x = pack(batch)[0].requires_grad_()
        (view(x) ** 2).sum().backward()
        assert_matches(x.grad, [2 * s for s in batch.samples])


def test_building_from_a_list_passes_gradients_to_its_tensors() -> None:
    samples = [torch.randn(n, 4, requires_grad=True) for n in (3, 5)]
    (PackedTensor.from_list(samples, "n _").sum((0, 1, 2)) * 2).backward()
    for s in samples:
        assert torch.equal(s.grad, torch.full_like(s, 2.0))


# ---------------------------------------------------------------- attributes


def test_it_is_a_plain_dataclass_and_no_tensor() -> None:
    (x,) = pack(make([3, 5]))
    assert not isinstance(x, torch.Tensor)
    assert not torch.is_tensor(x)
    assert ops.is_packed(x)
    assert not ops.is_packed(x.values)
    assert dataclasses.is_dataclass(x)
    assert hash(x) != hash(x.clone())


def test_a_dataclass_walk_rebuilds_it() -> None:
    """What data-parallel wrappers do to find output tensors: every field is an init field."""
    (x,) = pack(make([3, 5]))
    fields = {f.name: getattr(x, f.name) for f in dataclasses.fields(x) if f.init}
    assert len(fields) == len(dataclasses.fields(x))
    assert any(value is x.values for value in fields.values())
    same(type(x)(**fields), x)
    same(dataclasses.replace(x, values=x.values * 2), x * 2)


@given(batches())
def test_attributes_say_what_samples_say(batch: Ragged) -> None:
    (x,) = pack(batch)
    spec = parse(batch.pattern)
    count = len(batch.samples)
    envelope = [max(column) for column in zip(*(s.shape for s in batch.samples))]
    assert tuple(x.shape) == tuple(x.size()) == (count, *envelope)
    assert x.size(-1) == envelope[-1]
    assert x.dim() == x.ndim == spec.rank + 1
    assert len(x) == x.batch_size == count
    assert x.numel() == sum(s.numel() for s in batch.samples)
    assert x.sizes.tolist() == [list(s.shape) for s in batch.samples]
    assert not x.sizes.is_cuda and x.sizes.dtype == torch.int64
    assert x.offsets.tolist() == x.grid.offsets.tolist()
    assert x.axes == x.grid.axes
    assert (x.dtype, x.device) == (torch.float64, torch.device("cpu"))
    assert x.is_floating_point()


def test_sizes_of_a_permuted_tensor_are_in_its_order() -> None:
    (x,) = pack(make({"n": [2, 3], "m": [4, 1]}, "n m 5"))
    y = x.permute(0, 3, 2, 1)
    assert y.sizes.tolist() == [[5, 4, 2], [5, 1, 3]]
    assert y.shape == (2, 5, 4, 3)


def test_shape_entries_know_their_axis_and_keep_it_through_slicing() -> None:
    (x,) = pack(make([3, 5]))
    shape = x.shape
    assert isinstance(shape, torch.Size)
    assert shape == (2, 5, 4)
    for entry in (shape[1], shape[1:][0], shape[:2][-1], x.size(1), x.size()[1], tuple(shape)[1]):
        assert isinstance(entry, int)
        assert type(entry) is not int
        assert entry == 5
    assert type(shape[2]) is int


def test_iteration_gives_dense_samples() -> None:
    batch = make([3, 0, 5])
    (x,) = pack(batch)
    for sample, want in zip(x, batch.samples, strict=True):
        assert type(sample) is Tensor
        assert torch.equal(sample, want)


def test_repr_shows_structure_and_values() -> None:
    x = PackedTensor.from_list([torch.tensor([1.25, 2.5]), torch.tensor([3.75])], "words")
    text = repr(x)
    assert "PackedTensor" in text
    assert "words" in text
    assert "2, 1" in text
    assert "1.25" in text


@given(batches())
def test_repr_never_fails(batch: Ragged) -> None:
    (x,) = pack(batch)
    assert "PackedTensor" in repr(x)
    assert "PackedTensor" in str(x.requires_grad_() * 2)


# ---------------------------------------------------------------- moving and copying


def test_to_casts_values_and_keeps_structure() -> None:
    (x,) = pack(make([3, 5]))
    for y in (x.to(torch.float32), x.to(dtype=torch.float32), x.float(), x.to("cpu", torch.float32)):
        assert y.dtype == torch.float32
        assert y.grid is x.grid
    assert x.half().dtype == torch.float16
    assert x.bfloat16().dtype == torch.bfloat16
    assert x.double().dtype == torch.float64
    assert x.long().dtype == torch.int64
    assert x.bool().dtype == torch.bool
    assert x.to(x.float()).dtype == torch.float32
    assert x.cpu().device.type == "cpu"
    same(x.to("cpu", non_blocking=True), x)


def test_to_another_device_moves_structure_too() -> None:
    (x,) = pack(make([3, 5]))
    y = x.to("meta")
    assert y.device.type == y.values.device.type == y.offsets.device.type == "meta"
    assert y.shape == x.shape
    assert y.axes[0].lengths.tolist() == [3, 5]


def test_map_tensors_keeps_sharing_within_a_memo() -> None:
    x, y, z = pack(make([3, 5]), make([3, 5], "n 2"), make([3, 5], "n n"))
    memo: dict = {}
    a, b, c = (ops.map_tensors(t, torch.clone, memo) for t in (x, y, z))
    assert a.grid is b.grid
    assert a.axes[0] is c.axes[0] is c.axes[1]
    assert a.axes[0] is not x.axes[0]
    assert a.values is not x.values
    same(a, x)
    same(c, z)
    same(a + 1, x + 1)


def test_pin_memory_without_accelerator_is_no_op() -> None:
    if torch.accelerator.is_available():
        pytest.skip("an accelerator is there")
    (x,) = pack(make([3, 5]))
    same(x.pin_memory(), x)


def test_clone_copies_and_detach_shares_values() -> None:
    (x,) = pack(make([3, 5]))
    x.requires_grad_()
    copied, cut = x.clone(), x.detach()
    assert copied.requires_grad and not cut.requires_grad
    assert copied.values.data_ptr() != x.values.data_ptr()
    assert cut.values.data_ptr() == x.values.data_ptr()
    assert copied.grid is cut.grid is x.grid


def through_torch_save(x: object) -> object:
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


COPIES = pytest.mark.parametrize(
    "twin",
    [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy, through_torch_save],
    ids=["pickle", "deepcopy", "torch_save"],
)


@COPIES
@pytest.mark.parametrize("pattern", PATTERNS)
def test_copies_are_equal_and_independent(twin: Callable, pattern: str) -> None:
    batch = make([3, 0, 2], pattern)
    (x,) = pack(batch)
    _ = x + x, x.sum(), x[:, :1]
    y = twin(x)
    same(y, x)
    y.values.add_(1)
    assert_matches(x, batch.samples)
    assert_matches(y - x, [torch.ones_like(s) for s in batch.samples])


@COPIES
def test_fields_copied_together_still_share_their_axis(twin: Callable) -> None:
    x, y = pack(make([3, 5]), make([3, 5], "n 2"))
    both = twin({"x": x, "y": y})
    assert both["x"].axes[0] is both["y"].axes[0]


@COPIES
def test_a_leaf_stays_a_leaf_when_copied(twin: Callable) -> None:
    y = twin(pack(make([3, 5]))[0].requires_grad_())
    assert y.requires_grad
    assert y.values.is_leaf


# ---------------------------------------------------------------- gradients


def test_requires_grad_makes_a_leaf_whose_gradient_is_packed() -> None:
    """Case 11c: and the caller's tensors stay as they were."""
    samples = [torch.randn(n, 4) for n in (3, 0, 5)]
    values, padded = torch.cat(samples), padded_of(samples)
    offsets = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    sources = [
        (PackedTensor.from_list(samples, "n _"), samples),
        (PackedTensor.from_offsets(values, offsets), [values]),
        (PackedTensor.from_padded(padded, [3, 0, 5]), [padded]),
        (PackedTensor.from_list(samples[:1], "n _"), samples[:1]),
    ]
    for x, callers in sources:
        assert x.grad is None
        assert x.requires_grad_() is x
        assert x.requires_grad
        assert x.values.is_leaf
        (x * x).sum().backward()
        assert ops.is_packed(x.grad)
        assert_matches(x.grad, [2 * s for s in x.detach().to_list()])
        assert all(not t.requires_grad and t.grad is None for t in callers)


def test_gradients_accumulate_and_can_be_dropped() -> None:
    (x,) = pack(make([3, 5]))
    x.requires_grad_()
    for _ in range(2):
        (x * 3).sum().backward()
    assert_matches(x.grad, [torch.full_like(s, 6.0) for s in x.to_list()])
    x.grad = None
    assert x.grad is None
    x.requires_grad_(False)
    assert not x.requires_grad


def test_no_grad_is_respected() -> None:
    (x,) = pack(make([3, 5]))
    x.requires_grad_()
    with torch.no_grad():
        assert not (x + 1).requires_grad
    assert (x + 1).requires_grad


def test_checkpointing_without_reentrance_gives_the_same_gradient() -> None:
    def body(x: PackedTensor) -> PackedTensor:
        return (x[:, 1:, None] * x[:, None, 1:]).tanh().sum(2)

    grads = []
    for run in (body, lambda x: torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False)):
        (x,) = pack(make([3, 1, 5]))
        x.requires_grad_()
        run(x).sum().backward()
        grads.append(x.grad)
    same(grads[1], grads[0])


# ---------------------------------------------------------------- pytree


@given(batches())
def test_pytree_leaves_are_tensors_and_come_back(batch: Ragged) -> None:
    (x,) = pack(batch)
    leaves, spec = pytree.tree_flatten(x)
    assert all(isinstance(leaf, Tensor) for leaf in leaves)
    assert any(leaf is x.values for leaf in leaves)
    back = pytree.tree_unflatten(leaves, spec)
    assert_matches(back, batch.samples)
    assert_matches(back + x, [s + s for s in batch.samples])


def test_tree_spec_is_the_same_from_batch_to_batch() -> None:
    specs = []
    for lengths in ([3, 5], [2, 2], [6], [3, 0, 5, 1]):
        (x,) = pack(make(lengths, "n n 4"))
        _ = x.sum(1), x[:, :1]
        specs.append(pytree.tree_structure(x))
    assert all(spec == specs[0] for spec in specs)


def test_tree_map_gives_a_working_tensor() -> None:
    x, y = pack(make([3, 0, 5]), make([3, 0, 5]))
    a, b = pytree.tree_map(torch.clone, (x, y))
    same(a, x)
    same(a + b, x + y)
    same(a + y, x + y)
    same((a[:, :, None] + y[:, None]).sum(2), (x[:, :, None] + y[:, None]).sum(2))


def test_constructor_takes_values_grid_and_order() -> None:
    axis = Axis([2, 1])
    x = PackedTensor(torch.arange(3.0), Grid((axis,)), parse("n").order)
    assert [s.tolist() for s in x.to_list()] == [[0, 1], [2]]
    assert x.axes[0] is axis


# ---------------------------------------------------------------- unusual storage


STORED: dict[str, Callable[[list[Tensor]], PackedTensor]] = {
    "transposed_samples": lambda samples: PackedTensor.from_list(
        [s.t().contiguous().t() for s in samples], "n _"
    ),
    "transposed_buffer": lambda samples: from_buffer(torch.cat(samples).t().contiguous().t()),
    "strided_buffer": lambda samples: from_buffer(torch.cat(samples).repeat_interleave(2, 1)[:, ::2]),
    "shifted_buffer": lambda samples: from_buffer(
        torch.cat([torch.zeros(3, 4, dtype=torch.float64), *samples])[3:]
    ),
    "padded_view": lambda samples: PackedTensor.from_padded(
        padded_of(samples).transpose(0, 1).contiguous().transpose(0, 1), [3, 0, 5]
    ),
}


def from_buffer(values: Tensor) -> PackedTensor:
    return PackedTensor.from_offsets(values, torch.tensor([0, 3, 3, 8], dtype=torch.int32))


@pytest.mark.parametrize("name", list(STORED))
def test_strides_of_the_buffer_do_not_matter(name: str) -> None:
    samples = list(make([3, 0, 5]).samples)
    x, y = STORED[name](samples), PackedTensor.from_list(samples, "n _")
    program = [
        lambda x: x + x[:, :, None].sum(2),
        lambda x: x[:, 1:] * x[:, :-1],
        lambda x: (x[:, :, None] * x[:, None]).mean(2),
        lambda x: x.view(*x.shape[:2], 2, 2).transpose(1, 2),
        lambda x: x.flatten(0, 1).view(*x.shape),
        lambda x: F.scaled_dot_product_attention(*[x.view(*x.shape[:2], 2, 2).transpose(1, 2)] * 3),
        lambda x: F.layer_norm(x.transpose(1, 2).transpose(1, 2), (4,)),
        lambda x: x[[2, 0]],
        lambda x: (x * 1).add_(1),
    ]
    for fn in program:
        assert_matches(fn(x), fn(y).to_list())


@pytest.mark.slow
def test_many_samples_of_many_lengths() -> None:
    lengths = torch.randint(0, 60, (300,)).tolist()
    batch = make(lengths, "n 4")
    check(lambda x: (x[:, :, None] * x[:, None]).sum(1) + x * x.sum(1, keepdim=True), batch)
    check(lambda x: x[:, 1:, None].sin() + x[:, None, ::2], batch, rtol=1e-6, atol=1e-8)

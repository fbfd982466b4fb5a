"""What a batch leaves behind, and what it asks of the device."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ops
from ops import PackedTensor
from ops.testing import pack
from tests.strategies import make

LENGTHS = ([3, 5, 2], [4, 4], [6], [3, 0, 5], [1, 7, 2, 2])


class Deriving(nn.Module):
    """Slices, strides, pairs, sub-batches, flattened pairs, attention: all that derives structure."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.pair = nn.Linear(4, 4), nn.Linear(4, 4)
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x: PackedTensor) -> torch.Tensor:
        x = self.encoder(x)
        delta = x[:, 1:] - x[:, :-1]
        pair = self.pair(delta[:, :, None] + x[:, None, ::2])
        rows = self.inner(x.flatten(0, 1)).view(*x.shape)
        square = rows[:, :, None] * x[:, None]
        square = square + square.transpose(1, 2)
        half = x[: len(x) // 2 + 1]
        return (
            pair.sum((1, 2)).mean()
            + pair.flatten(1, 2).sum(1).mean()
            + square.sum((1, 2)).mean()
            + half.sum()
        )


@pytest.fixture
def without_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def batch(lengths: list[int]) -> PackedTensor:
    return PackedTensor.from_list(list(make(lengths, dtype=torch.float32).samples), "n _")


@pytest.mark.parametrize("train", [True, False], ids=["train", "infer"])
@pytest.mark.usefixtures("without_garbage_collection")
def test_two_hundred_batches_leave_none_alive(train: bool) -> None:
    model = Deriving()
    watched: list[weakref.ref] = []
    for step in range(200):
        x = batch(LENGTHS[step % len(LENGTHS)])
        watched += [weakref.ref(x), weakref.ref(x.axes[0]), weakref.ref(x.values), weakref.ref(x.offsets)]
        if train:
            model(x.requires_grad_()).backward()
            assert x.grad is not None
        else:
            with torch.inference_mode():
                model(x)
        del x
        assert sum(ref() is not None for ref in watched) == 0


@pytest.mark.usefixtures("without_garbage_collection")
def test_copies_and_conversions_leave_nothing_alive() -> None:
    for convert in (
        lambda x: x.to(torch.float64),
        lambda x: ops.map_tensors(x, torch.clone, {}),
        lambda x: x.to_nested() if min(x.axes[0].lengths) else None,
        lambda x: (x.to_padded(), x.mask()),
        lambda x: ops.mark_dynamic({"x": x}),
        lambda x: torch.utils._pytree.tree_map(torch.clone, x),
        repr,
    ):
        x = batch([3, 5, 2])
        _ = x[:, 1:] * 2
        result = convert(x)
        watched = [weakref.ref(x), weakref.ref(x.axes[0]), weakref.ref(x.values)]
        del x, result
        assert [ref() for ref in watched] == [None] * 3


# ---------------------------------------------------------------- no read of the device


def on_meta(lengths: list[int], pattern: str = "n 4", dtype: torch.dtype = torch.float32) -> PackedTensor:
    """A batch whose device has no values: whoever reads one fails."""
    return pack(make(lengths, pattern, dtype=dtype))[0].to("meta")


HOT: dict[str, Callable[[PackedTensor], object]] = {
    "pointwise": lambda x: (x + x) * 2 - x.exp(),
    "by_position": lambda x: x + torch.zeros(9, 4, device="meta")[: x.shape[1]],
    "by_sample": lambda x: x + torch.zeros(3, 1, 4, device="meta"),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "linear": lambda x: F.linear(x, torch.zeros(6, 4, device="meta")),
    "softmax": lambda x: x.softmax(-1),
    "pair": lambda x: x[:, :, None] + x[:, None],
    "pair_mean": lambda x: (x[:, :, None] + x[:, None]).mean(2),
    "transposed_pair": lambda x: (p := x[:, :, None] + x[:, None]) + p.transpose(1, 2),
    "sum": lambda x: x.sum(1),
    "mean": lambda x: x.mean((0, 1)),
    "peak": lambda x: x.amax(1),
    "slice": lambda x: x[:, 1:] - x[:, :-1],
    "stride": lambda x: x[:, ::2],
    "last": lambda x: x[:, -1],
    "samples": lambda x: x[[2, 0]],
    "rows": lambda x: x.flatten(0, 1).view(*x.shape),
    "heads": lambda x: x.view(*x.shape[:2], 2, 2).transpose(1, 2),
    "loss": lambda x: F.mse_loss(x, x * 2),
    "cross_entropy": lambda x: F.cross_entropy(x.flatten(0, 1), x.flatten(0, 1).softmax(-1)),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(*x.shape[:2], 2, 2).transpose(1, 2)] * 3),
    "padded": lambda x: x.to_padded(),
    "mask": lambda x: x.mask(),
}


@pytest.mark.parametrize("name", list(HOT))
def test_no_operator_reads_the_device(name: str) -> None:
    HOT[name](on_meta([3, 5, 2]))


@pytest.mark.parametrize("name", [name for name in HOT if name not in {"mask", "padded"}])
def test_no_backward_reads_the_device(name: str) -> None:
    x = on_meta([3, 5, 2]).requires_grad_()
    out = HOT[name](x)
    values = out.values if isinstance(out, PackedTensor) else out
    values.sum().backward()
    assert x.grad.values.shape == x.values.shape


def test_equal_structures_built_apart_are_compared_on_the_host() -> None:
    x, y = on_meta([3, 5, 2]), on_meta([3, 5, 2])
    assert (x + y).device.type == "meta"
    with pytest.raises((ValueError, RuntimeError), match="sample 0"):
        x + on_meta([5, 3, 2])

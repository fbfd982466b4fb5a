"""One buffer a batch: what lies in it, how long it lives, how it travels."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

import ops
from packload import Batch, Collate, PackedTensor, collate, ragged
from packload.block import ALIGNMENT, fresh_memory

SCHEMA = {"x": "n _", "ids": "n", "pair": "n n", "meta.box": "4"}


def samples(lengths: tuple[int, ...] = (3, 0, 2)) -> list[dict[str, Any]]:
    return [
        {
            "x": torch.randn(n, 5),
            "ids": np.arange(n),
            "half": torch.randn(n + 1, 2).to(torch.bfloat16),
            "pair": torch.randn(n, n) > 0,
            "image": Image.fromarray(np.full((n + 1, 2, 3), n, np.uint8)),
            "meta": {"box": torch.randn(4), "y": n, "text": f"s{n}", "z": 1j * n},
        }
        for n in lengths
    ]


def make(lengths: tuple[int, ...] = (3, 0, 2)) -> Batch:
    return Collate(SCHEMA)(samples(lengths))


def tensors(value: Any) -> list[Tensor]:
    """Every tensor of a batch, in order: fields, offsets, maps."""
    if isinstance(value, Batch):
        return [t for field in value.values() for t in tensors(field)]
    if isinstance(value, PackedTensor):
        part = value.grid.part
        return [value.values, part.offsets, *(part.maps[name] for name in sorted(part.maps))]
    return [value] if isinstance(value, Tensor) else []


def equal(a: Batch, b: Batch) -> bool:
    left, right = tensors(a), tensors(b)
    return len(left) == len(right) > 10 and all(
        p.dtype == q.dtype and p.shape == q.shape and torch.equal(p, q) for p, q in zip(left, right)
    )


def arena(log: list[str]) -> Callable[[int], np.ndarray]:
    """Memory whose end is written down."""

    def allocate(size: int) -> np.ndarray:
        log.append("taken")
        memory = fresh_memory(size + 100)
        memory[:] = 255
        weakref.finalize(memory, log.append, "freed")
        return memory

    return allocate


def test_everything_lies_in_one_aligned_buffer() -> None:
    batch = make()
    buffer = batch.buffer
    assert buffer is not None and buffer.dtype == torch.uint8 and batch.nbytes == buffer.nbytes
    begin, end = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
    for tensor in tensors(batch):
        if tensor.numel():
            assert begin <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= end
        assert tensor.is_contiguous() and tensor.storage_offset() == 0
    for field in (batch.x.values, batch.ids.values, batch.half.values, batch.image.values, batch.meta.box):
        assert (field.data_ptr() - begin) % ALIGNMENT == 0
    assert batch.x.axes[0].lengths.data_ptr() not in range(begin, end)


def test_allocate_is_asked_once_and_samples_are_written_into_its_memory() -> None:
    log: list[str] = []
    batch = Collate(SCHEMA).pack(samples(), arena(log))
    assert log == ["taken"]
    plain = Collate(SCHEMA)(samples((3, 0, 2)))
    assert [t.shape for t in tensors(batch)] == [t.shape for t in tensors(plain)]
    assert torch.equal(batch.image.values, plain.image.values)
    memory = torch.zeros(batch.nbytes, dtype=torch.uint8)
    assert Collate(SCHEMA).pack(samples(), lambda size: memory).buffer.data_ptr() == memory.data_ptr()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "keep",
    [
        lambda batch: batch,
        lambda batch: batch.x,
        lambda batch: batch.x.values[1:],
        lambda batch: batch.half.values,
        lambda batch: batch.meta,
        lambda batch: batch.meta.box.view(-1)[:1],
        lambda batch: batch.pair.grid.part.offsets,
        lambda batch: batch.x.axes[0].sample_ids.numpy(),
        lambda batch: batch.x.values.requires_grad_().square().sum(),
    ],
)
def test_memory_lives_as_long_as_the_last_thing_made_from_it(keep: Callable[[Batch], Any]) -> None:
    log: list[str] = []
    batch = Collate(SCHEMA).pack(samples(), arena(log))
    kept = keep(batch)
    del batch
    gc.collect()
    assert log == ["taken"]
    del kept
    gc.collect()
    assert log == ["taken", "freed"]


def test_lengths_outlive_the_buffer() -> None:
    log: list[str] = []
    lengths = Collate(SCHEMA).pack(samples(), arena(log)).x.axes[0].lengths
    gc.collect()
    assert log == ["taken", "freed"] and lengths.tolist() == [3, 0, 2]


def test_memory_is_given_back_when_samples_turn_out_not_to_fit() -> None:
    log: list[str] = []
    wrong = [{"x": np.zeros((2, 3))}, {"x": np.zeros((2, 4))}]
    with pytest.raises(ValueError, match="sample 1"):
        Collate().pack(wrong, arena(log))
    gc.collect()
    assert log.count("taken") == log.count("freed")


def test_fields_are_made_on_first_access_and_once() -> None:
    batch = make()
    assert not batch.block._made
    assert batch.x is batch["x"] and batch.meta.y is batch.meta["y"]
    assert len(batch.block._made) == 2
    assert batch.x.axes[0] is batch.pair.axes[1] is batch.ids.axes[0]


def test_writing_into_one_field_does_not_break_the_backward_of_another() -> None:
    batch = make()
    weight = torch.randn(5, requires_grad=True)
    loss = (batch.x.values * weight).sum()
    batch.ids.values.add_(1)
    batch.meta.box.zero_()
    batch.x.axes[0].sample_ids.add_(0)
    loss.backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, batch.x.values.sum(0))


def test_fields_made_in_inference_mode_can_be_trained_on() -> None:
    batch = make()
    with torch.inference_mode():
        x = batch.x
    weight = torch.randn(5, requires_grad=True)
    (x * weight).values.sum().backward()
    assert not x.values.is_inference() and not x.offsets.is_inference()


# ------------------------------------------------------------------ travelling


def test_a_batch_is_pickled_as_one_tensor_whatever_its_fields() -> None:
    batch = make()
    for fields in (0, 20):
        assert len(tensors(batch)[:fields]) >= fields
        state = batch.__getstate__()
        assert sum(isinstance(value, Tensor) for value in state.values()) == 1
        assert ForkingPickler.dumps(batch).tobytes().count(b"rebuild_storage") == 1
        assert equal(pickle.loads(pickle.dumps(batch)), batch)


def test_header_and_buffer_give_the_batch_again() -> None:
    batch = make()
    header = pickle.loads(pickle.dumps(batch.header()))
    assert batch.buffer is not None
    again = Batch.from_buffer(batch.buffer.clone(), header)
    assert equal(again, batch) and again.meta.text == ["s3", "s0", "s2"] and again.batch_size == 3
    assert again.x.axes[0] is again.pair.axes[0]
    assert len(pickle.dumps(header)) < 2000


def test_a_header_does_not_grow_with_the_batch() -> None:
    collation = Collate(SCHEMA, drop=["meta.text"])
    sizes = {
        len(pickle.dumps(collation(samples(lengths)).header())) for lengths in [(1,), (3, 0, 2), (4,) * 90]
    }
    assert len(sizes) == 1


def test_a_bare_field_comes_back_bare() -> None:
    batch = Collate().pack([torch.ones(2), torch.ones(3)])
    assert batch.buffer is not None
    again = Batch.from_buffer(batch.buffer, batch.header()).unwrap()
    assert isinstance(again, PackedTensor) and again.values.sum() == 5
    assert Collate().pack(["a", "b"]).unwrap() == ["a", "b"]
    assert Collate().pack([{"": 1}]).unwrap()[""].tolist() == [1]


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: setattr(batch.x, "values", batch.x.values * 2),
        lambda batch: batch.x.requires_grad_(),
        lambda batch: ops.mark_dynamic(batch),
        lambda batch: (batch.x[:, 1:] + 1, ops.deliver(batch)),
    ],
)
@pytest.mark.parametrize(
    "travel", [copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b)), lambda b: b.to("cpu")]
)
def test_what_was_changed_since_travels_too(change: Any, travel: Any) -> None:
    batch = make()
    change(batch)
    assert batch.buffer is None
    again = travel(batch)
    assert torch.equal(again.x.values, batch.x.values)
    assert again.x.requires_grad == batch.x.requires_grad
    assert again.x.axes[0].dynamic == batch.x.axes[0].dynamic
    assert len(again.x.axes[0].parts) == len(batch.x.axes[0].parts)
    assert again.x.axes[0] is again.pair.axes[0]


def test_values_written_in_place_travel_in_the_buffer() -> None:
    batch = make()
    batch.x.values.fill_(7)
    assert batch.buffer is not None
    assert (pickle.loads(pickle.dumps(batch)).x.values == 7).all()


def test_names_that_are_no_literals_travel_one_by_one() -> None:
    class Name(str):
        __slots__ = ()

    samples = [{np.float64(1.5): torch.ones(n)} for n in (1, 2)]
    batch = collate(samples)
    with pytest.raises(ValueError, match="pickle"):
        batch.header()
    assert list(pickle.loads(pickle.dumps(batch)).keys()) == [1.5]


def test_torch_save_of_one_field_saves_that_field_alone() -> None:
    batch = collate([{"small": torch.ones(2), "large": torch.ones(100_000)}])
    file = io.BytesIO()
    torch.save(batch.small, file)
    assert len(file.getvalue()) < 20_000


class Copies:
    """Counts copies of whole tensors to another device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        to = Tensor.to

        def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            self.count += 1
            return to(tensor, *args, **kwargs)

        monkeypatch.setattr(Tensor, "to", counted)


def test_moving_is_one_copy_and_recording_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make()
    copies = Copies(monkeypatch)
    meta = batch.to("meta")
    assert copies.count == 1
    assert meta.x.device.type == meta.pair.grid.part.offsets.device.type == "meta"
    assert meta.x.axes[0] is meta.pair.axes[0] and meta.x.axes[0].lengths.tolist() == [3, 0, 2]
    assert meta.meta.text == ["s3", "s0", "s2"]
    recorded = []
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: recorded.append(tensor))
    meta.record_stream("a stream")  # type: ignore[arg-type]
    assert len(recorded) == 1


def test_to_the_same_device_is_the_batch_itself() -> None:
    batch = make()
    assert batch.to("cpu") is batch


class Views(torch.utils.data.Dataset[Any]):
    """Samples that are small views of one large tensor."""

    def __init__(self) -> None:
        self.data = torch.arange(1_000_000, dtype=torch.float32)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return {"x": self.data[index : index + 3], "y": ragged(self.data[:2], "m")}


def test_a_view_of_a_large_tensor_ships_its_own_bytes() -> None:
    loader: Any = DataLoader(Views(), batch_size=4, num_workers=1, collate_fn=collate)
    for number, batch in enumerate(loader):
        assert batch.nbytes < 4096 and batch.buffer.untyped_storage().nbytes() < 4096
        assert batch.x.values.tolist() == [4 * number + i + j for i in range(4) for j in range(3)]


def test_a_batch_without_ragged_fields_comes_back_too() -> None:
    batch = collate([{"y": 1, "box": np.ones(())}, {"y": 2, "box": np.zeros(())}])
    again = pickle.loads(pickle.dumps(batch))
    assert again.y.tolist() == [1, 2] and again.box.tolist() == [1, 0] and again.batch_size == 2

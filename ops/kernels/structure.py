"""Structure kernels: from lengths to offsets, identifiers and coordinate maps.

All of them are functions of host lengths (int64 [B]) and device offsets (int32 [B + 1]); none reads
device memory from the host. On the CPU the work is done by numpy, which is 2 to 8 times faster than
torch at these small integer loops; elsewhere the same code runs on torch tensors of the device.

Layout: a grid's cells are sample-major, then row-major over its axes. ``cell = offsets[s] +
((p_0 * n_1 + p_1) * n_2 + p_2) ...`` for sample ``s``, positions ``p_k`` and lengths ``n_k`` of ``s``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .define import define, mark_effectful

INDEX_LIMIT = 2**31 - 1
NO_CAP = -1


def host_offsets(lengths: np.ndarray) -> tuple[np.ndarray, int]:
    """Offsets int32 [B + 1] and the total of host lengths [B].

    Raises:
        ValueError: 32-bit indices would wrap around.
    """
    offsets = np.empty(len(lengths) + 1, dtype=np.int32)
    offsets[0], ends = 0, lengths.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    check_indices(total)
    offsets[1:] = ends
    return offsets, total


def check_indices(cells: int) -> None:
    """Raise ValueError where 32-bit indices of so many cells would wrap around."""
    if cells > INDEX_LIMIT:
        raise ValueError(
            f"a packed batch of {cells} cells does not fit 32-bit indices (at most {INDEX_LIMIT}); "
            "make the batch smaller"
        )


def extent(total: int) -> Tensor:
    """A tensor of no bytes whose first dim carries a size: sizes of graphs travel as shapes."""
    return torch.empty((total, 0))


def partition(lengths: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Host lengths -> (lengths int64 [B] on the host, offsets int32 [B + 1] on the device, extent)."""
    host, total = host_offsets(lengths)
    offsets = torch.from_numpy(host)
    if device.type != "cpu":
        offsets = offsets.to(device, non_blocking=True)
    return torch.from_numpy(lengths), offsets, extent(total)


# ------------------------------------------------------------------ new partitions from old ones


def apply_step(lengths: Any, cap: int, shift: int, stride: int) -> Any:
    """The length function of a derived axis: ``max((min(n, cap) + shift) // stride, 0)``."""
    if cap != NO_CAP:
        lengths = np.minimum(lengths, cap)
    moved = lengths + shift
    return np.maximum(moved if stride == 1 else moved // stride, 0)


def _derive(
    lengths: Tensor, offsets: Tensor, cap: int, shift: int, stride: int
) -> tuple[Tensor, Tensor, Tensor]:
    return partition(apply_step(lengths.numpy(), cap, shift, stride), offsets.device)


def _new_partition_fake(lengths: Tensor, offsets: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    total = torch.library.get_ctx().new_dynamic_size()
    size = torch.empty((total, 0), device="cpu")
    return torch.empty_like(lengths), torch.empty_like(offsets), size


def _product(lengths: Tensor, offsets: Tensor, others: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    product = lengths.numpy().copy()
    for other in others:
        product *= other.numpy()
    return partition(product, offsets.device)


derive = define(
    "derive(Tensor lengths, Tensor offsets, int cap, int shift, int stride) -> (Tensor, Tensor, Tensor)",
    _derive,
    _new_partition_fake,
)
product = define(
    "product(Tensor lengths, Tensor offsets, Tensor[] others) -> (Tensor, Tensor, Tensor)",
    _product,
    _new_partition_fake,
)


def _longest(lengths: Tensor) -> Tensor:
    return extent(int(lengths.numpy().max(initial=0)))


def _longest_fake(lengths: Tensor) -> Tensor:
    return torch.empty((torch.library.get_ctx().new_dynamic_size(), 0), device="cpu")


#: The size-carrying tensor of the largest of host lengths.
longest = define("longest(Tensor lengths) -> Tensor", _longest, _longest_fake)


# ------------------------------------------------------------------ maps: one integer a cell


class _Numpy:
    """The few array functions the maps need, on numpy arrays."""

    @staticmethod
    def load(tensor: Tensor) -> np.ndarray:
        return tensor.numpy()

    @staticmethod
    def arange(n: int, like: np.ndarray) -> np.ndarray:
        return np.arange(n, dtype=np.int32)

    @staticmethod
    def repeat(values: np.ndarray, counts: np.ndarray, total: int) -> np.ndarray:
        return np.repeat(values, counts)

    @staticmethod
    def starts(counts: np.ndarray) -> np.ndarray:
        return counts.cumsum(dtype=np.int32) - counts

    @staticmethod
    def stack(values: list[np.ndarray]) -> np.ndarray:
        return np.array(values)

    @staticmethod
    def clamp_min(values: np.ndarray, low: int) -> np.ndarray:
        return np.maximum(values, low)

    @staticmethod
    def store(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values if values.dtype == np.int32 else values.astype(np.int32))


class _Torch:
    """The same on torch tensors of any device, without a transfer to the host."""

    @staticmethod
    def load(tensor: Tensor) -> Tensor:
        return tensor

    @staticmethod
    def arange(n: int, like: Tensor) -> Tensor:
        return torch.arange(n, dtype=torch.int32, device=like.device)

    @staticmethod
    def repeat(values: Tensor, counts: Tensor, total: int) -> Tensor:
        return torch.repeat_interleave(values, counts, output_size=total)

    @staticmethod
    def starts(counts: Tensor) -> Tensor:
        return counts.cumsum(0, dtype=torch.int32) - counts

    @staticmethod
    def stack(values: list[Tensor]) -> Tensor:
        return torch.stack(values)

    @staticmethod
    def clamp_min(values: Tensor, low: int) -> Tensor:
        return values.clamp_min(low)

    @staticmethod
    def store(values: Tensor) -> Tensor:
        return values.to(torch.int32)


def _namespace(tensor: Tensor) -> Any:
    return _Numpy if tensor.device.type == "cpu" else _Torch


def _coordinates(xp: Any, offsets: list[Any], batch: Any, totals: Sequence[int]) -> tuple[Any, list[Any]]:
    """Sample and position along each axis of every cell; ``totals[k]``: cells of the first k axes."""
    sample = batch
    positions: list[Any] = []
    for k, axis in enumerate(offsets):
        counts = (axis[1:] - axis[:-1])[sample]
        total = totals[k + 1]
        first = xp.repeat(xp.starts(counts), counts, total)
        positions = [xp.repeat(p, counts, total) for p in positions]
        positions.append(xp.arange(total, axis) - first)
        sample = xp.repeat(sample, counts, total)
    return sample, positions


def _grid_map(
    source: Sequence[Tensor],
    target: Sequence[Tensor],
    axes: Sequence[int],
    starts: Sequence[int],
    strides: Sequence[int],
    totals: Sequence[int],
) -> Tensor:
    xp = _namespace(target[0])
    batch = xp.arange(totals[0], target[0])
    sample, positions = _coordinates(xp, [xp.load(t) for t in source], batch, totals)
    index: Any = 0
    cells: Any = 1
    for offsets, k, start, stride in zip(target, axes, starts, strides):
        loaded = xp.load(offsets)
        lengths = loaded[1:] - loaded[:-1]
        first = start if start >= 0 else xp.clamp_min(lengths + start, 0)[sample]
        position = first + (positions[k] * stride if k >= 0 else 0)
        index = index * lengths[sample] + position
        cells = cells * lengths
    return xp.store(xp.starts(cells)[sample] + index)


def _grid_map_fake(source: Any, target: Any, axes: Any, starts: Any, strides: Any, totals: Any) -> Tensor:
    return target[0].new_empty((totals[-1],), dtype=torch.int32)


#: For every cell of the grid over ``source`` (axes' offsets) the cell of the grid over ``target`` whose
#: coordinate ``j`` is ``start_j + stride_j * p`` with ``p`` the source's position along axis
#: ``axes[j]`` (-1: no axis, position 0). A negative start counts from the end of each sample.
#: ``totals[k]``: cells of the source grid's first ``k`` axes, so that ``totals[0]`` is the batch size.
grid_map = define(
    "grid_map(Tensor[] source, Tensor[] target, int[] axes, int[] starts, int[] strides, SymInt[] totals)"
    " -> Tensor",
    _grid_map,
    _grid_map_fake,
)


def _positions(offsets: Tensor, total: int) -> Tensor:
    xp = _namespace(offsets)
    loaded = xp.load(offsets)
    first = xp.repeat(loaded[:-1], loaded[1:] - loaded[:-1], total)
    return xp.store(xp.arange(total, loaded) - first)


def _vector_fake(offsets: Tensor, total: int) -> Tensor:
    return offsets.new_empty((total,), dtype=torch.int32)


def _sample_ids(offsets: Tensor, total: int) -> Tensor:
    xp = _namespace(offsets)
    loaded = xp.load(offsets)
    return xp.store(xp.repeat(xp.arange(loaded.shape[0] - 1, loaded), loaded[1:] - loaded[:-1], total))


#: The sample of every row: offsets [B + 1] -> int32 [total].
sample_ids = define("sample_ids(Tensor offsets, SymInt total) -> Tensor", _sample_ids, _vector_fake)

#: Position inside its sample of every row of an axis: offsets [B + 1] -> int32 [total].
positions = define("positions(Tensor offsets, SymInt total) -> Tensor", _positions, _vector_fake)


def _ranges(first: Tensor, splits: Tensor, total: int) -> Tensor:
    xp = _namespace(splits)
    ends, start = xp.load(splits), xp.load(first)
    return xp.store(xp.arange(total, ends) + xp.repeat(start - ends[:-1], ends[1:] - ends[:-1], total))


def _ranges_fake(first: Tensor, splits: Tensor, total: int) -> Tensor:
    return splits.new_empty((total,), dtype=torch.int32)


#: Runs of consecutive numbers: run ``r`` counts up from ``first[r]`` and fills ``splits[r]`` to
#: ``splits[r + 1]`` of the result, int32 [total].
ranges = define("ranges(Tensor first, Tensor splits, SymInt total) -> Tensor", _ranges, _ranges_fake)


def _interleave(offsets: Sequence[Tensor], total: int) -> Tensor:
    xp = _namespace(offsets[0])
    parts = xp.stack([xp.load(part) for part in offsets])
    runs = (parts[:, 1:] - parts[:, :-1]).T.reshape(-1)
    first = (parts[:, :-1] + xp.starts(parts[:, -1])[:, None]).T.reshape(-1)
    return xp.store(xp.arange(total, runs) + xp.repeat(first - xp.starts(runs), runs, total))


def _interleave_fake(offsets: Sequence[Tensor], total: int) -> Tensor:
    return offsets[0].new_empty((total,), dtype=torch.int32)


#: Rows of several axes of one batch, one axis after the other, brought together by sample: the offsets
#: [B + 1] of each axis, the rows of all -> int32 [total], where each row of the result comes from.
interleave = define("interleave(Tensor[] offsets, SymInt total) -> Tensor", _interleave, _interleave_fake)


def _invert(index: Tensor) -> Tensor:
    if index.device.type == "cpu":
        inverse = np.empty(index.shape[0], dtype=np.int32)
        inverse[index.numpy()] = np.arange(index.shape[0], dtype=np.int32)
        return torch.from_numpy(inverse)
    inverse_t = torch.empty_like(index)
    inverse_t[index] = torch.arange(index.shape[0], dtype=torch.int32, device=index.device)
    return inverse_t


#: The inverse of a permutation int32 [n].
invert = define("invert(Tensor index) -> Tensor", _invert, torch.empty_like)


def _splits(samples: Tensor, reduced: Sequence[Tensor]) -> Tensor:
    cells: Any = 1
    for offsets in reduced:
        loaded = _namespace(samples).load(offsets)
        cells = cells * (loaded[1:] - loaded[:-1])
    if samples.device.type == "cpu":
        out = np.zeros(samples.shape[0] + 1, dtype=np.int32)
        np.cumsum(cells[samples.numpy()] if reduced else np.ones_like(samples.numpy()), out=out[1:])
        return torch.from_numpy(out)
    rows = cells[samples] if reduced else torch.ones_like(samples)
    return torch.nn.functional.pad(rows.cumsum(0, dtype=torch.int32), (1, 0))


def _splits_fake(samples: Tensor, reduced: Any) -> Tensor:
    return samples.new_empty((samples.shape[0] + 1,), dtype=torch.int32)


#: Offsets int32 [rows + 1] of the cells that belong to each row of a grid, when a larger grid's cells are
#: ordered by those rows first: ``samples`` [rows] names each row's sample, ``reduced`` holds the offsets
#: of the larger grid's other axes.
splits = define("splits(Tensor samples, Tensor[] reduced) -> Tensor", _splits, _splits_fake)


def firsts(offsets: Tensor, rows: int) -> Tensor:
    """Where each row's cells begin: offsets [rows + 1] without the last."""
    if torch.compiler.is_compiling():
        torch._check(offsets.shape[0] == rows + 1)
    return offsets.narrow(0, 0, rows)


def counts(offsets: Tensor, rows: int) -> Tensor:
    """Differences of offsets [rows + 1] -> int32 [rows]."""
    begin = firsts(offsets, rows)
    return offsets.narrow(0, 1, rows) - begin


# ------------------------------------------------------------------ checks


def first_difference(a: Tensor, b: Tensor) -> str | None:
    """Where two host length vectors differ, in words; None where they agree."""
    left, right = a.numpy(), b.numpy()
    if left.shape != right.shape:
        return f"batches of {left.shape[0]} and {right.shape[0]} samples"
    if np.array_equal(left, right):
        return None
    sample = int(np.nonzero(left != right)[0][0])
    return f"sample {sample} has {int(left[sample])} and {int(right[sample])} along it"


def _check_same(a: Tensor, b: Tensor, what: str) -> None:
    difference = first_difference(a, b)
    if difference is not None:
        raise ValueError(f"{what}: the structures differ: {difference}")


def _check_longer(lengths: Tensor, least: int, what: str) -> None:
    host = lengths.numpy()
    if np.count_nonzero(host if least == 1 else host >= least) < len(host):
        sample = int(np.argmax(host < least))
        raise IndexError(f"{what}: sample {sample} has {int(lengths[sample])} positions, {least} are needed")


check_same = define("check_same(Tensor a, Tensor b, str what) -> ()", _check_same, lambda a, b, what: None)
check_longer = define(
    "check_longer(Tensor lengths, int least, str what) -> ()",
    _check_longer,
    lambda lengths, least, what: None,
)


def _check_not_single(counts: Tensor, what: str) -> None:
    single = np.nonzero(counts.numpy() == 1)[0]
    if len(single):
        raise ValueError(what.format(sample=int(single[0])))


#: Raise ValueError where one of ``counts``, on the host, is 1; ``what`` is the message, with ``{sample}``.
check_not_single = define(
    "check_not_single(Tensor counts, str what) -> ()", _check_not_single, lambda counts, what: None
)
mark_effectful("check_not_single")
mark_effectful("check_same")
mark_effectful("check_longer")


def _check_inside(index: Tensor, lengths: Tensor, sample_ids: Tensor, what: str) -> None:
    limits = lengths.index_select(0, sample_ids).view(-1, *[1] * (index.dim() - 1))
    outside = (index < 0) | (index >= limits)
    if index.device.type != "cpu":
        torch._assert_async(~outside.any())
    elif outside.any():
        first = outside.nonzero()[0]
        sample = int(sample_ids[first[0]])
        raise IndexError(
            f"{what}: position {int(index[tuple(first)])} in sample {sample}, which has "
            f"{int(lengths[sample])} positions"
        )


#: Raise where ``index`` [rows, *] is not a position of the row's sample; ``lengths`` [B] on the device.
check_inside = define(
    "check_inside(Tensor index, Tensor lengths, Tensor sample_ids, str what) -> ()",
    _check_inside,
    lambda index, lengths, sample_ids, what: None,
)
mark_effectful("check_inside")


def _select_mask(mask: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    index = mask.nonzero().squeeze(1)
    bounds = torch.searchsorted(index, offsets.long()).to(torch.int32)
    lengths = (bounds[1:] - bounds[:-1]).long().cpu()
    return lengths, bounds, extent(index.shape[0]), extent(int(lengths.numpy().max(initial=0))), index


def _select_mask_fake(mask: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
    context = torch.library.get_ctx()
    total, longest = context.new_dynamic_size(), context.new_dynamic_size()
    return (
        torch.empty((offsets.shape[0] - 1,), dtype=torch.int64, device="cpu"),
        torch.empty_like(offsets),
        torch.empty((total, 0), device="cpu"),
        torch.empty((longest, 0), device="cpu"),
        mask.new_empty((total,), dtype=torch.int64),
    )


#: The entries that ``mask`` [n] chooses from samples that begin at ``offsets`` [B + 1] -> (lengths [B],
#: offsets, extent, peak of the axis of chosen entries, index of the chosen int64 [total]). Reads the
#: mask on the host, for the lengths.
select_mask = define(
    "select_mask(Tensor mask, Tensor offsets) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _select_mask,
    _select_mask_fake,
)

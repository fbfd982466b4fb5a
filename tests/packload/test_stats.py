import numpy as np
import pytest

from packload import Collate, Loader
from packload.stats import Recorder, Stats

from .samples import Ragged, batches, by_hand

LENGTHS = [[3, 1, 5], [2, 2], [0], [3, 1, 5], [0, 0]]


class Pairs:
    """Sequences and pairs over one axis, lengths by batch and sample."""

    def __getitem__(self, index):
        batch, k = divmod(index, 10)
        n = LENGTHS[batch][k]
        return {"x": np.zeros((n, 2), np.float32), "pair": np.zeros((n, n), np.int64)}


def loader_of(**options):
    sampler = [[10 * b + k for k in range(len(lengths))] for b, lengths in enumerate(LENGTHS)]
    return Loader(Pairs(), sampler, Collate({"x": "n _", "pair": "n n"}), **options)


@pytest.mark.parametrize("together", [1, 2, 256])
@pytest.mark.parametrize(
    "options", [{"workers": 0}, {"workers": 2}, {"workers": 1, "mode": "process", "context": "fork"}]
)
def test_cells_and_shapes_are_those_of_the_samples(options, together, monkeypatch):
    monkeypatch.setattr("packload.stats._TOGETHER", together)
    loader = loader_of(**options)
    nbytes = sum(batch.nbytes for batch in loader)
    stats = loader.stats()
    rows = sum(map(sum, LENGTHS))
    pairs = sum(n * n for lengths in LENGTHS for n in lengths)
    assert (stats.batches, stats.samples, stats.positions) == (5, 11, rows + pairs)
    assert stats.bytes == nbytes and stats.copied_per_byte == 1.0 and stats.shapes == 4
    padded = sum(len(lengths) * max(lengths) for lengths in LENGTHS)
    padded_pairs = sum(len(lengths) * max(lengths) ** 2 for lengths in LENGTHS)
    assert stats.occupancy == {"n": rows / padded, "n x n": pairs / padded_pairs}
    assert stats.seconds > 0 and stats.samples_per_second == pytest.approx(11 / stats.seconds)
    assert stats.positions_per_second == pytest.approx((rows + pairs) / stats.seconds)
    assert stats.bytes_per_second == pytest.approx(nbytes / stats.seconds)
    assert set(stats.stages) == {"wait", "full", "draw", "fetch", "collate"}
    assert all(0 <= times.p50 <= times.p99 <= times.total for times in stats.stages.values())


def test_figures_are_of_the_latest_pass():
    loader = loader_of(workers=1)
    assert loader.stats() == Stats() and loader.stats().samples_per_second == 0.0
    list(loader)
    for k, _ in enumerate(loader):
        if k == 1:
            break
    assert loader.stats().batches == 2 and loader.stats().overflows == 0


def test_overflows_are_counted_and_in_processes_copied():
    options = {"workers": 1, "prefetch": 1, "hold": 1}
    loader = Loader(Ragged(), batches(), **options)
    kept = list(loader)
    assert loader.stats().overflows == len(kept) - 2 and loader.stats().copied_per_byte == 1.0
    loader = Loader(Ragged(), batches(), mode="process", context="fork", **options)
    kept = list(loader)
    stats = loader.stats()
    assert stats.overflows == len(kept) - 2
    assert stats.copied_per_byte == pytest.approx(1 + sum(b.nbytes for b in kept[2:]) / stats.bytes)


def test_bytes_of_other_objects_are_those_of_their_tensors():
    loader = Loader(Ragged(), batches(), by_hand)
    nbytes = sum(batch["x"].nbytes for batch in loader)
    stats = loader.stats()
    assert (stats.bytes, stats.samples, stats.positions) == (nbytes, 40, 0)


def test_skipped_samples_are_those_that_the_sampler_or_the_dataset_tells():
    class Skipping(list):
        skipped = 3

    class Counting(list):
        counts = {"skipped": 5}

    assert Loader(Ragged(), Skipping([[1]])).stats().skipped == 3
    assert Loader(Ragged(), Counting([[1]])).stats().skipped == 5
    dataset = Ragged()
    dataset.skipped = 2
    assert Loader(dataset, [[1]]).stats().skipped == 2
    assert Loader(Ragged(), [[1]]).stats().skipped == 0


def test_percentiles_are_of_the_times_noted():
    recorder = Recorder()
    recorder.asked()
    for k in range(101):
        recorder.handed_out([], [0], [("wait", float(k))], 1)
    times = recorder.stats(0, 0, 0).stages["wait"]
    assert times == (50.0, 99.0, 5050.0)


def test_figures_print():
    loader = loader_of()
    list(loader)
    text = str(loader.stats())
    assert "5 batches, 11 samples" in text and "n x n" in text and "collate" in text
    assert "occupancy -" in str(Stats())

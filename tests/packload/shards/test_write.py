import errno
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset as wds
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from packload.shards import ShardError, ShardWriter, UnsafeShardError
from packload.shards.index import ShardIndex, build_index
from packload.shards.write import parse_size, read_whole


def read_by_webdataset(folder, **arguments):
    urls = sorted(map(str, Path(folder).glob("*.tar")))
    return list(wds.WebDataset(urls, shardshuffle=False, **arguments).decode("rgb8")) if urls else []


def write(folder, samples, **arguments):
    with ShardWriter(folder, **arguments) as writer:
        for sample in samples:
            writer.write(sample)
    return writer


texts = st.text(st.characters(blacklist_categories=("Cs",)), max_size=300)


@settings(max_examples=30)
@given(
    samples=st.lists(st.tuples(texts, st.integers()), max_size=12), size=st.sampled_from([4096, 9000, "1MB"])
)
def test_webdataset_reads_what_is_written(samples, size, tmp_path_factory):
    folder = tmp_path_factory.mktemp("x")
    write(folder, [{"txt": text, "cls": label} for text, label in samples], size=size)
    found = read_by_webdataset(folder)
    assert [(s["__key__"], s["txt"], s["cls"]) for s in found] == [
        (f"{i:09d}", text, label) for i, (text, label) in enumerate(samples)
    ]


def test_values_of_every_kind_come_back_through_webdataset(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    sample = {
        "__key__": "dir.1/a",
        "png": Image.fromarray(pixels),
        "more.png": torch.from_numpy(pixels).permute(2, 0, 1),
        "npy": np.arange(6.0).reshape(2, 3),
        "ids.npy": torch.tensor([1, 2]),
        "list.npy": [1.5, 2.5],
        "npz": {"a": [1], "b": torch.zeros(2)},
        "json": {"a": [1, "ü"]},
        "raw": b"\xff\x00",
        "txt": "",
        "cls": True,
    }
    write(tmp_path, [sample])
    (found,) = read_by_webdataset(tmp_path)
    assert found["__key__"] == "dir.1/a" and found["json"] == sample["json"] and found["raw"] == sample["raw"]
    assert (found["png"] == pixels).all() and (found["more.png"] == pixels).all()
    assert (found["npy"] == sample["npy"]).all() and found["ids.npy"].tolist() == [1, 2]
    assert found["list.npy"].tolist() == [1.5, 2.5] and found["npz"]["a"].tolist() == [1]
    assert found["txt"] == "" and found["cls"] == 1


def test_the_index_is_that_of_the_archive(tmp_path):
    samples = [{"txt": "x" * i, "npy": np.zeros((i, 2))} for i in range(30)]
    writer = write(tmp_path, samples, size=12_000)
    assert len(writer.indexes) > 3 and writer.written == 30
    for number, index in enumerate(writer.indexes):
        path = tmp_path / f"shard-{number:06d}.tar"
        with open(path, "rb") as stream:
            assert build_index(stream, path.name, path.stat().st_size).to_bytes() == index.to_bytes()
        assert path.with_name(f"shard-{number:06d}.index.npz").read_bytes() == index.to_bytes()


@pytest.mark.parametrize("count, sizes", [(1, [1] * 7), (3, [3, 3, 1]), (100, [7])])
def test_shards_of_a_number_of_samples(tmp_path, count, sizes):
    writer = write(tmp_path, [{"txt": "x"}] * 7, count=count)
    assert [len(index) for index in writer.indexes] == sizes


def test_no_shard_is_over_its_size_unless_it_is_one_sample(tmp_path):
    rng = np.random.default_rng(0)
    writer = write(tmp_path, [{"raw": bytes(int(n))} for n in rng.integers(0, 9000, 60)], size=12_000)
    for index in writer.indexes:
        assert index.tar_bytes <= 12_000 or len(index) == 1
    assert any(len(index) > 1 for index in writer.indexes)
    big = write(tmp_path / "big", [{"raw": bytes(50_000)}, {"raw": b"x"}], size=12_000)
    assert [len(index) for index in big.indexes] == [1, 1]


def test_own_lengths_are_columns_of_the_index(tmp_path):
    with ShardWriter(tmp_path) as writer:
        writer.write({"txt": "x"}, lengths={"tokens": 17})
        writer.write({"txt": "xy"}, lengths={"tokens": 4})
    assert writer.indexes[0].column("tokens").tolist() == [17, 4]


def test_threads_write_the_same_bytes(tmp_path):
    rng = np.random.default_rng(0)
    samples = [{"png": rng.integers(0, 256, (9, 9), np.uint8), "cls": i} for i in range(50)]
    for workers in (0, 3):
        write(tmp_path / str(workers), samples, size=20_000, workers=workers)
    names = sorted(path.name for path in (tmp_path / "0").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "3").iterdir()) and len(names) > 4
    for name in names:
        assert (tmp_path / "0" / name).read_bytes() == (tmp_path / "3" / name).read_bytes()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "wrong, error",
    [
        ({"txt": 3}, r"sample '000000005', field 'txt': int cannot be written so"),
        ({"obj": {}}, "field 'obj': dict"),
        ({"npy": np.array([{}])}, "a pickle"),
        ({"png": np.zeros((2, 2))}, "float64 of 2 dims is not an image"),
        ({"TXT": "x"}, "lower-case"),
        ({"a/b": b"x"}, "field 'a/b'"),
        ({"cls": "x"}, "field 'cls'"),
        ({}, "no field to write"),
        ({"__key__": "a.b", "txt": "x"}, "'a.b'.*has no dot"),
        ({"__key__": "", "txt": "x"}, "not empty"),
        ({"__key__": "000000003", "txt": "x"}, "was there before"),
        ({"__key__": "000000004", "txt": "x"}, "the sample before it has the same key"),
        ({"__key__": "000000004", "cls": 1}, "the sample before it has the same key"),
        ({"png": b"nonsense"}, "not an image"),
    ],
)
def test_a_wrong_sample_is_named_and_what_is_whole_stays(tmp_path, workers, wrong, error):
    with pytest.raises(ShardError, match=error):
        with ShardWriter(tmp_path, count=3, workers=workers) as writer:
            for i in range(5):
                writer.write({"__key__": f"{i:09d}", "txt": f"{i}"})
            writer.write({"__key__": f"{5:09d}", **wrong})
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["shard-000000.index.npz", "shard-000000.tar"] or (workers and not left)


def test_keys_that_lead_outside_are_refused(tmp_path):
    with pytest.raises(UnsafeShardError, match="leads outside"):
        write(tmp_path, [{"__key__": "../a", "txt": "x"}])
    assert not list(tmp_path.iterdir())


def test_an_error_in_the_block_keeps_whole_shards_and_drops_the_one_begun(tmp_path):
    with pytest.raises(RuntimeError):
        with ShardWriter(tmp_path, count=2) as writer:
            for i in range(5):
                writer.write({"txt": f"{i}"})
            raise RuntimeError
    assert [s["txt"] for s in read_by_webdataset(tmp_path)] == ["0", "1", "2", "3"]
    assert len(list(tmp_path.iterdir())) == 4


def samples_of(number):
    return [{"txt": f"text {i} " * (i % 7), "cls": i} for i in range(number)]


def test_what_was_stopped_goes_on_and_ends_as_if_it_had_not(tmp_path):
    write(tmp_path / "whole", samples_of(40), size=6000)
    with pytest.raises(RuntimeError):
        with ShardWriter(tmp_path / "parts", size=6000) as writer:
            for sample in samples_of(23):
                writer.write(sample)
            raise RuntimeError
    kept = writer.written
    assert 0 < kept < 23
    with ShardWriter(tmp_path / "parts", size=6000, resume=True) as writer:
        assert writer.written == kept
        for sample in samples_of(40):
            writer.write(sample)
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "parts").iterdir())
    for name in names:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()


def test_resuming_with_other_samples_or_fewer_is_refused(tmp_path):
    write(tmp_path, samples_of(10), count=2)
    with pytest.raises(FileExistsError, match="resume=True"):
        ShardWriter(tmp_path)
    with pytest.raises(
        ShardError, match="sample 0 has the key 'other', and 'shard-000000.tar' has '000000000'"
    ):
        write(tmp_path, [{"__key__": "other", "txt": ""}], resume=True)
    with pytest.raises(ShardError, match="it has 10 samples, and only 3 were given"):
        write(tmp_path, samples_of(3), resume=True)
    assert len(read_by_webdataset(tmp_path)) == 10


def test_more_samples_follow_behind_whole_shards(tmp_path):
    write(tmp_path, samples_of(4), count=2)
    write(tmp_path, samples_of(7), count=2, resume=True)
    assert [s["cls"] for s in read_by_webdataset(tmp_path)] == list(range(7))


def test_an_archive_without_its_index_is_not_taken_for_whole(tmp_path):
    write(tmp_path, samples_of(4), count=2)
    (tmp_path / "shard-000001.index.npz").unlink()
    with pytest.raises(FileExistsError, match="'shard-000001.tar' is there, but not as a whole shard"):
        ShardWriter(tmp_path, resume=True)


def write_many(folder):
    write(folder, samples_of(2000), size=200_000, resume=True)


def test_a_run_killed_anywhere_leaves_only_whole_shards_and_can_go_on(tmp_path):
    kills, code, trial = 0, None, 0
    while code != 0:
        process = multiprocessing.get_context("fork").Process(target=write_many, args=(tmp_path,))
        process.start()
        process.join(0.02 + 0.007 * (trial % 20))
        process.kill()
        process.join()
        code, trial = process.exitcode, trial + 1
        kills += code == -signal.SIGKILL
        for path in tmp_path.glob("*.tar"):
            index = read_whole(path)
            with tarfile.open(path) as tar:
                assert index is not None and len(tar.getnames()) == 2 * len(index)
        assert code in (0, -signal.SIGKILL) and trial < 200
    assert kills > 3
    assert [s["cls"] for s in read_by_webdataset(tmp_path)] == list(range(2000))


@pytest.mark.parametrize(
    "size, bytes_", [(5000, 5000), ("256MB", 256 * 10**6), ("1 GiB", 1 << 30), ("1.5kB", 1500), ("7", 7)]
)
def test_sizes_as_text(size, bytes_):
    assert parse_size(size) == bytes_


@pytest.mark.parametrize("size", ["", "MB", "-5", 0, "5 light years", "0.1"])
def test_sizes_that_cannot_be_read(size, tmp_path):
    with pytest.raises(ValueError, match="'256MB'"):
        ShardWriter(tmp_path, size=size)


@pytest.mark.parametrize("pattern", ["shard.tar", "shard-{:06d}", "a-{:03d}.zip"])
def test_patterns_that_name_no_shards(pattern, tmp_path):
    with pytest.raises(ValueError, match="give a place for the number"):
        ShardWriter(tmp_path, pattern=pattern)


def test_a_count_of_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one sample"):
        ShardWriter(tmp_path, count=0)


def test_archives_carry_no_owner_and_no_date(tmp_path):
    write(tmp_path, [{"txt": "x"}])
    with tarfile.open(tmp_path / "shard-000000.tar") as tar:
        (info,) = tar.getmembers()
    assert (info.mtime, info.uid, info.gid, info.uname, info.gname) == (0, 0, 0, "", "")


def test_jpegs_are_close_to_what_was_given(tmp_path):
    rows = np.linspace(0, 255, 64, dtype=np.uint8)
    pixels = np.stack([np.tile(rows, (48, 1))] * 3, 2)
    write(tmp_path, [{"jpg": Image.fromarray(pixels)}])
    (found,) = read_by_webdataset(tmp_path)
    assert np.abs(found["jpg"].astype(int) - pixels).max() <= 4


def test_the_index_of_a_shard_is_json_and_arrays(tmp_path):
    write(tmp_path, samples_of(3))
    path = tmp_path / "shard-000000.index.npz"
    with np.load(path, allow_pickle=False) as arrays:
        told = json.loads(bytes(arrays["header"]))
    assert told["samples"] == 3 and told["tar"] == "shard-000000.tar"
    assert told["tar_bytes"] == os.path.getsize(tmp_path / "shard-000000.tar")
    assert ShardIndex.from_bytes(path.read_bytes(), str(path)).key(2) == "000000002"


def test_a_sample_that_is_refused_leaves_nothing_behind(tmp_path):
    wrong = [
        {"__key__": "b", "txt": "x", "png": b"nonsense"},
        {"__key__": "a", "cls": 1},
        {"__key__": "c\0d", "txt": "x"},
    ]
    with ShardWriter(tmp_path) as writer:
        writer.write({"__key__": "a", "txt": "first"})
        for sample in wrong:
            with pytest.raises(ShardError):
                writer.write(sample)
        writer.write({"__key__": "b", "txt": "last"})
    found = [
        (s["__key__"], sorted(s.keys() - {"__key__", "__url__", "__local_path__"}), s["txt"])
        for s in read_by_webdataset(tmp_path)
    ]
    assert found == [("a", ["txt"], "first"), ("b", ["txt"], "last")]
    path = tmp_path / "shard-000000.tar"
    with open(path, "rb") as stream:
        again = build_index(stream, path.name, path.stat().st_size)
    assert again.digest() == writer.indexes[0].digest() and (again.start == writer.indexes[0].start).all()


def test_a_closed_writer_takes_nothing_more(tmp_path):
    writer = write(tmp_path, samples_of(2))
    assert writer.close() == writer.indexes
    with pytest.raises(ValueError, match="is closed"):
        writer.write({"txt": "x"})


def test_labels_that_are_no_integers_are_not_cut(tmp_path):
    with pytest.raises(ShardError, match="field 'cls': .*3.7 is not an integer"):
        write(tmp_path, [{"cls": 3.7}])


def test_what_killed_runs_left_is_removed_and_what_others_write_is_not(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    old, new = (tmp_path / f"shard-000007.tar.{number}.part" for number in (gone.pid, os.getpid()))
    other = tmp_path / "notes.part"
    for path in (old, new, other):
        path.write_bytes(b"x")
    write(tmp_path, samples_of(2))
    assert not old.exists() and new.exists() and other.exists()


def write_limited(folder):
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        write(folder, [{"raw": bytes(1000)}] * 300)
    except OSError as error:
        os._exit(3 if error.errno == errno.EFBIG else 4)


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=write_limited, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == 3 and not list(tmp_path.iterdir())

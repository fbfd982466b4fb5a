import json
import os
import subprocess
import warnings
from pathlib import Path

import numpy as np
import pytest
import webdataset as wds

from packload.shards import ShardError, UnsafeShardError
from packload.shards.convert import list_source, shard
from packload.shards.index import ShardIndex, index_name

from .tars import make_tar


def folder_of(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def read(folder):
    urls = sorted(map(str, Path(folder).glob("*.tar")))
    return [
        {k: v for k, v in s.items() if k not in ("__url__", "__local_path__")}
        for s in wds.WebDataset(urls, shardshuffle=False)
    ]


def test_files_of_one_key_are_one_sample(tmp_path):
    source = folder_of(
        tmp_path / "in",
        {
            "b/1.txt": b"x",
            "b/1.seg.png.bin": b"p",
            "a/2.TXT": b"y",
            "a/2.cls": b"3",
            ".hidden.txt": b"",
            "README": b"",
        },
    )
    with pytest.warns(UserWarning, match="files in no sample: .*'hidden': 1.*|.*'no ending': 1"):
        indexes = shard(source, tmp_path / "out")
    assert read(tmp_path / "out") == [
        {"__key__": "a/2", "cls": b"3", "txt": b"y"},
        {"__key__": "b/1", "seg.png.bin": b"p", "txt": b"x"},
    ]
    assert [len(index) for index in indexes] == [2]


def test_folders_as_classes(tmp_path):
    source = folder_of(tmp_path / "in", {"dog/1.txt": b"", "cat/1.txt": b"", "cat/2.txt": b""})
    shard(source, tmp_path / "out", classes=True)
    assert [(s["__key__"], s["cls"]) for s in read(tmp_path / "out")] == [
        ("cat/1", b"0"),
        ("cat/2", b"0"),
        ("dog/1", b"1"),
    ]


def test_classes_need_folders_and_a_free_field(tmp_path):
    with pytest.raises(ShardError, match="'1' lies in no folder"):
        shard(folder_of(tmp_path / "a", {"1.txt": b""}), tmp_path / "out", classes=True)
    with pytest.raises(ShardError, match="'x/1' has a field 'cls' already"):
        shard(folder_of(tmp_path / "b", {"x/1.cls": b"1"}), tmp_path / "out", classes=True)


def test_lines_are_samples(tmp_path):
    lines = [json.dumps({"text": "é" * i, "label": i}).encode() for i in range(20)]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*lines[:7], b"", b"  ", *lines[7:]]) + b"\r\n")
    indexes = shard(tmp_path / "a.jsonl", tmp_path / "out", size=8000)
    assert len(indexes) > 1
    assert [s["json"] for s in read(tmp_path / "out")] == lines
    lengths = np.concatenate([index.column("json.text") for index in indexes])
    assert lengths.tolist() == list(range(20))


def test_archives_are_divided_anew(tmp_path):
    for name in ("a", "b"):
        make_tar(tmp_path / f"{name}.tar", {f"{i:03d}.txt": f"{name}{i}".encode() for i in range(10)})
    indexes = shard(str(tmp_path / "*.tar"), tmp_path / "out", size=6000)
    found = read(tmp_path / "out")
    assert len(indexes) > 2
    assert [s["txt"].decode() for s in found] == [f"{name}{i}" for name in "ab" for i in range(10)]
    assert found[0]["__key__"] == "a/000" and found[-1]["__key__"] == "b/009"


def test_mixed_by_a_seed(tmp_path):
    source = folder_of(tmp_path / "in", {f"{i:03d}.txt": b"%d" % i for i in range(50)})
    orders = []
    for seed in (0, 0, 1):
        shard(source, tmp_path / f"out{len(orders)}", shuffle=seed, size=20_000)
        orders.append([int(s["txt"]) for s in read(tmp_path / f"out{len(orders)}")])
    assert orders[0] == orders[1] != orders[2] and sorted(orders[0]) == list(range(50))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_processes_write_the_same_files_and_shards_keep_their_size(tmp_path, workers):
    rng = np.random.default_rng(0)
    source = folder_of(
        tmp_path / "in", {f"{'n' * (80 + i)}/{i}.bin": bytes(int(rng.integers(3000))) for i in range(60)}
    )
    done = []
    one = shard(source, tmp_path / "1", size=20_000, progress=lambda *told: done.append(told))
    shard(source, tmp_path / "2", size=20_000, workers=workers)
    assert done == [(i + 1, len(one)) for i in range(len(one))]
    assert all(index.tar_bytes <= 20_000 for index in one)
    for path in (tmp_path / "1").iterdir():
        assert path.read_bytes() == (tmp_path / "2" / path.name).read_bytes()


def test_what_was_stopped_can_be_called_again(tmp_path):
    source = folder_of(tmp_path / "in", {f"{i:03d}.txt": b"x" * 900 for i in range(30)})
    shard(source, tmp_path / "out", size=10_000)
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    kept = (tmp_path / "out" / "shard-000000.tar").stat().st_mtime_ns
    (tmp_path / "out" / "shard-000001.tar").unlink()
    (tmp_path / "out" / "shard-000002.index.npz").unlink()
    shard(source, tmp_path / "out", size=10_000)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == files
    assert (tmp_path / "out" / "shard-000000.tar").stat().st_mtime_ns == kept


def test_shards_of_something_else_are_not_overwritten(tmp_path):
    source = folder_of(tmp_path / "in", {f"{i:03d}.txt": b"x" * 900 for i in range(30)})
    shard(source, tmp_path / "out", size=10_000)
    with pytest.raises(
        FileExistsError, match="'.*shard-000001.tar' is there, and what is written now has fewer"
    ):
        shard(source, tmp_path / "out", size=10**9)
    (source / "000.txt").write_bytes(b"y" * 900)
    with pytest.raises(
        FileExistsError, match="shard-000000.tar' is there and was written from something else"
    ):
        shard(source, tmp_path / "out", size=10_000)


def test_an_unreadable_sample_leaves_no_part_of_its_shard(tmp_path):
    source = folder_of(tmp_path / "in", {"1.txt": b"x", "2.png": b"no picture"})
    with pytest.raises(ShardError, match="member '2.png': not an image"):
        shard(source, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_sources_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        list_source(tmp_path / "nowhere")
    (tmp_path / "a.csv").write_text("a,b")
    with pytest.raises(ShardError, match="not a folder, a .jsonl file or .tar archives"):
        list_source(tmp_path / "a.csv")
    with pytest.raises(ShardError, match="has no samples"):
        with warnings.catch_warnings():
            list_source(folder_of(tmp_path / "empty", {"README": b""}))


def test_dots_in_many_names_are_noticed(tmp_path):
    source = folder_of(tmp_path / "in", {f"IMG.{i}.bin": b"" for i in range(70)})
    with pytest.raises(ShardError, match="70 different endings"):
        list_source(source)


def test_an_unsafe_archive_is_not_divided(tmp_path):
    make_tar(tmp_path / "a.tar", {"../a.txt": b"x"})
    with pytest.raises(UnsafeShardError, match="'a.tar', member '../a.txt'"):
        shard(tmp_path / "a.tar", tmp_path / "out")


def test_indexes_lie_beside_the_shards(tmp_path):
    (made,) = shard(folder_of(tmp_path / "in", {"1.txt": b"a b"}), tmp_path / "out")
    path = index_name(str(tmp_path / "out" / "shard-000000.tar"))
    assert ShardIndex.from_bytes(Path(path).read_bytes(), path).digest() == made.digest()


def test_names_that_are_not_ascii_or_not_unicode_keep_to_the_size(tmp_path):
    names = [f"é{i}.txt".encode() for i in range(40)] + [b"\xff.txt", b"d" * 200 + b".txt"]
    (tmp_path / "in").mkdir()
    for name in names:
        Path(os.fsdecode(os.path.join(os.fsencode(tmp_path / "in"), name))).write_bytes(b"x")
    indexes = shard(tmp_path / "in", tmp_path / "out", size=20_000)
    assert sum(map(len, indexes)) == 42 and max(index.tar_bytes for index in indexes) <= 20_000
    found = {index.key(i) for index in indexes for i in range(len(index))}
    assert found == {os.fsdecode(name.removesuffix(b".txt")) for name in names}


def test_what_a_killed_conversion_left_is_removed(tmp_path):
    source = folder_of(tmp_path / "in", {"a.txt": b"x"})
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / f"shard-000000.tar.{gone.pid}.part").write_bytes(b"x")
    shard(source, tmp_path / "out")
    assert len(list((tmp_path / "out").iterdir())) == 2

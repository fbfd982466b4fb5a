import pickle
import shutil
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import packload
from packload.shards import DamagedShardError, ShardDataset, ShardError, ShardWriter, index_name
from packload.shards.indexing import index_shards

from .tars import index_it, make_shards, make_tar
from .web import Web


@pytest.fixture
def three(tmp_path):
    """Case 17's shards: 3 of 10 samples."""
    return make_shards(tmp_path, 3, 10)


def expected(i):
    s, k = divmod(i, 10)
    return {"__key__": f"s{s}-{k:03d}", "txt": " ".join(["word"] * (k + 1)), "cls": s}


def test_any_sample_by_its_number(three):
    data = ShardDataset(three)
    assert len(data) == 30 and [data[i] for i in range(30)] == [expected(i) for i in range(30)]
    assert data[-1] == expected(29) and data.key(17) == "s1-007"
    for i in (30, -31):
        with pytest.raises(IndexError, match="of 30"):
            data[i]
    with pytest.raises(IndexError):
        data.__getitems__([0, -1])


@settings(max_examples=50)
@given(order=st.lists(st.integers(0, 29), max_size=40))
def test_many_samples_in_the_order_asked_for(order, tmp_path_factory):
    data = ShardDataset(make_shards(tmp_path_factory.mktemp("x"), 3, 10))
    assert data.__getitems__(order) == [expected(i) for i in order]
    assert data.__getitems__(np.array(order, np.int64)) == [expected(i) for i in order]


def test_chosen_fields_and_a_function_of_the_sample(three):
    data = ShardDataset(three, fields=["cls"], map=lambda sample: (sample["__key__"], sample["cls"]))
    assert data[12] == ("s1-002", 1)
    with pytest.raises(ShardError, match=r"no shard has a field 'png'; they have \['cls', 'txt'\]"):
        ShardDataset(three, fields=["png"])


def test_members_that_are_left_out_are_not_read(tmp_path, three):
    content = bytearray(three[0].read_bytes())
    place = content.index(b"word")
    content[place : place + 4] = b"harm"
    three[0].write_bytes(content)
    assert ShardDataset(three, fields=["cls"])[0]["cls"] == 0
    with pytest.raises(DamagedShardError):
        ShardDataset(three)[0]


def test_lengths_of_all_samples_in_order(three):
    data = ShardDataset(three)
    assert data.columns == ("txt.chars", "txt.words")
    assert data.lengths("txt.words").tolist() == list(range(1, 11)) * 3
    assert packload.lengths(data, "txt.words").tolist() == list(range(1, 11)) * 3
    assert data.lengths("txt.bytes").tolist() == [len(expected(i)["txt"]) for i in range(30)]
    with pytest.raises(KeyError, match="has no lengths 'png.h'; it has .*'txt.words'.*'cls.bytes'"):
        data.lengths("png.h")


def test_a_sample_without_the_length_is_named(tmp_path):
    index_it(make_tar(tmp_path / "a.tar", {"a.txt": b"x", "b.cls": b"1"}))
    with pytest.raises(ValueError, match="shard 'a.tar': sample 'b' has no length 'txt.words'"):
        ShardDataset(tmp_path / "a.tar").lengths("txt.words")


def test_shards_without_samples(tmp_path):
    index_it(make_tar(tmp_path / "a.tar", {}))
    index_it(make_tar(tmp_path / "b.tar", {"x.txt": b"y"}))
    index_it(make_tar(tmp_path / "c.tar", {}))
    data = ShardDataset(sorted(tmp_path.glob("*.tar")))
    assert len(data) == 1 and data[0]["txt"] == "y" and data.lengths("txt.words").tolist() == [1]
    assert (
        len(ShardDataset(tmp_path / "a.tar")) == 0 and ShardDataset(tmp_path / "a.tar").__getitems__([]) == []
    )


def test_one_key_in_two_shards_is_two_samples(tmp_path):
    for name in ("a", "b"):
        index_it(make_tar(tmp_path / f"{name}.tar", {"x.txt": name.encode()}))
    data = ShardDataset(str(tmp_path / "*.tar"))
    assert [data[i]["txt"] for i in range(2)] == ["a", "b"]


def test_a_shard_or_an_index_that_is_missing(three):
    three[1].with_suffix(".index.npz").unlink()
    with pytest.raises(FileNotFoundError, match="000001.tar' has no index .*packload.index_shards"):
        ShardDataset(three)
    packload.index_shards(three)
    three[1].unlink()
    with pytest.raises(FileNotFoundError, match="000001.tar' is not there, but its index is"):
        ShardDataset(three)


def cut(path, part):
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content))])


def test_case_18_a_shard_that_was_cut_off_is_an_error_that_names_it(three):
    cut(three[1], 0.55)
    with pytest.raises(
        DamagedShardError, match=r"000001.tar': \d of 10 samples can be read: .*on_error='skip'"
    ):
        ShardDataset(three)


@pytest.mark.parametrize("part", [0.0, 0.2, 0.55, 0.9])
def test_case_18_with_tolerance_all_that_is_whole_is_read_and_told(three, part):
    whole = three[1].read_bytes()
    cut(three[1], part)
    size = three[1].stat().st_size
    whole_there = sum(whole.index(b"s1-%03d.cls" % k) + 512 + 1 <= size for k in range(10))
    with pytest.warns(UserWarning, match=rf"000001.tar': {whole_there} of 10 samples can be read"):
        data = ShardDataset(three, on_error="skip")
    (damage,) = data.damages
    assert (damage.read, damage.of, damage.shard) == (whole_there, 10, str(three[1]))
    left = [*range(10), *range(10, 10 + whole_there), *range(20, 30)]
    assert data.__getitems__(range(len(data))) == [expected(i) for i in left]
    assert data.lengths("txt.words").tolist() == [i % 10 + 1 for i in left]


def test_case_18_a_shard_that_was_cut_before_it_was_indexed(three):
    cut(three[1], 0.55)
    index_shards(three, again=True, tolerant=True)
    with pytest.raises(DamagedShardError, match="000001.tar': .* of an unknown number of samples"):
        ShardDataset(three)
    with pytest.warns(UserWarning, match="cut off already when it was indexed"):
        data = ShardDataset(three, on_error="skip")
    assert 20 < len(data) < 30 and data.damages[0].of is None
    assert data.__getitems__(range(len(data)))[10:-10] == [expected(10 + i) for i in range(len(data) - 20)]


def test_a_missing_shard_is_all_damage_with_tolerance(three):
    three[1].unlink()
    with pytest.warns(UserWarning, match="0 of 10"):
        data = ShardDataset(three, on_error="skip")
    assert data.__getitems__(range(20)) == [expected(i) for i in (*range(10), *range(20, 30))]


def test_a_shard_that_grew_is_not_the_one_indexed(three):
    make_tar(three[1], {f"x{i}.txt": b"x" * 999 for i in range(40)})
    for on_error in ("raise", "skip"):
        with pytest.raises(DamagedShardError, match="000001.tar': it has .*--again"):
            ShardDataset(three, on_error=on_error)


def damage_one(path, text=b"word word word word word", by=b"wOrd"):
    content = bytearray(path.read_bytes())
    place = content.index(text)
    content[place : place + 4] = by
    path.write_bytes(content)


def test_other_bytes_in_the_same_places_are_found_and_named(three):
    damage_one(three[2])
    data = ShardDataset(three)
    with pytest.raises(DamagedShardError, match="000002.tar', member 's2-004.txt': its bytes are not those"):
        data.__getitems__(range(30))
    assert ShardDataset(three, verify=False)[24]["txt"].startswith("wOrd")


def test_with_tolerance_unreadable_samples_are_left_out_and_counted(three):
    damage_one(three[2])
    data = ShardDataset(three, on_error="skip")
    with pytest.warns(UserWarning, match="sample skipped: .*'s2-004.txt'"):
        found = data.__getitems__(range(20, 30))
    assert found == [expected(i) for i in range(20, 30) if i != 24]
    assert data.skips == {str(three[2]): 1} and data.skipped == 1
    with pytest.warns(UserWarning), pytest.raises(DamagedShardError, match="none of the 1 samples"):
        data.__getitems__([24])


def test_a_sample_that_cannot_be_decoded_is_named_or_left_out(tmp_path):
    index_it(make_tar(tmp_path / "a.tar", {"a.cls": b"1", "b.cls": b"x", "c.cls": b"3"}))
    with pytest.raises(ShardError, match="a.tar', member 'b.cls': b'x' is not an integer"):
        ShardDataset(tmp_path / "a.tar").__getitems__([0, 1, 2])
    with pytest.warns(UserWarning, match="b.cls"):
        found = ShardDataset(tmp_path / "a.tar", on_error="skip").__getitems__([0, 1, 2])
    assert [sample["cls"] for sample in found] == [1, 3]


def test_wrong_arguments(three):
    with pytest.raises(ValueError, match="'raise' or 'skip'"):
        ShardDataset(three, on_error="ignore")
    with pytest.raises(ValueError, match="given twice"):
        ShardDataset([three[0], three[0]])


def test_from_threads_pickled_and_in_worker_processes(three):
    data = ShardDataset(three)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(data.__getitem__, range(30))) == [expected(i) for i in range(30)]
    assert pickle.loads(pickle.dumps(data)).__getitems__([3, 29]) == [expected(3), expected(29)]
    loader = DataLoader(data, batch_size=4, collate_fn=packload.collate, num_workers=2)
    assert [key for batch in loader for key in batch["__key__"]] == [
        expected(i)["__key__"] for i in range(30)
    ]


def test_over_http_with_a_cache_that_holds_other_bytes(tmp_path):
    (tmp_path / "www").mkdir()
    paths = make_shards(tmp_path / "www", 3, 10)
    with Web(tmp_path / "www") as web:
        urls = [web.url(path.name) for path in paths]
        for cache in (None, tmp_path / "cache"):
            data = ShardDataset(urls, cache=cache)
            assert data.__getitems__(range(30)) == [expected(i) for i in range(30)]
        blocks = [path for path in (tmp_path / "cache").glob("*/0*") if path.parent.name != "locks"]
        assert len(blocks) == 3
        for path in blocks:
            path.write_bytes(bytes(path.stat().st_size))
        assert ShardDataset(urls, cache=tmp_path / "cache").__getitems__(range(30)) == [
            expected(i) for i in range(30)
        ]
        damage_one(paths[1])
        shutil.rmtree(tmp_path / "cache")
        with pytest.raises(DamagedShardError, match="000001.tar', member 's1-004.txt'"):
            ShardDataset(urls, cache=tmp_path / "cache").__getitems__(range(30))


def test_indexes_of_remote_shards_lie_with_them_or_in_a_folder(tmp_path):
    (tmp_path / "www").mkdir()
    paths = make_shards(tmp_path / "www", 2, 10)
    with Web(tmp_path / "www") as web:
        urls = [web.url(path.name) for path in paths]
        assert [index.key(0) for index in index_shards(urls)] == ["s0-000", "s1-000"]
        for path in paths:
            path.with_suffix(".index.npz").unlink()
        with pytest.raises(FileNotFoundError, match="has no index"):
            ShardDataset(urls)
        with pytest.raises(ShardError, match="nothing can be written beside it.*--out"):
            index_shards(urls)
        index_shards(urls, out=tmp_path / "made")
        assert ShardDataset(urls, index=tmp_path / "made")[13] == expected(13)


def test_object_stores_through_fsspec():
    fs = fsspec.filesystem("memory")
    for s in range(2):
        content = {f"{s}-{i}.txt": b"x" * i for i in range(5)}
        with fs.open(f"/bucket/{s}.tar", "wb") as file:
            file.write(tar_bytes(content))
    index_shards("memory://bucket/*.tar")
    data = ShardDataset("memory://bucket/*.tar")
    assert [len(sample["txt"]) for sample in data.__getitems__(range(10))] == [0, 1, 2, 3, 4] * 2
    assert fs.exists(index_name("/bucket/0.tar"))


def tar_bytes(members):
    with tempfile.TemporaryDirectory() as folder:
        return make_tar(Path(folder) / "a.tar", members).read_bytes()


def test_the_fingerprint_is_that_of_the_samples_served(three):
    one, other = ShardDataset(three).fingerprint, ShardDataset(three[::-1]).fingerprint
    assert one == ShardDataset(three).fingerprint != other
    cut(three[1], 0.55)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert ShardDataset(three, on_error="skip").fingerprint != one


def test_images_and_arrays_become_packed_batches(tmp_path):
    rng = np.random.default_rng(0)
    with ShardWriter(tmp_path, count=3) as writer:
        for i in range(7):
            image = rng.integers(0, 256, (3, 4 + i, 9 - i), np.uint8)
            writer.write({"png": image, "npy": rng.random((i, 2)), "json": {"ids": list(range(i + 1))}})
    data = ShardDataset(str(tmp_path / "*.tar"))
    assert data.lengths("png.h").tolist() == [4 + i for i in range(7)]
    assert data.lengths("npy.0").tolist() == list(range(7)) == (data.lengths("json.ids") - 1).tolist()
    batch = packload.collate(data.__getitems__([6, 0, 3]))
    assert batch.png.values.dtype == torch.uint8 and batch.png.grid.axes[0].lengths.tolist() == [10, 4, 7]
    assert batch.npy.grid.axes[0].lengths.tolist() == [6, 0, 3]
    assert batch.json.ids.values.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 0, 1, 2, 3]

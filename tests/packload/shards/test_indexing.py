import pytest

from packload.shards import DamagedShardError, ShardDataset, ShardError, ShardWriter, UnsafeShardError
from packload.shards.indexing import index_shards

from .tars import make_tar


def vowels(content):
    return {"vowels": sum(content.count(v) for v in b"aeiou")}


def tars(folder, count=3):
    folder.mkdir(exist_ok=True)
    return [
        make_tar(folder / f"{s}.tar", {f"{s}-{i}.txt": b"aha" * (i + 1) for i in range(4)})
        for s in range(count)
    ]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_every_shard_gets_an_index_beside_it(tmp_path, workers):
    tars(tmp_path)
    done = []
    indexes = index_shards(
        str(tmp_path / "*.tar"),
        workers=workers,
        measures={"txt": vowels},
        progress=lambda *told: done.append(told),
    )
    assert [index.key(0) for index in indexes] == ["0-0", "1-0", "2-0"]
    assert done == [(1, 3), (2, 3), (3, 3)]
    dataset = ShardDataset(str(tmp_path / "*.tar"))
    assert dataset.lengths("txt.vowels").tolist() == [2, 4, 6, 8] * 3


def test_an_index_that_fits_is_kept(tmp_path):
    paths = tars(tmp_path)
    index_shards(paths)
    before = [path.with_suffix(".index.npz").stat().st_mtime_ns for path in paths]
    make_tar(paths[1], {f"new-{i}.txt": b"x" * 9000 for i in range(9)})
    (tmp_path / "2.index.npz").write_bytes(b"nonsense")
    indexes = index_shards(paths)
    after = [path.with_suffix(".index.npz").stat().st_mtime_ns for path in paths]
    assert [a == b for a, b in zip(before, after)] == [True, False, False]
    assert indexes[1].key(0) == "new-0"
    index_shards(paths, again=True)
    assert paths[0].with_suffix(".index.npz").stat().st_mtime_ns > before[0]


def test_indexes_in_a_folder_of_their_own(tmp_path):
    paths = tars(tmp_path / "in")
    index_shards(paths, out=tmp_path / "made" / "here")
    assert not list((tmp_path / "in").glob("*.npz"))
    dataset = ShardDataset(paths, index=tmp_path / "made" / "here")
    assert dataset[5]["txt"] == "ahaaha"


def test_shards_of_one_name_cannot_share_a_folder(tmp_path):
    paths = [*tars(tmp_path / "a", 1), *tars(tmp_path / "b", 1)]
    with pytest.raises(ValueError, match="one name from several folders"):
        index_shards(paths, out=tmp_path / "c")


def test_a_wrong_shard_raises_and_the_others_stay_indexed(tmp_path):
    paths = tars(tmp_path)
    make_tar(paths[1], {"/etc/a.txt": b"x"})
    with pytest.raises(UnsafeShardError, match="shard '1.tar', member '/etc/a.txt'"):
        index_shards(paths)
    assert (tmp_path / "0.index.npz").is_file() and not (tmp_path / "1.index.npz").exists()


def test_a_cut_shard_is_indexed_if_asked(tmp_path):
    (path,) = tars(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:2500])
    with pytest.raises(DamagedShardError, match="'0.tar'"):
        index_shards(path)
    (index,) = index_shards(path, tolerant=True)
    assert not index.whole and len(index) == 2


def test_a_pattern_without_shards(tmp_path):
    with pytest.raises(FileNotFoundError, match="no shard matches"):
        index_shards(str(tmp_path / "*.tar"))
    with pytest.raises(FileNotFoundError):
        index_shards(tmp_path / "a.tar")
    (tmp_path / "b.tar").write_bytes(b"nonsense" * 200)
    with pytest.raises(ShardError, match="no tar archive"):
        index_shards(tmp_path / "b.tar")


def test_lengths_are_added_to_an_index_that_fits_and_those_of_one_s_own_stay(tmp_path):
    with ShardWriter(tmp_path) as writer:
        for i in range(4):
            writer.write({"txt": "aha " * i}, lengths={"tokens": 7 * i})
    for options in ({"measures": {"txt": vowels}}, {"again": True}):
        index_shards(str(tmp_path / "*.tar"), **options)
        dataset = ShardDataset(str(tmp_path / "*.tar"))
        assert dataset.lengths("tokens").tolist() == [0, 7, 14, 21]
        assert dataset.lengths("txt.vowels").tolist() == [0, 2, 4, 6]
        assert dataset.lengths("txt.chars").tolist() == [0, 4, 8, 12]


def test_lengths_of_other_samples_do_not_stay(tmp_path):
    (path,) = tars(tmp_path, 1)
    index_shards(path, measures={"txt": vowels})
    make_tar(path, {f"0-{i}.txt": b"uhu" * (i + 1) for i in range(4)})  # of the same size
    (index,) = index_shards(path, again=True)
    assert "txt.vowels" not in index.columns

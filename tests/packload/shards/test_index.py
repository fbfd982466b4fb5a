import io
import json
import zipfile
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packload.shards import DamagedShardError, ShardError, UnsafeShardError
from packload.shards.index import ShardIndex, build_index, index_name, total_digest
from packload.shards.safety import Safety

from .tars import index_it, make_tar


def index(members, tmp_path, name="a.tar", **arguments):
    path = make_tar(tmp_path / name, members)
    with open(path, "rb") as stream:
        return build_index(stream, name, path.stat().st_size, **arguments), path


keys = st.lists(
    st.text(st.characters(categories=("L", "N")), min_size=1, max_size=8), unique=True, max_size=6
)


@given(keys=keys, data=st.data())
def test_places_sizes_keys_and_checksums(keys, data, tmp_path_factory):
    samples = {
        key: {
            f: data.draw(st.binary(max_size=700))
            for f in data.draw(st.sets(st.sampled_from("abc"), min_size=1))
        }
        for key in keys
    }
    members = {f"{key}.{f}": content for key, parts in samples.items() for f, content in parts.items()}
    made, path = index(members, tmp_path_factory.mktemp("x"))
    again = ShardIndex.from_bytes(made.to_bytes(), "a.index.npz")
    tar = path.read_bytes()
    assert again.tar_bytes == len(tar) and again.whole and not again.skipped
    assert [again.key(i) for i in range(len(again))] == keys
    for i, key in enumerate(keys):
        found = {}
        for m in range(int(again.splits[i]), int(again.splits[i + 1])):
            content = tar[int(again.start[m]) : int(again.start[m]) + int(again.size[m])]
            assert zlib.crc32(content) == again.crc[m]
            found[again.fields[again.field[m]]] = content
        assert found == samples[key]
    assert again.digest() == made.digest()


def test_columns_have_minus_one_where_a_sample_has_no_such_member(tmp_path):
    made, _ = index({"a.txt": b"x y", "b.cls": b"1", "c.txt": b"", "c.cls": b"22"}, tmp_path)
    assert made.column("txt.words").tolist() == [2, -1, 0]
    assert made.column("txt.bytes").tolist() == [3, -1, 0]
    assert made.column("cls.bytes").tolist() == [-1, 1, 2]
    with pytest.raises(KeyError):
        made.column("png.h")


def test_own_lengths_stand_beside_the_others(tmp_path):
    own = {"txt": lambda content: {"tokens": content.count(b"o")}, "cls": lambda content: int(content)}
    made, _ = index({"a.txt": b"foo", "a.cls": b"7"}, tmp_path, measures=own)
    assert made.column("txt.tokens").tolist() == [2] and made.column("cls.length").tolist() == [7]


def test_an_empty_archive_has_an_index_too(tmp_path):
    made, _ = index({}, tmp_path)
    again = ShardIndex.from_bytes(made.to_bytes(), "x")
    assert len(again) == 0 and again.ends().tolist() == [] and again.digest() == made.digest()


def test_what_is_in_no_sample_is_counted(tmp_path):
    made, _ = index({"a.txt": b"x", "README": b"", "__meta__": b"{}"}, tmp_path)
    assert made.skipped == {"no field in the name": 1, "about the archive": 1} and len(made) == 1


def test_a_field_that_is_there_twice(tmp_path):
    with pytest.raises(
        ShardError, match=r"shard 'a.tar', member 'a.TXT': field 'txt' of sample 'a' is there twice"
    ):
        index({"a.txt": b"x", "a.TXT": b"y"}, tmp_path)


def test_a_key_that_returns(tmp_path):
    members = {"a.txt": b"x", "b.txt": b"y", "a.cls": b"1"}
    with pytest.raises(UnsafeShardError, match="'a.cls': the key 'a' was there before"):
        index(members, tmp_path)
    made, _ = index(members, tmp_path, safety=Safety(allow_duplicate_keys=True))
    assert [made.key(i) for i in range(3)] == ["a", "b", "a"]


@pytest.mark.parametrize("cut", [0.25, 0.4, 0.55])
def test_a_cut_archive_is_refused_or_indexed_as_far_as_it_is_whole(tmp_path, cut):
    members = {f"{i:03d}.{f}": b"x" * 600 for i in range(10) for f in ("txt", "cls2.txt")}
    whole, path = index(members, tmp_path)
    content = path.read_bytes()[: int(cut * path.stat().st_size)]
    with pytest.raises(DamagedShardError, match="'a.tar'"):
        build_index(io.BytesIO(content), "a.tar", len(content))
    part = build_index(io.BytesIO(content), "a.tar", len(content), tolerant=True)
    expected = int((whole.ends() <= len(content)).sum())
    assert not part.whole and len(part) == expected
    assert part.start.tolist() == whole.start[: 2 * expected].tolist()


def test_the_last_sample_before_the_cut_goes_if_it_lacks_a_field(tmp_path):
    _, path = index({"a.txt": b"x", "a.cls": b"1", "b.txt": b"y", "b.cls": b"2"}, tmp_path)
    content = path.read_bytes()[: 3 * 1024]
    part = build_index(io.BytesIO(content), "a.tar", len(content), tolerant=True)
    assert [part.key(i) for i in range(len(part))] == ["a"]


def test_members_that_cannot_be_measured_are_counted_if_tolerant(tmp_path):
    with pytest.raises(ShardError, match="'b.png': not an image"):
        index({"a.txt": b"x", "b.png": b"no"}, tmp_path)
    made, _ = index({"a.txt": b"x", "b.png": b"no"}, tmp_path, tolerant=True)
    assert len(made) == 2 and made.skipped == {"cannot be measured": 1} and made.whole


def test_equal_indexes_give_equal_files(tmp_path):
    one, _ = index({"a.txt": b"x"}, tmp_path)
    other, _ = index({"a.txt": b"x"}, tmp_path, "a.tar")
    assert one.to_bytes() == other.to_bytes()


def test_other_samples_have_another_digest(tmp_path):
    base = {"a.txt": b"xyz", "b.txt": b"y"}
    others = [
        {"a.txt": b"xyw", "b.txt": b"y"},
        {"a.txt": b"xyz", "c.txt": b"y"},
        {"b.txt": b"y", "a.txt": b"xyz"},
    ]
    digests = [index(members, tmp_path)[0].digest() for members in (base, *others)]
    assert len(set(digests)) == 4
    one, other = index(base, tmp_path)[0], index(others[0], tmp_path)[0]
    assert total_digest([one, other]) != total_digest([other, one])


def test_an_index_is_small(tmp_path):
    members = {f"{i:09d}.{f}": b"x" * (1 + i % 97) for i in range(2000) for f in ("txt", "cls2.txt")}
    made, _ = index(members, tmp_path)
    assert len(made.to_bytes()) < 60 * 2000


def change(content, **header):
    with np.load(io.BytesIO(content)) as arrays:
        parts = dict(arrays)
    told = json.loads(bytes(parts["header"]))
    for name, value in header.items():
        if name in parts:
            parts[name] = value(parts[name])
        else:
            told[name] = value
    parts["header"] = np.frombuffer(json.dumps(told).encode(), np.uint8)
    file = io.BytesIO()
    np.savez_compressed(file, **parts)
    return file.getvalue()


@pytest.mark.parametrize(
    "wrong",
    [
        {"start": lambda a: a.astype(np.int64) + 10**6},
        {"size": lambda a: a[:-1]},
        {"field": lambda a: a + 5},
        {"splits": lambda a: a[::-1]},
        {"key_splits": lambda a: a * 2},
        {"lengths": lambda a: a[:, :1]},
        {"start": lambda a: a.astype(float)},
        {"start": lambda a: a.astype(np.int64) - 10**6},
        {"tar_bytes": 10},
        {"splits": lambda a: a[:0]},
    ],
    ids=range(10),
)
def test_an_index_whose_numbers_do_not_fit_is_refused(tmp_path, wrong):
    content = index({"a.txt": b"x", "b.txt": b"y"}, tmp_path)[0].to_bytes()
    assert len(ShardIndex.from_bytes(change(content), "x")) == 2
    with pytest.raises(DamagedShardError, match="index 'x'"):
        ShardIndex.from_bytes(change(content, **wrong), "x")


def test_an_index_of_a_later_version_says_what_to_do(tmp_path):
    content = index({"a.txt": b"x"}, tmp_path)[0].to_bytes()
    with pytest.raises(ShardError, match="version 99.*Update packload"):
        ShardIndex.from_bytes(change(content, version=99), "x")
    with pytest.raises(ShardError, match="'other', not"):
        ShardIndex.from_bytes(change(content, format="other"), "x")


@given(data=st.data())
def test_an_index_that_was_cut_or_changed_is_refused(data, tmp_path_factory):
    content = index({"a.txt": b"x", "b.txt": b"y"}, tmp_path_factory.mktemp("x"))[0].to_bytes()
    cut = data.draw(st.integers(0, len(content) - 1))
    with pytest.raises(ShardError, match="index 'x' cannot be read"):
        ShardIndex.from_bytes(content[:cut], "x")


def test_an_index_with_objects_is_not_unpickled(tmp_path):
    content = change(index({"a.txt": b"x"}, tmp_path)[0].to_bytes(), keys=lambda a: np.array([{}], object))
    with pytest.raises(DamagedShardError, match="index 'x'"):
        ShardIndex.from_bytes(content, "x")


def test_names_of_indexes(tmp_path):
    assert index_name("s3://b/train-000001.tar") == "s3://b/train-000001.index.npz"
    path = make_tar(tmp_path / "a.tar", {"a.txt": b"x"})
    index_it(path)
    assert (tmp_path / "a.index.npz").is_file()


@pytest.mark.parametrize(
    "wrong",
    [
        {"lengths": lambda a: a.astype(np.int64) * 0 - 5},
        {"lengths": lambda a: a.astype(np.int64) * 0 + 2**62},
        {"start": lambda a: a.astype(np.int64) * 0 + 512},
        {"start": lambda a: a[0]},
        {"start": lambda a: a[:, None]},
        {"keys": lambda a: a.astype(np.int64)},
        {"fields": [1]},
        {"fields": [{}]},
        {"fields": ["__key__"]},
        {"fields": ["txt", "txt"]},
        {"columns": [1, 2]},
        {"tar_bytes": float("inf")},
        {"version": "9"},
    ],
    ids=range(13),
)
def test_an_index_that_lies_is_refused_when_it_is_opened(tmp_path, wrong):
    content = index({"a.txt": b"x", "b.txt": b"y"}, tmp_path)[0].to_bytes()
    with pytest.raises(DamagedShardError, match="index 'x'"):
        ShardIndex.from_bytes(change(content, **wrong), "x")


def test_an_index_that_claims_a_huge_array_takes_no_memory(tmp_path):
    content = index({"a.txt": b"x"}, tmp_path)[0].to_bytes()
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": (10**12,)})
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            new.writestr(name, file.getvalue() if name == "start.npy" else old.read(name))
    with pytest.raises(DamagedShardError, match="index 'x' cannot be read"):
        ShardIndex.from_bytes(made.getvalue(), "x")


def test_a_field_cannot_take_the_place_of_the_key(tmp_path):
    with pytest.raises(ShardError, match="member 'a.__key__': fields do not begin with two underscores"):
        index({"a.__key__": b"x"}, tmp_path)


def test_the_size_of_a_member_is_not_what_its_json_says(tmp_path):
    made, _ = index({"a.json": b'{"bytes": [1, 2]}'}, tmp_path)
    assert made.column("json.bytes").tolist() == [17]


@pytest.mark.parametrize("size", [-1, 2**70, 1.5, float("nan")])
def test_own_lengths_that_are_none(tmp_path, size):
    with pytest.raises(ShardError, match="'a.tar', sample 'a': .* is no length"):
        index({"a.txt": b"x"}, tmp_path, measures={"txt": lambda content: size})


def test_own_lengths_that_fail_name_the_member(tmp_path):
    with pytest.raises(ShardError, match="'a.tar', member 'a.txt': .* raised ValueError"):
        index({"a.txt": b"x"}, tmp_path, measures={"txt": int})

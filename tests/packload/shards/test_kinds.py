import gzip
import io
import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from webdataset.tariterators import base_plus_ext

from packload.shards.errors import Place, ShardError, UnsafeShardError
from packload.shards.kinds import kind, measure, split_name
from packload.shards.safety import DEFAULT, Safety

WHERE = Place("a.tar", "x")


def picture(width, height, format="PNG"):
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, format)
    return file.getvalue()


def npy(array, **arguments):
    file = io.BytesIO()
    np.save(file, array, **arguments)
    return file.getvalue()


@given(st.text(st.sampled_from("ab./_ "), max_size=12))
def test_names_are_split_as_webdataset_does(name):
    key, field = base_plus_ext(name)
    if not field or re.match(r"__[^/]*__($|/)", name):
        assert split_name(name) is None
    else:
        assert split_name(name) == (key, field.lower())


@pytest.mark.parametrize("name", ["__meta__", "__x__/a.txt", "__shard__"])
def test_names_about_the_archive_are_in_no_sample(name):
    assert split_name(name) is None


def test_the_last_part_of_a_field_says_what_it_is():
    assert [kind(f) for f in ("jpg", "seg.png", "tokens.npy", "txt.gz", "left.json.gz")] == [
        "jpg",
        "png",
        "npy",
        "txt",
        "json",
    ]


@given(st.text(st.characters(blacklist_categories=("Cs",)), max_size=60))
def test_lengths_of_text(text):
    expected = {"txt.chars": len(text), "txt.words": len(text.split())}
    assert measure("txt", text.encode(), WHERE, DEFAULT) == expected


def test_lengths_of_text_in_any_script():
    assert measure("txt", "één 日本".encode(), WHERE, DEFAULT) == {"txt.chars": 6, "txt.words": 2}
    assert measure("cap.txt.gz", gzip.compress(b"a b c"), WHERE, DEFAULT) == {
        "cap.txt.gz.chars": 5,
        "cap.txt.gz.words": 3,
    }


@pytest.mark.parametrize("format, field", [("PNG", "png"), ("JPEG", "jpg"), ("WEBP", "webp"), ("GIF", "gif")])
def test_sizes_of_images_come_from_the_header_alone(format, field, monkeypatch):
    content = picture(31, 17, format)
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("the picture was decoded"))
    assert measure(field, content, WHERE, DEFAULT) == {f"{field}.h": 17, f"{field}.w": 31}


@given(st.lists(st.integers(0, 4), max_size=4), st.sampled_from(["<i8", ">f4", "?", "<c8"]))
def test_shapes_of_arrays(shape, dtype):
    sizes = measure("x.npy", npy(np.zeros(shape, dtype)), WHERE, DEFAULT)
    assert sizes == {f"x.npy.{d}": size for d, size in enumerate(shape)}


def test_lengths_inside_json():
    content = json.dumps({"tokens": [1, 2, 3], "title": "ab", "label": 4, "more": {"x": [1]}}).encode()
    assert measure("json", content, WHERE, DEFAULT) == {"json.tokens": 3, "json.title": 2}
    assert measure("json", b"[1, 2]", WHERE, DEFAULT) == {"json.length": 2}
    assert measure("json", b"5", WHERE, DEFAULT) == {}


def test_other_members_have_no_lengths():
    assert measure("cls", b"3", WHERE, DEFAULT) == measure("mp3", b"\xff", WHERE, DEFAULT) == {}
    assert measure("pkl", b"\x80", WHERE, DEFAULT) == {}


@pytest.mark.parametrize(
    "field, content, text",
    [
        ("txt", b"\xff", "not UTF-8"),
        ("json", b"{", "not JSON"),
        ("json", b"[" * 100_000, "not JSON"),
        ("png", b"nonsense", "not an image"),
        ("npy", b"nonsense", "not an .npy"),
        ("npy", npy(np.zeros(5))[:-1], "takes 168 bytes, and 167 are there"),
        ("txt.gz", gzip.compress(b"abc")[:-2], "cut off"),
        ("txt.gz", b"nonsense", "cannot be unpacked"),
    ],
)
def test_what_a_member_is_not(field, content, text):
    with pytest.raises(ShardError, match=f"shard 'a.tar', member 'x'.*{text}"):
        measure(field, content, WHERE, DEFAULT)


def test_limits_are_kept_while_measuring():
    with pytest.raises(UnsafeShardError, match="more than 100"):
        measure("png", picture(11, 10), WHERE, Safety(max_pixels=100))
    with pytest.raises(UnsafeShardError, match="unpacks to more than 1000"):
        measure("txt.gz", gzip.compress(b"0" * 1001), WHERE, Safety(max_unpacked_bytes=1000))
    assert measure("txt.gz", gzip.compress(b"0" * 1000), WHERE, Safety(max_unpacked_bytes=1000))

import gzip
import io
import json

import numpy as np
import pytest
from PIL import Image

from packload.shards import ShardError
from packload.shards.decode import Decode
from packload.shards.errors import Place
from packload.shards.safety import DEFAULT, Safety

WHERE = Place("a.tar", "k.x")


def decode(field, content, own=None):
    return Decode(own, DEFAULT)(field, content, WHERE)


def test_plain_kinds():
    assert decode("txt", "é".encode()) == "é"
    assert decode("left.cls", b"-12\n") == -12
    assert decode("json", b'{"a": [1]}') == {"a": [1]}
    assert decode("json.gz", gzip.compress(b"[1]")) == [1]
    assert decode("mp3", b"\xff") == b"\xff"


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "1", "CMYK", "LA"])
def test_images_are_three_channels_of_bytes(mode):
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (5, 7, 3), np.uint8)).convert(mode)
    file = io.BytesIO()
    image.save(file, "TIFF" if mode == "CMYK" else "PNG")
    pixels = decode("tif" if mode == "CMYK" else "png", file.getvalue())
    expected = np.asarray(Image.open(file).convert("RGB")).transpose(2, 0, 1)
    assert pixels.dtype == np.uint8 and pixels.shape == (3, 5, 7) and (pixels == expected).all()
    assert pixels.transpose(1, 2, 0).flags.c_contiguous


def test_arrays_by_name():
    file = io.BytesIO()
    np.savez_compressed(file, a=np.arange(3), b=np.zeros((2, 0)))
    found = decode("npz", file.getvalue())
    assert found["a"].tolist() == [0, 1, 2] and found["b"].shape == (2, 0)


def test_own_functions_go_by_field_before_its_ending():
    own = {"png": len, "seg.png": lambda content: "seg", "txt": None}
    assert decode("png", b"xyz", own) == 3
    assert decode("seg.png", b"xyz", own) == "seg"
    assert decode("other.png", b"xyz", own) == 3
    assert decode("txt", b"\xff", own) == b"\xff"


def test_an_error_in_an_own_function_names_the_member():
    with pytest.raises(
        ShardError, match="shard 'a.tar', member 'k.x': loads raised JSONDecodeError"
    ) as caught:
        decode("txt", b"nonsense", {"txt": json.loads})
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize(
    "field, content, text",
    [("cls", b"three", "b'three' is not an integer"), ("txt", b"\xff", "UTF-8"), ("json", b"{", "JSON")],
)
def test_what_cannot_be_decoded_names_the_member(field, content, text):
    with pytest.raises(ShardError, match=f"shard 'a.tar', member 'k.x': .*{text}"):
        decode(field, content)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_images_that_are_cut_off_name_the_member(format):
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (50, 70, 3), np.uint8)
    Image.fromarray(pixels).save(file, format)
    with pytest.raises(ShardError, match="shard 'a.tar', member 'k.x'"):
        decode("png", file.getvalue()[:-300])


def test_own_functions_for_an_ending_are_given_what_gz_holds():
    content = gzip.compress(b"7")
    for own, expected in [({"json": bytes.decode}, "7"), ({"json.gz": len}, len(content)), ({}, 7)]:
        assert Decode(own, DEFAULT)("json.gz", content, Place("a.tar", "x.json.gz")) == expected


@pytest.mark.parametrize("field", ["pkl", "pth"])
def test_pickles_that_are_damaged_name_themselves(field):
    with pytest.raises(ShardError, match="shard 'a.tar', member 'x'"):
        Decode({}, Safety(allow_pickle=True))(field, b"no", Place("a.tar", "x"))

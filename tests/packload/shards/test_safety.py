"""What a shard that was made to do harm, or by mistake, is refused for."""

import gzip
import io
import os
import pickle
import struct
import tarfile
import tracemalloc
import zipfile
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from packload.shards import Safety, ShardDataset, ShardError, UnsafeShardError
from packload.shards.decode import Decode
from packload.shards.errors import DamagedShardError, Place
from packload.shards.kinds import measure
from packload.shards.safety import DEFAULT, check_address, load_array, load_arrays, unzip

from .tars import add, index_it, make_tar

WHERE = Place("a.tar", "x")
ran = []


def mark(text):
    ran.append(text)


class Harm:
    """Leaves a mark where it is unpickled."""

    def __reduce__(self):
        return mark, ("it ran",)


@pytest.fixture(autouse=True)
def nothing_ran():
    ran.clear()
    yield
    assert not ran


def dataset(tmp_path, members, **arguments):
    path = make_tar(tmp_path / "bad.tar", members)
    index_it(path)
    return ShardDataset(path, **arguments)


def saved(value, save):
    file = io.BytesIO()
    save(file, value)
    return file.getvalue()


def objects(file, value):
    np.save(file, np.array([value], object), allow_pickle=True)


def objects_zip(file, value):
    np.savez(file, a=np.array([value], object))


PICKLES = {
    **dict.fromkeys(["pkl", "pickle", "pyd", "x.PKL"], pickle.dumps(Harm())),
    "pth": saved(Harm(), lambda file, value: torch.save(value, file)),
    "pkl.gz": gzip.compress(pickle.dumps(Harm())),
}


@pytest.mark.parametrize("field", PICKLES)
def test_pickles_are_not_loaded(tmp_path, field):
    data = dataset(tmp_path, {"good.txt": b"x", f"a.{field}": PICKLES[field]})
    assert data[0]["txt"] == "x"
    message = rf"shard '.*bad.tar', member 'a.{field.lower()}': a pickle.*Safety\(allow_pickle=True\)"
    with pytest.raises(UnsafeShardError, match=message):
        data[1]
    with pytest.raises(UnsafeShardError, match="pickle"):
        dataset(tmp_path, {f"a.{field}": PICKLES[field]}, on_error="skip")[0]


@pytest.mark.parametrize("field", ["pkl", "pyd", "pth", "pkl.gz"])
def test_pickles_are_loaded_where_that_is_asked_for(tmp_path, field):
    data = dataset(tmp_path, {f"a.{field}": PICKLES[field]}, safety=Safety(allow_pickle=True))
    data[0]
    assert ran == ["it ran"]
    ran.clear()


@pytest.mark.parametrize("field", ["npy", "npz"])
def test_arrays_of_objects_are_not_loaded(tmp_path, field):
    content = saved(Harm(), objects if field == "npy" else objects_zip)
    with pytest.raises(UnsafeShardError, match=r"member 'a.np[yz](, a.npy)?': an array of Python objects"):
        dataset(tmp_path, {f"a.{field}": content})[0]
    path = tmp_path / "bad.tar"
    allowed = Safety(allow_object_arrays=True)
    index_it(path, safety=allowed)
    ShardDataset(path, safety=allowed)[0]
    assert ran == ["it ran"]
    ran.clear()


def test_arrays_of_objects_inside_of_structures_are_refused():
    array = np.zeros(2, [("a", "i4"), ("b", "O")])
    content = saved(array, lambda file, value: np.save(file, value, allow_pickle=True))
    with pytest.raises(UnsafeShardError, match="Python objects"):
        load_array(content, WHERE, DEFAULT)


@pytest.mark.parametrize("url", ["pipe:cat /etc/passwd", " PIPE:rm -rf x", "pipe:aws s3 cp s3://b/a.tar -"])
def test_commands_are_not_addresses(url):
    with pytest.raises(UnsafeShardError, match="is a command for a shell"):
        ShardDataset(url)
    with pytest.raises(UnsafeShardError, match=r"Safety\(allow_pipe=True\)"):
        check_address(url, DEFAULT)
    check_address(url, Safety(allow_pipe=True))


def test_commands_are_run_where_that_is_asked_for(tmp_path):
    path = make_tar(tmp_path / "a.tar", {"a.txt": b"x", "b.txt": b"y"})
    index_it(path)
    allowed = Safety(allow_pipe=True)
    for cache in (None, tmp_path / "cache"):
        data = ShardDataset(f"pipe:cat {path}", safety=allowed, cache=cache)
        assert [sample["txt"] for sample in data.__getitems__([1, 0])] == ["y", "x"]
    with pytest.raises(FileNotFoundError, match="has no index"):
        ShardDataset(f"pipe:cat {tmp_path}/b.tar", safety=allowed)


def special(path, flag, name="evil.txt", target="/etc/passwd"):
    with tarfile.open(path, "w") as tar:
        add(tar, "good.txt", b"x")
        info = tarfile.TarInfo(name)
        info.type, info.linkname = flag, target
        tar.addfile(info)
        add(tar, "more.txt", b"y")
    return path


@pytest.mark.parametrize(
    "flag, kind",
    [
        (tarfile.SYMTYPE, "symbolic link to '/etc/passwd'"),
        (tarfile.LNKTYPE, "hard link to '/etc/passwd'"),
        (tarfile.CHRTYPE, "character device"),
        (tarfile.BLKTYPE, "block device"),
        (tarfile.FIFOTYPE, "named pipe"),
        (b"S", "sparse file"),
        (b"Z", "entry of unknown type"),
    ],
)
def test_links_and_devices_are_refused_and_never_followed(tmp_path, flag, kind):
    path = special(tmp_path / "bad.tar", flag)
    with pytest.raises(UnsafeShardError, match=f"shard 'bad.tar', member 'evil.txt': a {kind}"):
        index_it(path)
    index = index_it(path, safety=Safety(allow_links=True))
    assert [index.key(i) for i in range(2)] == ["good", "more"] and sum(index.skipped.values()) == 1
    assert [sample["txt"] for sample in ShardDataset(path).__getitems__([0, 1])] == ["x", "y"]


def test_folders_are_harmless(tmp_path):
    index = index_it(special(tmp_path / "a.tar", tarfile.DIRTYPE, "folder", ""))
    assert len(index) == 2 and not index.skipped


OUTSIDE = [
    "../a.txt",
    "a/../../b.txt",
    "/etc/a.txt",
    "a/../b.txt",
    "..\\a.txt",
    "C:\\a.txt",
    "c:a.txt",
    "\\\\host\\a.txt",
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_that_lead_outside_are_refused(tmp_path, name):
    path = make_tar(tmp_path / "bad.tar", {name: b"x"})
    with pytest.raises(UnsafeShardError, match="member .*: its name leads outside of the archive"):
        index_it(path)
    before = sorted(os.listdir(tmp_path))
    index_it(path, safety=Safety(allow_outside_names=True))
    data = ShardDataset(path)
    assert [data[i]["txt"] for i in range(len(data))] == ["x"] * len(data)
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "bad.index.npz"])


@pytest.mark.parametrize("name", ["./a.txt", "a..b/c.txt", "..a/b.txt", "a/b.txt", "...txt/a.txt"])
def test_names_that_only_look_so_are_taken(tmp_path, name):
    assert len(index_it(make_tar(tmp_path / "a.tar", {name: b"x"}))) == 1


def test_a_declared_size_beyond_the_file_is_refused(tmp_path):
    path = make_tar(tmp_path / "bad.tar", {"a.txt": b"x", "b.txt": b"y", "c.txt": b"z"})
    content = bytearray(path.read_bytes())
    block = content[2048:2560]
    block[124:136] = b"77777777777\0"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    content[2048:2560] = block
    path.write_bytes(content)
    with pytest.raises(
        DamagedShardError, match="shard 'bad.tar', member 'c.txt': it claims 8589934591 bytes"
    ):
        index_it(path)
    assert len(index_it(path, tolerant=True)) == 2


def png_of(width, height):
    """A PNG whose header claims a size, with almost nothing in it."""

    def chunk(kind, content):
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(20_000, 20_000), (100_000, 100_000), (2**31 - 1, 1)])
def test_image_bombs_are_refused_before_anything_is_decoded(tmp_path, size):
    path = make_tar(tmp_path / "bad.tar", {"a.png": png_of(*size)})
    with pytest.raises(UnsafeShardError, match="shard 'bad.tar', member 'a.png'"):
        index_it(path)
    with pytest.raises(UnsafeShardError, match=r"member 'a.png'.*Safety\(max_pixels=.*MAX_IMAGE_PIXELS"):
        index_it(path, tolerant=True)


def test_an_image_above_the_limit_of_pillow_is_allowed_by_both(tmp_path, monkeypatch):
    path = make_tar(tmp_path / "large.tar", {"a.png": png_of(20_000, 20_000)})
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 400_000_000)
    with pytest.raises(UnsafeShardError, match=r"Safety\(max_pixels=400000000\)"):
        index_it(path)
    index = index_it(path, safety=Safety(max_pixels=400_000_000))
    assert index.column("png.h").tolist() == [20_000]


def test_the_limit_of_pixels_is_an_argument(tmp_path):
    picture = saved(Image.new("RGB", (30, 20)), lambda file, image: image.save(file, "PNG"))
    data = dataset(tmp_path, {"a.png": picture}, safety=Safety(max_pixels=599))
    with pytest.raises(
        UnsafeShardError, match=r"30 x 20 = 600 pixels, more than 599.*Safety\(max_pixels=600\)"
    ):
        data[0]
    assert dataset(tmp_path, {"a.png": picture}, safety=Safety(max_pixels=600))[0]["png"].shape == (3, 20, 30)


def test_formats_of_images_that_call_programs_are_not_tried(tmp_path):
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n"
    with pytest.raises(ShardError, match="not an image of an allowed format"):
        dataset(tmp_path, {"a.png": script})


def test_gzip_bombs_stop_at_the_limit():
    bomb = gzip.compress(bytes(50_000_000))
    assert len(bomb) < 60_000
    with pytest.raises(
        UnsafeShardError, match="shard 'a.tar', member 'x': it unpacks to more than 1000000 bytes"
    ):
        unzip(bomb, WHERE, Safety(max_unpacked_bytes=10**6))
    many = gzip.compress(bytes(600_000)) * 2
    with pytest.raises(UnsafeShardError, match="unpacks to more"):
        unzip(many, WHERE, Safety(max_unpacked_bytes=10**6))


@given(st.lists(st.binary(max_size=100), max_size=3))
def test_gzip_members_are_unpacked_one_after_the_other(parts):
    packed = b"".join(map(gzip.compress, parts))
    assert unzip(packed, WHERE, Safety(max_unpacked_bytes=300)) == b"".join(parts)


def test_zip_bombs_stop_at_the_limit():
    file = io.BytesIO()
    np.savez_compressed(file, a=np.zeros(2_000_000))
    assert len(file.getvalue()) < 30_000
    with pytest.raises(UnsafeShardError, match="unpacks to more than 1000000"):
        load_arrays(file.getvalue(), WHERE, Safety(max_unpacked_bytes=10**6))


def test_a_zip_that_lies_about_sizes_is_damaged():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("a.npy", saved(np.zeros(100_000), np.save))
    content = file.getvalue()
    size = struct.pack("<I", 800_128)
    assert content.count(size) == 2
    with pytest.raises(DamagedShardError, match="not a whole .npz"):
        load_arrays(content.replace(size, struct.pack("<I", 500)), WHERE, Safety(max_unpacked_bytes=1000))


@pytest.mark.parametrize("shape", [(10**18,), (2**40, 2**40), (10**6, 10**6)])
def test_arrays_that_claim_more_than_is_there_take_no_memory(shape):
    file = io.BytesIO()
    header = {"descr": "<f8", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    with pytest.raises(DamagedShardError, match="takes .* bytes, and 128 are there"):
        load_array(file.getvalue(), WHERE, DEFAULT)


@given(st.binary(max_size=300))
def test_noise_is_an_error_of_ours(content):
    for load in (load_array, load_arrays, unzip):
        try:
            load(content, WHERE, DEFAULT)
        except ShardError:
            continue


@given(st.data())
def test_arrays_are_read_as_numpy_reads_them(data):
    shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
    dtype = data.draw(st.sampled_from(["<i8", ">f4", "?", "<c16", "<U3", "<f2"]))
    array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    if data.draw(st.booleans()):
        array = np.asfortranarray(array)
    content = saved(array, np.save)
    found, expected = load_array(content, WHERE, DEFAULT), np.load(io.BytesIO(content))
    assert found.dtype == expected.dtype and found.shape == expected.shape and (found == expected).all()
    assert found.flags.writeable


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_zips_of_methods_that_cannot_stop_are_refused(method):
    content = zipped({"a.npy": bytes(1000)}, method)
    with pytest.raises(UnsafeShardError, match=f"'a.npy' is compressed by method {method}"):
        load_arrays(content, WHERE, DEFAULT)


def zipped(files, method=zipfile.ZIP_DEFLATED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as made:
        for name, content in files.items():
            made.writestr(name, content)
    return file.getvalue()


def test_a_zip_that_lies_about_sizes_is_not_unpacked_beyond_them():
    content = zipped({"a.npy": bytes(60_000_000)})
    content = content.replace(struct.pack("<I", 60_000_000), struct.pack("<I", 500))
    tracemalloc.start()
    try:
        with pytest.raises(DamagedShardError, match="not a whole .npz"):
            load_arrays(content, WHERE, DEFAULT)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def npy(head):
    file = io.BytesIO()
    file.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head)
    return file.getvalue()


@pytest.mark.parametrize(
    "descr, shape",
    [
        ("'<V0'", "(1000000000000000000,)"),
        ("'<f8'", f"(0, {10**30})"),
        ("'<f8'", f"(0, {9 * 10**18}, {9 * 10**18})"),
        ("-" * 3000 + "1", "()"),
        ("(" * 3000, "()"),
        ("'''", "()"),
    ],
)
def test_headers_of_arrays_that_make_no_sense(descr, shape):
    content = npy(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}\n".encode())
    with pytest.raises(ShardError, match="'a.tar', member 'x'"):
        load_array(content, WHERE, DEFAULT)


def changed(data, content):
    content = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    return bytes(content)


NUMBERS = np.arange(6.0).reshape(2, 3)
NPY = saved(NUMBERS, np.save)
NPZ = saved(NUMBERS, lambda file, value: np.savez_compressed(file, a=value))
PICTURES = {
    name: saved(Image.effect_noise((7, 5), 50), lambda file, image, name=name: image.save(file, name))
    for name in DEFAULT.image_formats
}


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=300)
@given(st.data())
def test_damaged_members_are_errors_of_ours(data):
    kinds = {"npy": NPY, "npz": NPZ, **PICTURES}
    name = data.draw(st.sampled_from(sorted(kinds)))
    field = name if name.startswith("np") else "png"
    content = changed(data, kinds[name])
    try:
        measure(field, content, WHERE, DEFAULT)
        Decode(None, DEFAULT)(field, content, WHERE)
    except ShardError:
        return


@pytest.mark.parametrize("kind", [b"zTXt", b"iCCP"])
def test_bombs_in_the_texts_of_images_are_errors_that_name_the_member(tmp_path, kind):
    content = b"a\0\0" + zlib.compress(bytes(50_000_000))
    chunk = struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    plain = png_of(2, 2)
    with pytest.raises(ShardError, match="member 'a.png': .*too large"):
        dataset(tmp_path, {"a.png": plain[:33] + chunk + plain[33:]})


def test_many_small_gzip_members_are_unpacked_in_linear_time():
    assert unzip(gzip.compress(b"") * 100_000, WHERE, DEFAULT) == b""


@pytest.mark.parametrize("values", [np.uint16([[70, 60_000]]), np.float32([[0.5, 1.5]])])
def test_images_of_more_than_8_bits_are_not_clipped(values):
    content = saved(Image.fromarray(values), lambda file, image: image.save(file, "TIFF"))
    with pytest.raises(ShardError, match="whose values 8 bits cannot hold.*decode"):
        Decode(None, DEFAULT)("tif", content, WHERE)

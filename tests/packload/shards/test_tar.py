import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packload.shards.errors import DamagedShardError, ShardError
from packload.shards.tar import BLOCK, END, header, padding, read_members, room

from .tars import add

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def archive(members, format=tarfile.PAX_FORMAT, **arguments):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format, **arguments) as tar:
        for name, content in members:
            add(tar, name, content)
    return file.getvalue()


def read(content, size=None):
    return list(read_members(io.BytesIO(content), "a.tar", size))


names = st.text(
    st.characters(blacklist_categories=("Cs",), blacklist_characters="\0/"), min_size=1, max_size=40
)
members = st.lists(st.tuples(names.map(lambda name: f"d/{name}.txt"), st.binary(max_size=1200)), max_size=5)


@given(members, st.sampled_from(["gnu", "pax"]))
def test_members_are_those_that_tarfile_reads(members, format):
    content = archive(members, FORMATS[format])
    found = read(content, len(content))
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        infos = tar.getmembers()
        assert [(m.name, m.kind, m.start, m.size) for m, _ in found] == [
            (info.name, "file", info.offset_data, info.size) for info in infos
        ]
        assert [c for _, c in found] == [tar.extractfile(info).read() for info in infos]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("length", [1, 99, 100, 101, 154])
def test_long_names_of_every_format(format, length):
    folder = "f" * 90
    name = f"{folder}/{'n' * length}" if length < 100 or format != "ustar" else f"{folder}/{'n' * 99}"
    (member, content), *rest = read(archive([(name, b"x"), ("b.txt", b"y")], FORMATS[format]))
    assert member.name == name and content == b"x"
    assert rest[0][0].name == "b.txt"


def test_global_pax_records_hold_for_all_members():
    content = archive([("a.txt", b"x"), ("b.txt", b"y")], pax_headers={"comment": "about all"})
    assert [m.name for m, _ in read(content)] == ["a.txt", "b.txt"]


def test_sizes_in_base_256_are_read():
    block = bytearray(header("a.txt", 3))
    block[124:136] = b"\x80" + (3).to_bytes(11, "big")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    content = bytes(block) + b"abc" + padding(3) + END
    assert [c for _, c in read(content)] == [b"abc"]
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        assert tar.getmembers()[0].size == 3


@given(members)
def test_what_is_written_is_what_tarfile_reads(members):
    content = b"".join(header(n, len(c)) + c + padding(len(c)) for n, c in members) + END
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        assert [(i.name, tar.extractfile(i).read()) for i in tar.getmembers()] == members


def test_kinds_are_told_apart():
    file = io.BytesIO()
    kinds = {
        "directory": tarfile.DIRTYPE,
        "symbolic link": tarfile.SYMTYPE,
        "hard link": tarfile.LNKTYPE,
        "named pipe": tarfile.FIFOTYPE,
        "character device": tarfile.CHRTYPE,
        "block device": tarfile.BLKTYPE,
    }
    with tarfile.open(fileobj=file, mode="w") as tar:
        for kind, flag in kinds.items():
            info = tarfile.TarInfo(kind)
            info.type, info.linkname = flag, "target" if "link" in kind else ""
            tar.addfile(info)
        add(tar, "a.txt", b"x")
    found = [member for member, _ in read(file.getvalue())]
    assert [member.kind for member in found] == [*kinds, "file"]
    assert found[1].target == "target"


@given(st.data())
def test_an_archive_that_is_cut_off_anywhere_is_damaged(data):
    content = archive([("a.txt", b"x" * 700), ("b.txt", b"y" * 10)])
    end = content.rstrip(b"\0")
    cut = data.draw(st.integers(0, -(-len(end) // BLOCK) * BLOCK))
    with pytest.raises(DamagedShardError, match="a.tar"):
        read(content[:cut], cut)
    with pytest.raises(DamagedShardError, match="a.tar"):
        read(content[:cut])


def test_a_claim_of_exabytes_takes_no_memory_and_names_the_member():
    block = header("big.txt", 8**20)
    with pytest.raises(DamagedShardError, match=r"'a.tar', member 'big.txt': it claims \d+ bytes"):
        read(block + b"abc")
    with pytest.raises(DamagedShardError, match="archive ends at byte"):
        read(block + b"abc", len(block) + 3)


def test_joined_archives_are_refused_rather_than_half_read():
    one = archive([("a.txt", b"x")])
    with pytest.raises(ShardError, match="more follows after its end"):
        read(one + one)


def test_compressed_archives_are_refused_by_name():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        add(tar, "a.txt", b"x" * 2000)
    with pytest.raises(ShardError, match="'a.tar': it is compressed"):
        read(file.getvalue().ljust(1024, b"\0"))


@pytest.mark.parametrize(
    "records", [b"12 path=a", b"x path=b\n", b"999999999999 path=b\n", b"9 path a\n"], ids=range(4)
)
def test_pax_records_that_cannot_be_read(records):
    block = bytearray(header("x", len(records)))
    block[156:157] = b"x"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    with pytest.raises(ShardError, match="pax records"):
        read(bytes(block) + records + padding(len(records)) + END)


def test_metadata_without_end_is_refused():
    block = bytearray(header("x", 1 << 30))
    block[156:157] = b"L"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    with pytest.raises(ShardError, match="about the next member"):
        read(bytes(block) + bytes(4096))


def test_what_is_no_archive():
    with pytest.raises(ShardError, match="no tar archive"):
        read(b"once upon a time " * 100)


def signed(block):
    """A header with its checksum."""
    block = bytearray(block)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def with_records(records, flag=b"0"):
    """An archive of a member with pax records before it, and another one."""
    block, about = bytearray(header("x", len(records))), bytearray(header("a.txt", 0))
    block[156:157], about[156:157] = b"x", flag
    after = header("b.txt", 1) + b"y" + padding(1) + END
    return signed(block) + records + padding(len(records)) + signed(about) + after


@pytest.mark.parametrize("size", [b"-0000002000\0", b"-1", b"0o3", b"0_3", b"+3", b"3.0"])
def test_sizes_are_octal_digits_alone(size):
    block = bytearray(header("a.txt", 3))
    block[124:136] = size.ljust(12, b"\0")
    with pytest.raises(DamagedShardError, match="header at byte 0 cannot be read"):
        read(signed(block) + bytes(4 * BLOCK))


@pytest.mark.parametrize("size", ["1_0", "+3", "-3", " 3", "\uff13", "9" * 5000, ""])
def test_sizes_of_pax_records_are_digits_alone(size):
    record = f" size={size}\n".encode()
    length = next(n for n in range(1, 6000) if len(str(n)) + len(record) == n)
    with pytest.raises(ShardError, match="member 'a.txt': a size of"):
        read(with_records(str(length).encode() + record))


@pytest.mark.parametrize("flag", [tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_a_size_in_pax_records_gives_no_content_to_what_has_none(flag):
    content = with_records(b"13 size=1024\n", flag)
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        assert tar.getnames() == [m.name for m, _ in read(content)] == ["a.txt", "b.txt"]


def test_a_million_bytes_of_small_pax_records_are_read_in_linear_time():
    records = b"6 a=b\n" * 170_000
    assert [m.name for m, _ in read(with_records(records))] == ["a.txt", "b.txt"]


@pytest.mark.parametrize("name", ["a\0b.txt", "a\ud800.txt"])
def test_names_that_no_archive_can_hold(name):
    with pytest.raises(ShardError, match="member 'a"):
        header(name, 3)


@given(names, st.integers(0, 2000))
def test_the_room_that_a_file_takes(name, size):
    one = archive([(name, bytes(size))])
    assert (
        room(name, size)
        == len(archive([(name, bytes(size)), (name, bytes(size))])[: 2 * room(name, size)]) // 2
    )
    assert one.rstrip(b"\0") == one[: room(name, size)].rstrip(b"\0")

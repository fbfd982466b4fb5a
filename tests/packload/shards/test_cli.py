import pytest
import webdataset as wds
from typer.testing import CliRunner

from packload.cli import app

from .tars import make_tar


def run(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


def length_of(content):
    return 10 * len(content)


def test_shard_writes_what_webdataset_reads(tmp_path):
    (tmp_path / "in").mkdir()
    for i in range(9):
        (tmp_path / "in" / f"{i}.txt").write_text("word " * i)
    result = run("shard", tmp_path / "in", tmp_path / "out", "--size", "5kB", "--workers", 1)
    assert result.exit_code == 0, result.output
    assert "9 samples" in result.output and "txt.words" in result.output
    urls = sorted(map(str, (tmp_path / "out").glob("*.tar")))
    assert len(urls) > 1
    assert [s["__key__"] for s in wds.WebDataset(urls, shardshuffle=False)] == [f"{i}" for i in range(9)]


def test_index_tells_what_it_found(tmp_path):
    make_tar(tmp_path / "a.tar", {"a.txt": b"x y", "a.cls": b"1", "README": b""})
    result = run("index", tmp_path / "*.tar", "--workers", 1)
    assert result.exit_code == 0, result.output
    assert "1 samples" in result.output and "txt.chars, txt.words" in result.output
    assert "in no sample: 1 (no field in the name)" in result.output
    assert (tmp_path / "a.index.npz").is_file()


def test_index_with_own_lengths(tmp_path):
    make_tar(tmp_path / "a.tar", {"a.txt": b"x y"})
    result = run("index", tmp_path / "a.tar", "--workers", 1, "--measure", f"txt={__name__}:length_of")
    assert result.exit_code == 0 and "txt.length" in result.output
    result = run("index", tmp_path / "a.tar", "--again", "--workers", 1, "--measure", "txt=nowhere:x")
    assert result.exit_code == 1 and "FIELD=MODULE:FUNCTION" in result.output


@pytest.mark.parametrize("option", [None, "--allow-outside-names"])
def test_refusals_are_one_line_and_can_be_lifted(tmp_path, option):
    make_tar(tmp_path / "a.tar", {"../a.txt": b"x"})
    result = run("index", tmp_path / "a.tar", "--workers", 1, *([option] if option else []))
    assert result.exit_code == (0 if option else 1)
    assert option or "shard 'a.tar', member '../a.txt': its name leads outside" in result.output
    assert "Traceback" not in result.output


def test_a_cut_shard_is_told(tmp_path):
    path = make_tar(tmp_path / "a.tar", {f"{i}.txt": b"x" for i in range(5)})
    path.write_bytes(path.read_bytes()[:3500])
    assert run("index", path, "--workers", 1).exit_code == 1
    result = run("index", path, "--workers", 1, "--tolerant")
    assert result.exit_code == 0 and "a.tar is cut off: 3 samples are whole" in result.output


def test_what_is_not_there(tmp_path):
    result = run("shard", tmp_path / "nowhere", tmp_path / "out")
    assert result.exit_code == 1 and "nowhere" in result.output

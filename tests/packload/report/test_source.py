"""Lengths by name: files and data sets."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packload.report.source import SourceError, read_lengths

HERE = Path(__file__).parents[3]


def _write(folder: Path, text: str, name: str = "lengths.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_the_one_column_of_whole_numbers_is_taken(tmp_path: Path) -> None:
    path = _write(tmp_path, 'file,tokens,score\n"a, b.txt",3,0.5\nc.txt,0,1e3\n')
    lengths, names = read_lengths(path)
    assert (lengths.tolist(), names) == ([3, 0], ("tokens",))
    assert lengths.dtype == np.int64


def test_columns_are_taken_in_the_order_asked_for(tmp_path: Path) -> None:
    path = _write(tmp_path, "w,h\n1,2\n3,4\n")
    assert read_lengths(path, ["h", "w"])[0].tolist() == [[2, 1], [4, 3]]
    assert read_lengths(path, ["w"])[0].tolist() == [1, 3]


def test_a_file_without_a_header_is_named_by_position(tmp_path: Path) -> None:
    assert read_lengths(_write(tmp_path, "5\n6\n"))[0].tolist() == [5, 6]
    assert read_lengths(_write(tmp_path, "5,1\n6,2\n"), ["1"])[0].tolist() == [1, 2]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz", "a.tsv.gz", "a.txt", "A.CSV"])
def test_the_suffix_says_how_a_table_is_written(tmp_path: Path, name: str) -> None:
    text = "id,n\nx,7\n".replace(",", "\t" if ".tsv" in name else ",")
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    assert read_lengths(tmp_path / name)[0].tolist() == [7]


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 99)), min_size=1, max_size=30))
def test_what_was_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int]]
) -> None:
    path = _write(tmp_path_factory.mktemp("csv"), "a,b\n" + "".join(f"{a}, {b}\n" for a, b in rows))
    assert read_lengths(path, ["a", "b"])[0].tolist() == [list(row) for row in rows]


@pytest.mark.parametrize("shape", [(4,), (4, 1), (4, 2)])
def test_arrays_are_read_from_npy(tmp_path: Path, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    np.save(tmp_path / "a.npy", array)
    lengths, names = read_lengths(
        tmp_path / "a.npy", [str(i) for i in range(shape[1])] if len(shape) > 1 else ()
    )
    assert lengths.tolist() == (array[:, 0] if shape == (4, 1) else array).tolist()
    assert names == tuple("01"[: shape[1] if len(shape) > 1 else 1])


DATA = """
import torch
samples = [{"tokens": torch.zeros(n), "label": 1} for n in (4, 2, 0)]
class Holder:
    train = samples
def make():
    return samples
class Made(list):
    def __init__(self):
        super().__init__(samples[:2])
def broken():
    raise KeyError("no")
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [("samples", [4, 2, 0]), ("Holder.train", [4, 2, 0]), ("make", [4, 2, 0]), ("Made", [4, 2])],
)
def test_a_data_set_is_found_in_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, expected: list[int]
) -> None:
    _write(tmp_path, DATA, "some_data.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert read_lengths(f"some_data:{name}")[0].tolist() == expected
    assert read_lengths(f"some_data:{name}", ["tokens"]) == (pytest.approx(np.array(expected)), ("tokens",))


@pytest.mark.parametrize(
    ("text", "columns", "said"),
    [
        ("a,b\n1,2\n", [], r"\['a', 'b'\].*--column"),
        ("a,b\nx,y\n", [], r"no column of whole numbers.*\['a', 'b'\]"),
        ("a,b\n1,2\n", ["c"], r"no column 'c'.*\['a', 'b'\]"),
        ("a\n1\nx\n", [], "'x'"),
        ("a\n1\n1.5\n", [], "1.5"),
        ("a,b\n1,x\n2\n", ["b"], "whole numbers"),
        ("a\n3\n-1\n", [], "sample 1.*-1"),
        ("a\n", [], "no rows"),
        ("", [], "no rows"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, text: str, columns: list[str], said: str) -> None:
    path = _write(tmp_path, text)
    with pytest.raises(SourceError, match=f"(?s)lengths.csv.*{said}"):
        read_lengths(path, columns)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("nowhere.csv", "no such file"),
        ("nowhere", "neither a file nor module:attribute"),
        ("no_such_module:x", "No module named"),
        ("math:no_such", "no_such"),
        ("math:pi", "float: neither a data set nor a function"),
        ("math:gcd", "int is a stream or no data set"),
        ("textwrap:dedent", "needs .'text'"),
        ("types:SimpleNamespace", "stream"),
        (str(HERE), "no such file"),
    ],
)
def test_what_is_not_there_is_named(source: str, said: str) -> None:
    with pytest.raises(SourceError, match=said):
        read_lengths(source)


def test_bytes_that_are_no_table_are_an_error(tmp_path: Path) -> None:
    for name in ("a.csv", "a.csv.gz", "a.npy"):
        (tmp_path / name).write_bytes(b"\xff\xfe\x00\x01" * 9)
        with pytest.raises(SourceError, match=name):
            read_lengths(tmp_path / name)


def test_the_lengths_that_come_with_the_examples_are_real() -> None:
    folder = HERE / "examples" / "data" / "lengths"
    expected = {
        "imdb.csv.gz": (25_000, 2),
        "verses.csv.gz": (31_069, 2),
        "proteins.csv.gz": (2_100,),
        "chains.csv.gz": (159_026,),
        "ca_chains.csv.gz": (201,),
        "stamps.csv.gz": (796, 2),
        "pictures.csv.gz": (121, 2),
    }
    assert {path.name for path in folder.iterdir()} == {*expected, "README.md"}
    for name, shape in expected.items():
        with gzip.open(folder / name, "rt") as file:
            columns = file.readline().strip().split(",")
        lengths, _ = read_lengths(folder / name, columns)
        assert lengths.shape == shape
        assert lengths.min() > 0
        assert f"`{name}` | {len(lengths):,}".replace(",", " ") in (folder / "README.md").read_text()


def test_reading_lengths_does_not_import_matplotlib() -> None:
    program = "import sys, packload.report; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=HERE, timeout=60).returncode == 0


def test_the_mark_that_spreadsheets_put_first_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbflength\n3\n4\n")
    (tmp_path / "b.csv").write_bytes(b"\xef\xbb\xbf3\n4\n")
    assert read_lengths(tmp_path / "a.csv", ["length"])[0].tolist() == [3, 4]
    assert read_lengths(tmp_path / "b.csv")[0].tolist() == [3, 4]


@pytest.mark.parametrize("text", ["a,12\nb,13\n", "5,0.5\n6,0.25\n"])
def test_a_first_row_that_may_be_a_sample_is_not_taken_for_a_header(tmp_path: Path, text: str) -> None:
    with pytest.raises(SourceError, match="may name the columns or be the first sample"):
        read_lengths(_write(tmp_path, text))


@pytest.mark.parametrize("text", ["\n\nn\n3\n4\n", '"n"\n\n3\n4\n', '"n"\n3\n\n4\n'])
def test_empty_lines_are_passed_over(tmp_path: Path, text: str) -> None:
    lengths, names = read_lengths(_write(tmp_path, text))
    assert (lengths.tolist(), names) == ([3, 4], ("n",))


def test_a_header_may_take_several_lines(tmp_path: Path) -> None:
    assert read_lengths(_write(tmp_path, '"of\nwhat",n\nx,3\ny,4\n'))[0].tolist() == [3, 4]


@pytest.mark.parametrize("kept", [12, 25])
def test_an_archive_that_was_cut_off_is_an_error(tmp_path: Path, kept: int) -> None:
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"length\n3\n4\n5\n")[:kept])
    with pytest.raises(SourceError, match=r"cannot be read"):
        read_lengths(tmp_path / "a.csv.gz")


@pytest.mark.parametrize("source", [":x", "..a:b", "a:"])
def test_what_names_no_module_is_an_error(source: str) -> None:
    with pytest.raises(SourceError, match="neither a file nor module:attribute"):
        read_lengths(source)

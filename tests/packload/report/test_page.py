"""The page on policies: what it names is there, and its commands and programs work."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from typer.testing import CliRunner

import packload
from packload import cli
from packload.report import tables

HERE = Path(__file__).parents[3]
PAGE = (HERE / "docs" / "policies.md").read_text()


def test_every_figure_of_the_table_is_explained() -> None:
    explained = re.findall(
        r"^\| ([^|]+) \| ", PAGE.split("## Look at your own data")[1].split("## Lengths")[0], re.M
    )
    for name, _ in tables._ROWS:
        plain = name.split(",")[0].removesuffix(" on each rank")
        if plain in ("steps", "samples served", "samples above the budget"):
            continue  # these say themselves what they are
        assert any(entry.split(",")[0] == plain for entry in explained), name


def test_every_option_of_the_command_exists() -> None:
    result = CliRunner().invoke(cli.app, ["policies", "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE))
    assert {
        "--column",
        "--batch-size",
        "--budget",
        "--world-size",
        "--picture",
        "--cost",
        "--oversize",
    } <= options
    for option in options:
        assert option in result.output, option


def test_lengths_are_read_as_the_page_says() -> None:
    (program,) = re.findall(r"```python\n(lengths = .*?)```", PAGE, re.DOTALL)
    sizes = [(3, 4, 5), (1, 2, 2)]
    dataset = [
        {
            "tokens": torch.zeros(n),
            "image": torch.zeros(3, m, k),
            "src": torch.zeros(n),
            "tgt": torch.zeros(m),
            "map": torch.zeros(n, k),
        }
        for n, m, k in sizes
    ]
    names = {"packload": packload, "dataset": dataset}
    exec(program, names)
    expected = {
        "lengths": [n for n, _, _ in sizes],
        "sizes": [[m, k] for _, m, k in sizes],
        "pairs": [[n, k] for n, _, k in sizes],
    }
    for name, rows in expected.items():
        assert np.array_equal(names[name], rows), name
    assert {field: one.tolist() for field, one in names["both"].items()} == {"src": [3, 1], "tgt": [4, 2]}


def test_the_files_it_links_to_are_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (HERE / "docs" / target).resolve().exists(), target

"""Pieces of samples."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import packload
from packload import BudgetBatchSampler, CollateError, CutDataset, Piece, ragged

Pair = namedtuple("Pair", "ids label")


@dataclass
class Record:
    ids: Any
    label: int


def cut(sample: Any, schema: dict[str, str], piece: Piece, axis: str = "n") -> Any:
    return CutDataset([sample], schema, axis)[piece]


def test_fields_with_the_axis_are_cut_in_every_dim_that_has_it():
    sample = {
        "ids": torch.arange(6),
        "pair": np.arange(36).reshape(6, 6),
        "heads": torch.arange(12).reshape(2, 6),
        "label": 3,
        "other": torch.arange(6),
    }
    schema = {"ids": "n", "pair": "n n", "heads": "_ n", "other": "m"}
    got = cut(sample, schema, Piece(0, 2, 5))
    assert got["ids"].tolist() == [2, 3, 4]
    assert got["pair"].tolist() == sample["pair"][2:5, 2:5].tolist()
    assert got["heads"].tolist() == [[2, 3, 4], [8, 9, 10]]
    assert got["label"] == 3 and got["other"] is sample["other"]
    assert len(sample["ids"]) == 6 and list(got) == list(sample)


def test_every_container_keeps_its_type():
    piece = Piece(0, 1, 3)
    assert cut([1, 2, 3], {"": "n"}, piece) == [2, 3]
    assert cut((7, [1, 2, 3]), {"1": "n"}, piece) == (7, [2, 3])
    assert cut(Pair([1, 2, 3], 7), {"ids": "n"}, piece) == Pair([2, 3], 7)
    assert cut(Record([1, 2, 3], 7), {"ids": "n"}, piece) == Record([2, 3], 7)
    assert cut({"a": {"b": Record([1, 2, 3], 7)}}, {"a.b.ids": "n"}, piece) == {"a": {"b": Record([2, 3], 7)}}
    assert cut({3: [1, 2, 3]}, {"3": "n"}, piece) == {3: [2, 3]}
    marked = cut({"x": ragged(torch.arange(4), "k")}, {"x": "k"}, piece, axis="k")["x"]
    assert marked.pattern == "k" and marked.value.tolist() == [1, 2]


def test_whole_samples_pass_as_they_are():
    data = [{"ids": [1, 2]}, {"ids": [3]}]
    dataset = CutDataset(data, {"ids": "n"})
    assert len(dataset) == 2 and dataset[1] is data[1]
    assert dataset.__getitems__([0, Piece(0, 1, 2)]) == [{"ids": [1, 2]}, {"ids": [2]}]


def test_a_data_set_that_fetches_batches_is_asked_once():
    class Fetches:
        asked: list[list[int]] = []

        def __getitems__(self, indices: list[int]) -> list[list[int]]:
            self.asked.append(indices)
            return [[10 * i, 10 * i + 1] for i in indices]

    data = Fetches()
    assert CutDataset(data, {"": "n"}).__getitems__([3, Piece(1, 1, 2)]) == [[30, 31], [11]]
    assert data.asked == [[3, 1]]


@pytest.mark.parametrize(
    ("sample", "schema", "message"),
    [
        ({"ids": [1, 2]}, {"ids": "n"}, r"sample 0, field 'ids'.*has 2 positions"),
        ({"x": [1]}, {"ids": "n"}, "sample 0, field 'ids'"),
        ({"ids": torch.ones(3, 3)}, {"ids": "n"}, r"shape \[3, 3\], which 'n' does not fit"),
        ({"a": "text"}, {"a.b": "n"}, "sample 0, field 'a.b'"),
        ((1, 2), {"ids": "n"}, "sample 0, field 'ids'"),
    ],
)
def test_what_cannot_be_cut_is_an_error_that_names_it(sample, schema, message):
    with pytest.raises(CollateError, match=message):
        cut(sample, schema, Piece(0, 1, 3))


def test_a_schema_without_the_axis_is_refused():
    with pytest.raises(ValueError, match="nothing would be cut"):
        CutDataset([], {"ids": "m"})


def test_a_data_set_that_does_not_know_pieces_fails():
    for data in ([1, 2], np.ones((2, 9)), torch.ones(2, 9)):
        with pytest.raises((TypeError, IndexError)):
            data[Piece(1, 0, 1)]


def test_split_samples_arrive_in_pieces_within_the_budget():
    data = [{"ids": torch.arange(n), "label": n} for n in (3, 100, 4)]
    sampler = BudgetBatchSampler([3, 100, 4], 50, oversize="split")
    schema = {"ids": "n"}
    loader = DataLoader(CutDataset(data, schema), batch_sampler=sampler, collate_fn=packload.collate)
    got = [ids.tolist() for batch in loader for ids in batch["ids"].to_list()]
    assert sorted(got) == sorted([[0, 1, 2], [0, 1, 2, 3], list(range(50)), list(range(50, 100))])

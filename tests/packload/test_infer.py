"""infer_schema: which dims vary, and which vary together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from packload import Collate, CollateError, infer_schema, ragged

SIZES = [(3, 7), (5, 2), (4, 4), (1, 9)]


def protein(n: int, m: int) -> dict[str, Any]:
    return {
        "key": f"p{n}",
        "residues": list(range(n)),
        "coordinates": torch.zeros(n, 3),
        "meta": {"pair": np.zeros((n, n, 8), np.float32), "cross": torch.zeros(n, m), "box": [0.0, 1.0]},
        "other": torch.zeros(m),
        "label": 1,
    }


def test_dims_that_vary_alike_are_one_axis_and_others_are_sizes() -> None:
    samples = [protein(n, m) for n, m in SIZES]
    schema = infer_schema(samples)
    assert schema == {
        "residues": "n",
        "coordinates": "n 3",
        "meta.pair": "n n 8",
        "meta.cross": "n m",
        "meta.box": "2",
        "other": "m",
    }
    batch = Collate(schema)(samples)
    assert batch.residues.axes[0] is batch.meta.pair.axes[1]


def test_images_have_height_and_width() -> None:
    samples = [{"image": Image.new("RGB", (w, h))} for h, w in SIZES]
    assert infer_schema(samples) == {"image": "3 h w"}
    assert Collate({"image": "3 h w"})(samples).image.order == (0, 3, 1, 2)


def test_marks_keep_their_names_and_lend_them() -> None:
    samples = [(ragged(torch.zeros(n, n), "res res"), torch.zeros(n)) for n, _ in SIZES]
    assert infer_schema(samples) == {"1": "res"}


def test_samples_that_are_leaves() -> None:
    assert infer_schema([torch.zeros(n, 2) for n, _ in SIZES]) == {"": "n 2"}
    assert infer_schema(iter([[1, 2], [3]])) == {"": "n"}


def test_the_probe_is_spread_over_the_dataset_and_bounded() -> None:
    class Data:
        asked: list[int] = []

        def __len__(self) -> int:
            return 1000

        def __getitem__(self, index: int) -> torch.Tensor:
            self.asked.append(index)
            return torch.zeros(3 if index < 500 else 4)

    assert infer_schema(Data(), probe=10) == {"": "n"}
    assert len(Data.asked) == 10 and Data.asked[0] == 0 and Data.asked[-1] == 999


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([torch.zeros(3)], ["two samples"]),
        ([], ["two samples"]),
        ([{"x": [1]}, {"y": [1]}], ["sample 1", "'x'", "'y'"]),
        ([{"x": torch.zeros(2)}, {"x": torch.zeros(2, 2)}], ["'x'", "rank"]),
        ([{"x": "a"}, {"x": [1]}], ["'x'", "rank"]),
    ],
)
def test_what_cannot_be_inferred_is_an_error(samples: list[Any], words: list[str]) -> None:
    with pytest.raises(CollateError) as error:
        infer_schema(samples)
    for word in words:
        assert word in str(error.value), str(error.value)


def test_a_list_that_is_no_array_names_its_sample_and_field() -> None:
    with pytest.raises(CollateError, match="probed sample 1, field 'x'.*rectangular"):
        infer_schema([{"x": [[1], [2]]}, {"x": [[1], [2, 3]]}])

"""Stream movie reviews out of shards, packed, and go on after a stop: ``python -m examples.stream_text``.

Reviews are written as text. Workers split and number their words; the index knows how many there are, so
that batches are filled to a number of words before a review is read.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import packload
from examples import _stopping
from packload.demo.data import Vocabulary, read_reviews, reviews_file, split_words
from packload.demo.model import ReviewClassifier

WORDS = 10_000
BUDGET = 4096


class Encode:
    """A review as numbers: what becomes of a sample once it is read."""

    def __init__(self, folder: Path) -> None:
        self.vocabulary = Vocabulary(json.loads((folder / "words.json").read_text()), WORDS)

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": self.vocabulary.encode(split_words(sample["txt"])), "label": sample["cls"]}


def write(folder: Path, limit: int | None) -> None:
    """Write reviews to shards, with the number of their words in the index, and the words themselves."""
    reviews = read_reviews(reviews_file(), 0)[:limit]
    with packload.ShardWriter(folder, size="1MB") as writer:
        for text, label in reviews:
            writer.write({"txt": text, "cls": label}, lengths={"tokens": len(split_words(text))})
    (folder / "words.json").write_text(json.dumps([split_words(text) for text, _ in reviews]))
    print(f"{writer.written} reviews in {len(writer.indexes)} shards")


def train(folder: Path, path: Path, until: int, workers: int, mode: str) -> None:
    """Train up to a step, from a checkpoint if there is one."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loader = packload.shards(
        str(folder / "*.tar"),
        map=Encode(folder),
        schema={"tokens": "n"},
        budget=BUDGET,
        mixed=4,
        workers=workers,
        mode=mode,
    )
    model = ReviewClassifier(WORDS, int(loader.dataset.lengths("tokens").max()))

    def loss(batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["tokens"]), batch["label"])

    with loader:
        _stopping.train(loader, model, loss, until, path)


def main() -> None:
    """Write shards, train without and with stops, compare."""
    started = _stopping.arguments()
    if started is not None:
        return train(*started)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--reviews", type=int, default=4000)
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), settings.reviews)
        _stopping.compare("examples.stream_text", Path(name), settings.steps)


if __name__ == "__main__":
    main()

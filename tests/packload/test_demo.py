"""The demo: its data, its model padded and packed, what it measures."""

import copy
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from examples.benchmarks.reviews import ExplicitClassifier, explicit_inputs
from ops import mark_dynamic
from packload.batch import Batch
from packload.collate import collate
from packload.demo import data
from packload.demo.memory import peak_bytes
from packload.demo.model import ReviewClassifier
from packload.demo.report import Result, save_picture, table
from packload.demo.train import (
    Comparison,
    Run,
    Trainer,
    accuracy,
    compare,
    gradient_difference,
    packed_inputs,
    padded_inputs,
    random_batches,
)

CPU = torch.device("cpu")
LENGTHS = (7, 1, 12, 4, 4, 9)


def _reviews(lengths: tuple[int, ...] = LENGTHS, words: int = 50) -> data.Reviews:
    numbers = np.random.default_rng(0)
    tokens = [numbers.integers(0, words, n) for n in lengths]
    return data.Reviews(tokens, [i % 2 for i in range(len(lengths))])


def _batch(lengths: tuple[int, ...] = LENGTHS):
    reviews = _reviews(lengths)
    return collate([reviews[i] for i in range(len(reviews))])


def _model() -> ReviewClassifier:
    torch.manual_seed(0)
    return ReviewClassifier(50, 16, width=8, heads=2)


# --- data


def test_words_are_lower_case_without_markup() -> None:
    assert data.split_words("It's GOOD.<br /><br />Really") == ["it's", "good", "really"]


def test_a_text_without_words_still_has_one() -> None:
    assert data.split_words("?!") == [""]


def test_the_vocabulary_keeps_the_most_frequent_words() -> None:
    vocabulary = data.Vocabulary([["a", "b", "a"], ["a", "b", "c"]], size=3)
    assert len(vocabulary) == 3
    assert vocabulary.encode(["a", "b", "c", "d"]).tolist() == [1, 2, data.UNKNOWN, data.UNKNOWN]


def test_the_csv_rows_of_imdb_alone_are_read_and_shuffled_by_the_seed(tmp_path: Path) -> None:
    path = tmp_path / "reviews.csv"
    rows = [f"text {i},{i % 2},imdb" for i in range(20)]
    path.write_text("\n".join(["text,label,source", *rows, "short,1,rotten_tomatoes"]))
    one, again, other = (data.read_reviews(path, seed) for seed in (0, 0, 1))
    assert sorted(one) == sorted((f"text {i}", i % 2) for i in range(20))
    assert one == again != other


def test_the_real_reviews_are_split_and_encoded() -> None:
    split = data.load_reviews(held_out=50, vocabulary_size=500, limit=300)
    assert (len(split.train), len(split.held_out), len(split.vocabulary)) == (250, 50, 500)
    assert {0, 1} == set(split.train.labels) == set(split.held_out.labels)
    assert max(int(t.max()) for t in split.train.tokens) < 500
    assert split.max_length == max(map(len, split.train.tokens + split.held_out.tokens))


def test_holding_out_everything_is_an_error() -> None:
    with pytest.raises(ValueError, match="held_out=300"):
        data.load_reviews(held_out=300, limit=300)


# --- one model, three ways


@pytest.mark.parametrize("lengths", [LENGTHS, (5,), (3, 3, 3), (1, 1), (16, 1)])
def test_padded_and_packed_agree_in_scores_and_gradients(lengths: tuple[int, ...]) -> None:
    batch = _batch(lengths)
    packed = _model()
    padded = copy.deepcopy(packed)
    scores = [model(*inputs(batch)) for model, inputs in ((packed, packed_inputs), (padded, padded_inputs))]
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-5, atol=1e-6)
    for one in scores:
        F.cross_entropy(one, batch["label"]).backward()
    assert gradient_difference(packed, padded) < 1e-5


def test_packing_by_hand_agrees_with_padded() -> None:
    batch = _batch()
    padded = _model()
    by_hand = copy.deepcopy(padded)
    scores = [padded(*padded_inputs(batch)), ExplicitClassifier(by_hand)(*explicit_inputs(batch))]
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-5, atol=1e-6)
    for one in scores:
        F.cross_entropy(one, batch["label"]).backward()
    assert gradient_difference(by_hand, padded) < 1e-5


# --- training and measuring


def test_padded_and_packed_training_stay_together() -> None:
    batches = random_batches(_reviews(LENGTHS * 8), 6, 0, CPU)
    seen: list[float] = []
    comparison, trainer = compare(_model(), batches, 10, seen.append)
    assert seen == comparison.packed.losses
    assert comparison.loss_difference < 1e-4
    assert comparison.gradient_difference < 1e-5
    assert 0 < comparison.occupancy < 1
    assert comparison.packed.peak_bytes < comparison.padded.peak_bytes
    assert trainer.model(*packed_inputs(next(batches))).shape == (6, 2)


def test_random_batches_go_on_over_epochs_and_repeat_with_the_seed() -> None:
    def labels(seed: int) -> list[list[int]]:
        batches = random_batches(_reviews(), 4, seed, CPU)
        return [batch["tokens"].axes[0].lengths.tolist() for batch in itertools.islice(batches, 5)]

    assert labels(0) == labels(0) != labels(1)


def test_measuring_memory_leaves_the_weights() -> None:
    model = _model()
    before = copy.deepcopy(model.state_dict())
    batch = _batch()
    assert Trainer(model).peak_bytes(packed_inputs(batch), batch["label"]) > 0
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_peak_memory_counts_what_is_alive_at_once() -> None:
    def call() -> None:
        one = torch.zeros(1000)
        two = one + 1
        del one
        _ = two + 1

    assert 8000 <= peak_bytes(call, CPU) < 8100  # two of the three, and the scalars


def test_accuracy_counts_right_answers_and_keeps_the_mode() -> None:
    model, reviews = _model(), _reviews()
    right = [int(model(*packed_inputs(_one(reviews, i))).argmax()) == reviews.labels[i] for i in range(6)]
    assert accuracy(model, reviews, batch_size=4) == pytest.approx(sum(right) / 6)
    assert model.training


def _one(reviews: data.Reviews, index: int):
    return collate([reviews[index]])


# --- report


def _result() -> Result:
    padded, packed = Run([0.7, 0.6], [0.4, 0.6], 8 << 20), Run([0.7, 0.5], [0.1, 0.3], 2 << 20)
    comparison = Comparison(padded, packed, valid_cells=30, padded_cells=100)
    return Result(comparison, np.array([10, 20, 400]), accuracy=0.75, held_out=100, steps=2)


def test_the_comparison_is_of_medians() -> None:
    comparison = _result().comparison
    assert comparison.speedup == pytest.approx(2.5)
    assert comparison.occupancy == pytest.approx(0.3)
    assert comparison.loss_difference == pytest.approx(0.1)


def test_the_table_and_the_picture_are_made(tmp_path: Path) -> None:
    assert table(_result()).row_count == 6
    save_picture(_result(), tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


# --- compiled


def test_the_model_and_its_loss_are_one_graph_over_any_batches() -> None:
    """Batches of one, of equal lengths, with an empty review, the same twice, and one warm from eager."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = _model()

    def loss(batch: Batch) -> torch.Tensor:
        scores = model(batch["tokens"])
        return F.cross_entropy(scores.nan_to_num(), batch["label"])

    def step(fn, batch: Batch) -> list[torch.Tensor]:
        model.zero_grad()
        value = fn(batch)
        value.backward()
        return [value.detach(), *(p.grad.clone() for p in model.parameters())]

    compiled = torch.compile(loss, fullgraph=True)
    batches = [(7, 2, 12), (4, 4), (6,), (3, 0, 5), (7, 2, 1, 4), (2, 2, 2), (2, 6), (5, 9, 3, 3, 8)]
    first = mark_dynamic(_batch(batches[0]))
    for batch in (first, *(mark_dynamic(_batch(lengths)) for lengths in batches[1:]), first):
        torch.testing.assert_close(
            step(compiled, batch), step(loss, batch), rtol=1e-4, atol=1e-5, equal_nan=True
        )  # the mean over an empty review is nan
    warm = mark_dynamic(_batch((5, 8, 8)))
    expected = step(loss, warm)
    torch.testing.assert_close(step(compiled, warm), expected, rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1

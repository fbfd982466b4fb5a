"""The demo's training step three ways: ``python -m examples.benchmarks.reviews``.

* padded: dense batches with a mask, as PyTorch has it;
* packed: the same module on a `PackedTensor`;
* explicit: packing written by hand, on the rows of all samples and their lengths, from the same weights.

All three start from the same weights, see the same random batches, and take turns.
"""

import argparse
import copy
import statistics
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from examples.benchmarks._timing import threads
from packload.batch import Batch
from packload.demo.data import Split, load_reviews
from packload.demo.model import ReviewClassifier
from packload.demo.train import (
    Inputs,
    Trainer,
    gradient_difference,
    packed_inputs,
    padded_inputs,
    random_batches,
)


class ExplicitClassifier(nn.Module):
    """`ReviewClassifier` on rows: every structure is an index tensor or a list of lengths, spelled out."""

    def __init__(self, model: ReviewClassifier) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, lengths: list[int], sample_ids: Tensor, positions: Tensor) -> Tensor:
        """Scores [B, classes] of ``tokens`` [T], the words of B reviews one after the other."""
        model = self.model
        x = model.embed(tokens) + model.positions[0].index_select(0, positions)
        for layer in model.encoder.layers:
            x = x + self._attention(layer.self_attn, layer.norm1(x), lengths)
            x = x + layer.linear2(F.gelu(layer.linear1(layer.norm2(x))))
        if model.encoder.norm is not None:
            x = model.encoder.norm(x)
        sums = x.new_zeros(len(lengths), x.shape[1]).index_add(0, sample_ids, x)
        return model.head(sums / torch.tensor(lengths, device=x.device)[:, None])

    @staticmethod
    def _attention(attention: nn.MultiheadAttention, x: Tensor, lengths: list[int]) -> Tensor:
        qkv = F.linear(x, attention.in_proj_weight, attention.in_proj_bias)
        outputs = []
        for sample in qkv.view(len(x), 3, attention.num_heads, -1).split(lengths):
            q, k, v = sample.permute(1, 2, 0, 3)[:, None].unbind()
            outputs.append(F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1))
        return attention.out_proj(torch.cat(outputs).flatten(1))


def explicit_inputs(batch: Batch) -> Inputs:
    """Arguments of `ExplicitClassifier`; index tensors computed here, outside the timed step."""
    tokens = batch["tokens"]
    lengths = tokens.axes[0].lengths
    device = tokens.device
    starts = lengths.cumsum(0) - lengths
    sample_ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    positions = torch.arange(len(sample_ids)) - starts[sample_ids]
    return tokens.values, lengths.tolist(), sample_ids.to(device), positions.to(device)


INPUTS = {"padded": padded_inputs, "packed": packed_inputs, "explicit": explicit_inputs}


@dataclass
class Measured:
    """Losses and seconds of one way, a figure a step, and how far its first gradients are from padded."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    gradient_difference: float = 0.0

    def loss_difference(self, other: "Measured") -> float:
        """The largest difference of the losses over all steps."""
        return max(abs(a - b) for a, b in zip(self.losses, other.losses, strict=True))


def measure(split: Split, *, steps: int, batch_size: int, seed: int, width: int) -> dict[str, Measured]:
    """Train the three ways in turn, after two steps to warm up that count for the losses only."""
    torch.manual_seed(seed)
    padded = ReviewClassifier(len(split.vocabulary), split.max_length, width=width)
    packed, explicit = copy.deepcopy(padded), ExplicitClassifier(copy.deepcopy(padded))
    models = {"padded": padded, "packed": packed, "explicit": explicit}
    trainers = {name: Trainer(model) for name, model in models.items()}
    measured = {name: Measured() for name in models}
    batches = random_batches(split.train, batch_size, seed, torch.device("cpu"))
    names = list(models)
    for step in range(steps + 2):
        batch = next(batches)
        inputs = {name: INPUTS[name](batch) for name in names}
        for name in names[step % 3 :] + names[: step % 3]:
            loss, seconds = trainers[name].step(inputs[name], batch["label"])
            measured[name].losses.append(loss)
            if step >= 2:
                measured[name].seconds.append(seconds)
        if step == 0:
            for name in names:
                measured[name].gradient_difference = gradient_difference(models[name], padded)
    return measured


def table(measured: dict[str, Measured]) -> Table:
    """One row for each way; a ratio is the median over the steps of the ratio in that step."""
    table = Table(title="a training step on random batches of reviews")
    table.add_column("batches")
    speeds = ("speed over padded", "speed over explicit")
    for column in ("ms, median", *speeds, "loss - padded", "gradients - padded"):
        table.add_column(column, justify="right")
    for name, one in measured.items():
        table.add_row(
            name,
            f"{statistics.median(one.seconds) * 1e3:.0f}",
            f"{_speed(one, measured['padded']):.2f}",
            f"{_speed(one, measured['explicit']):.2f}",
            f"{one.loss_difference(measured['padded']):.1e}",
            f"{one.gradient_difference:.1e}",
        )
    return table


def _speed(one: Measured, other: Measured) -> float:
    return statistics.median(b / a for a, b in zip(one.seconds, other.seconds, strict=True))


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--width", type=int, default=64, help="features of the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    split = load_reviews(seed=arguments.seed)
    with threads(arguments.threads):
        measured = measure(
            split,
            steps=arguments.steps,
            batch_size=arguments.batch_size,
            seed=arguments.seed,
            width=arguments.width,
        )
    Console(width=110).print(table(measured))


if __name__ == "__main__":
    main()

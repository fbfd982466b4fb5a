"""The demo's training: the same steps on padded and on packed batches, timed side by side."""

import copy
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from packload.batch import Batch
from packload.collate import collate
from packload.demo.memory import peak_bytes

LEARNING_RATE = 3e-3

Inputs = tuple[Any, ...]
"""The arguments a model is called with: (packed tokens,) or (padded tokens, padding)."""


@dataclass
class Run:
    """What was measured of one way of batching."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    @property
    def seconds_per_step(self) -> float:
        """The median, which a pause of the machine does not move."""
        return statistics.median(self.seconds)


@dataclass
class Comparison:
    """Padded and packed training from the same weights on the same batches."""

    padded: Run = field(default_factory=Run)
    packed: Run = field(default_factory=Run)
    valid_cells: int = 0
    padded_cells: int = 0
    gradient_difference: float = 0.0
    """The largest difference of any gradient in the first step, for which the weights are still equal."""

    @property
    def occupancy(self) -> float:
        """The share of the padded batches that is not padding."""
        return self.valid_cells / self.padded_cells

    @property
    def loss_difference(self) -> float:
        """The largest difference of the two losses over all steps."""
        return max(abs(a - b) for a, b in zip(self.padded.losses, self.packed.losses, strict=True))

    @property
    def speedup(self) -> float:
        """How many packed steps fit in one padded step."""
        return self.padded.seconds_per_step / self.packed.seconds_per_step


class Trainer:
    """A model and its optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self._optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)

    def step(self, inputs: Inputs, labels: Tensor) -> tuple[float, float]:
        """One training step: forward, backward, update. Returns the loss and the seconds it took."""
        self._synchronize()
        start = time.perf_counter()
        loss = self._gradients(inputs, labels)
        self._optimizer.step()
        self._synchronize()
        seconds = time.perf_counter() - start
        return loss.item(), seconds

    def peak_bytes(self, inputs: Inputs, labels: Tensor) -> int:
        """The memory that a forward and backward pass takes; the weights stay as they are."""
        self._optimizer.zero_grad()
        return peak_bytes(lambda: self._gradients(inputs, labels), self.device)

    def _gradients(self, inputs: Inputs, labels: Tensor) -> Tensor:
        self._optimizer.zero_grad()
        loss = F.cross_entropy(self.model(*inputs), labels)
        loss.backward()
        return loss.detach()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def packed_inputs(batch: Batch) -> Inputs:
    """The batch as it is: tokens (B, n)."""
    return (batch["tokens"],)


def padded_inputs(batch: Batch) -> Inputs:
    """The batch as PyTorch users pad it: tokens [B, n_max] and where they are padding.

    It is made from the list of reviews, so that nothing computed here is ready for the packed step.
    """
    tokens = batch["tokens"]
    padded = nn.utils.rnn.pad_sequence(tokens.to_list(), batch_first=True)
    lengths = tokens.axes[0].lengths.to(padded.device)
    return padded, torch.arange(padded.shape[1], device=padded.device) >= lengths[:, None]


def random_batches(dataset: Dataset, batch_size: int, seed: int, device: torch.device) -> Iterator[Batch]:
    """Packed batches in random order, epoch after epoch, without end."""
    loader = DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=collate,
        generator=torch.Generator().manual_seed(seed),
    )
    while True:
        for batch in loader:
            yield batch.to(device)


def compare(
    model: nn.Module, batches: Iterator[Batch], steps: int, on_step: Callable[[float], None]
) -> tuple[Comparison, Trainer]:
    """Train ``model`` on packed and a copy of it on padded batches, step by step in turn.

    ``on_step`` gets the packed loss after each step. Returns what was measured and the packed trainer.
    """
    result = Comparison()
    packed, padded = Trainer(model), Trainer(copy.deepcopy(model))
    seen = list(itertools.islice(batches, steps))
    for step, batch in enumerate(seen):
        turns = [
            (packed, packed_inputs(batch), result.packed),
            (padded, padded_inputs(batch), result.padded),
        ]
        for trainer, inputs, run in turns if step % 2 == 0 else reversed(turns):
            loss, seconds = trainer.step(inputs, batch["label"])
            run.losses.append(loss)
            run.seconds.append(seconds)
        if step == 0:
            result.gradient_difference = gradient_difference(packed.model, padded.model)
        result.valid_cells += _valid_cells(batch)
        result.padded_cells += _padded_cells(batch)
        on_step(result.packed.losses[-1])
    widest, fullest = max(seen, key=_padded_cells), max(seen, key=_valid_cells)
    result.padded.peak_bytes = padded.peak_bytes(padded_inputs(widest), widest["label"])
    result.packed.peak_bytes = packed.peak_bytes(packed_inputs(fullest), fullest["label"])
    return result, packed


def gradient_difference(one: nn.Module, other: nn.Module) -> float:
    """The largest absolute difference between the gradients of two copies of a model."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    gradients = [(a.grad, b.grad) for a, b in pairs]
    return max(float((a - b).abs().max()) for a, b in gradients if a is not None and b is not None)


@torch.no_grad()
def accuracy(model: nn.Module, dataset: Dataset, batch_size: int) -> float:
    """The share of ``dataset`` that ``model`` labels rightly, in packed batches."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    right = total = 0
    for batch in DataLoader(dataset, batch_size=batch_size, collate_fn=collate):
        batch = batch.to(device)
        right += int((model(*packed_inputs(batch)).argmax(1) == batch["label"]).sum())
        total += batch.batch_size
    model.train(was_training)
    return right / total


def _valid_cells(batch: Batch) -> int:
    return batch["tokens"].axes[0].total


def _padded_cells(batch: Batch) -> int:
    return batch.batch_size * batch["tokens"].axes[0].max_length

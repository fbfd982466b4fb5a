"""The demo from beginning to end."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from packload.demo import report
from packload.demo.data import Split, load_reviews
from packload.demo.model import ReviewClassifier
from packload.demo.train import accuracy, compare, packed_inputs, random_batches


@dataclass
class Settings:
    """The demo's options, with the values a short run on two cores needs."""

    steps: int = 30
    more_steps: int = 120
    batch_size: int = 32
    held_out: int = 1000
    limit: int | None = None
    seed: int = 0
    device: str = "cpu"
    threads: int = 1
    out: Path = Path("demo.png")


def run(settings: Settings, console: Console) -> report.Result:
    """Train padded and packed, go on packed, print the figures and write the picture.

    On one thread, unless told otherwise: with more, whatever else the machine does slows a step several
    times, as every thread waits for the slowest many times a step.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        return _run(settings, console)
    finally:
        torch.set_num_threads(threads)


def _run(settings: Settings, console: Console) -> report.Result:
    with console.status("reading the reviews"):
        split = load_reviews(held_out=settings.held_out, limit=settings.limit, seed=settings.seed)
    console.print(_introduction(split, settings))
    with _progress(console) as progress:
        result = _train(split, settings, progress)
    console.print(report.table(result))
    console.print(
        "peak memory: the most bytes of tensors alive at once in a step, weights and batch not counted"
    )
    held_out = f"{result.held_out} held-out reviews"
    console.print(f"after {result.steps} packed steps: {result.accuracy:.1%} of {held_out} right")
    report.save_picture(result, settings.out)
    console.print(f"picture: {settings.out}")
    return result


def _introduction(split: Split, settings: Settings) -> str:
    lengths = split.train.lengths
    return (
        f"{len(lengths)} reviews to train on, {len(split.held_out)} held out; "
        f"{lengths.min()} to {lengths.max()} words, mean {lengths.mean():.0f}, none cut off; "
        f"batches of {settings.batch_size}; {settings.device}, threads: {settings.threads}"
    )


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]}"),
        console=console,
    )


def _train(split: Split, settings: Settings, progress: Progress) -> report.Result:
    device = torch.device(settings.device)
    torch.manual_seed(settings.seed)
    model = ReviewClassifier(len(split.vocabulary), split.max_length).to(device)
    batches = random_batches(split.train, settings.batch_size, settings.seed, device)
    both = _show_loss(progress, "padded | packed", settings.steps)
    comparison, trainer = compare(model, batches, settings.steps, both)
    steps = settings.steps + settings.more_steps
    packed = _show_loss(progress, "packed, go on", settings.more_steps)
    for _ in range(settings.more_steps):
        batch = next(batches)
        loss, _ = trainer.step(packed_inputs(batch), batch["label"])
        packed(loss)
    return report.Result(
        comparison=comparison,
        lengths=split.train.lengths,
        accuracy=accuracy(model, split.held_out, settings.batch_size),
        held_out=len(split.held_out),
        steps=steps,
    )


def _show_loss(progress: Progress, description: str, steps: int) -> Callable[[float], None]:
    task = progress.add_task(description, total=steps, loss="")

    def advance(loss: float) -> None:
        progress.update(task, advance=1, loss=f"loss {loss:.3f}")

    return advance

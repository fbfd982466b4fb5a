"""Choose how to batch movie reviews: ``python -m examples.policies``.

Lengths of the reviews -> what three policies would do with them -> a short training run under each. All
train the same model from the same weights, in packed batches; what differs is which reviews meet in a batch.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from rich.console import Console
from torch.utils.data import DataLoader

import packload
from packload.demo.data import Split, load_reviews
from packload.demo.model import ReviewClassifier
from packload.report import table
from packload.report.compare import Settings, compare


def main() -> None:
    """Print the figures of each policy, then train under each."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--steps", type=int, default=100, help="training steps under each policy")
    parser.add_argument("--batch-size", type=int, default=32, help="reviews in a random or bucketed batch")
    parser.add_argument("--limit", type=int, help="use only so many reviews")
    arguments = parser.parse_args()
    console = Console(width=110)
    held_out = 1000 if arguments.limit is None else arguments.limit // 4
    reviews = load_reviews(held_out=held_out, limit=arguments.limit)

    # The lengths are all that a plan is made from. A budget of as many words as an average batch has
    # makes the three policies alike in work a step.
    lengths = packload.lengths(reviews.train, "tokens")
    size = arguments.batch_size
    budget = int(max(size * lengths.mean(), lengths.max()))

    settings = Settings(size, budget, world_size=1, cost=packload.cost.tokens)
    results = compare(lengths, settings)
    console.print(table([result.figures for result in results], f"{len(lengths):,} reviews, one epoch"))

    samplers = {
        "random": packload.RandomBatchSampler(lengths, size),
        "bucket": packload.BucketBatchSampler(lengths, size),
        "budget": packload.BudgetBatchSampler(lengths, budget),
    }
    torch.set_num_threads(1)  # with other work on the machine, threads only wait for each other
    for name, sampler in samplers.items():
        loader = DataLoader(reviews.train, batch_sampler=sampler, collate_fn=packload.collate)
        console.print(f"{name}: {train(reviews, loader, arguments.steps)}")


def train(reviews: Split, loader: DataLoader, steps: int) -> str:
    """Train a model for so many steps; what was seen, how fast, and how well it labels other reviews."""
    torch.manual_seed(0)
    model = ReviewClassifier(len(reviews.vocabulary), reviews.max_length)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    words, samples = [], 0
    start = time.perf_counter()
    for _, batch in zip(range(steps), loader, strict=False):
        loss = F.cross_entropy(model(batch["tokens"]), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        words.append(batch["tokens"].values.shape[0])
        samples += batch.batch_size
    seconds = time.perf_counter() - start

    right = 0
    with torch.no_grad():
        for batch in DataLoader(reviews.held_out, batch_size=32, collate_fn=packload.collate):
            right += int((model(batch["tokens"]).argmax(1) == batch["label"]).sum())
    return (
        f"{len(words)} steps of {min(words):,} to {max(words):,} words in {seconds:.1f} s, "
        f"{sum(words) / seconds:,.0f} words a second; {samples:,} reviews seen, "
        f"{right / len(reviews.held_out):.1%} of {len(reviews.held_out):,} held-out reviews right"
    )


if __name__ == "__main__":
    main()

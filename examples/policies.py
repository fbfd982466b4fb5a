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
from packload.demo.data import load_reviews
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
    torch.set_num_threads(1)  # with other work on the machine, threads only wait for each other
    console = Console(width=110)

    # The lengths are all that a plan is made from. A budget of as many words as an average batch has
    # makes the three policies alike in work a step.
    reviews = load_reviews(
        held_out=1000 if arguments.limit is None else arguments.limit // 4, limit=arguments.limit
    )
    lengths = packload.lengths(reviews.train, "tokens")
    size = arguments.batch_size
    budget = max(round(size * lengths.mean()), lengths.max())

    settings = Settings(size, int(budget), world_size=1, cost=packload.cost.tokens)
    results = compare(lengths, settings)
    console.print(table([result.figures for result in results], f"{len(lengths):,} reviews, one epoch"))

    samplers = {
        "random": packload.RandomBatchSampler(lengths, size),
        "bucket": packload.BucketBatchSampler(lengths, size),
        "budget": packload.BudgetBatchSampler(lengths, int(budget)),
    }
    for name, sampler in samplers.items():
        torch.manual_seed(0)
        model = ReviewClassifier(len(reviews.vocabulary), reviews.max_length)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        loader = DataLoader(reviews.train, batch_sampler=sampler, collate_fn=packload.collate)

        words = samples = most = 0
        start = time.perf_counter()
        for _, batch in zip(range(arguments.steps), loader, strict=False):
            loss = F.cross_entropy(model(batch["tokens"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            cells = batch["tokens"].values.shape[0]
            words, samples, most = words + cells, samples + len(batch["label"]), max(most, cells)
        seconds = time.perf_counter() - start

        right = 0
        with torch.no_grad():
            for batch in DataLoader(reviews.held_out, batch_size=size, collate_fn=packload.collate):
                right += int((model(batch["tokens"]).argmax(1) == batch["label"]).sum())
        console.print(
            f"{name}: {arguments.steps} steps of {words / arguments.steps:,.0f} words (at most {most:,}) in "
            f"{seconds:.1f} s, {words / seconds:,.0f} words a second; {samples:,} reviews seen, "
            f"{right / len(reviews.held_out):.1%} of {len(reviews.held_out):,} held-out reviews right"
        )


if __name__ == "__main__":
    main()

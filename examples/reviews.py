"""Train a transformer on movie reviews in packed batches: ``python -m examples.reviews``.

The model and the loop are ordinary PyTorch. What makes the batches packed is ``collate_fn=packload.collate``.
"""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import packload
from packload.demo.data import load_reviews
from packload.demo.model import ReviewClassifier


def main(steps: int = 150) -> None:
    """Train for ``steps`` steps, then print the accuracy on reviews the model has not seen."""
    torch.manual_seed(0)
    reviews = load_reviews()
    loader = DataLoader(reviews.train, batch_size=32, shuffle=True, collate_fn=packload.collate)
    model = ReviewClassifier(len(reviews.vocabulary), reviews.max_length)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    for step, batch in zip(range(steps), loader, strict=False):
        loss = F.cross_entropy(model(batch["tokens"]), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")

    right = 0
    with torch.no_grad():
        for batch in DataLoader(reviews.held_out, batch_size=32, collate_fn=packload.collate):
            right += int((model(batch["tokens"]).argmax(1) == batch["label"]).sum())
    print(f"{right / len(reviews.held_out):.1%} of {len(reviews.held_out)} held-out reviews right")


if __name__ == "__main__":
    main()

"""Stream pictures out of shards, packed, and go on after a stop: ``python -m examples.stream_images``.

Pictures are written as JPEG. The index has their heights and widths, from the files' headers, so that batches
are filled to a number of pixels before one is decoded. Nothing is resized or padded.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import packload
from examples import _stopping
from examples.pictures import views

PIXELS = 400_000


class Texture(nn.Module):
    """Guesses the folder of a picture from its colours and edges: the same small network on every pixel."""

    def __init__(self, folders: int, width: int = 24) -> None:
        super().__init__()
        self.pixel = nn.Sequential(nn.Linear(9, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, folders)

    def forward(self, pictures: Tensor) -> Tensor:
        """Scores [B, folders] of pictures [B, 3, h, w], dense or packed."""
        x = pictures.permute(0, 2, 3, 1).float() / 255
        here, right, below = x[:, :-1, :-1], x[:, :-1, 1:], x[:, 1:, :-1]
        pixels = torch.cat([here, right - here, below - here], -1)
        return self.head(self.pixel(pixels).mean((1, 2)))


def write(folder: Path, count: int) -> None:
    """Write pictures of many sizes to shards."""
    with packload.ShardWriter(folder, size="2MB", workers=2) as writer:
        for picture, label in views(count, (64, 200)):
            writer.write({"jpg": picture, "cls": label})
    print(f"{writer.written} pictures in {len(writer.indexes)} shards")


def train(folder: Path, path: Path, until: int, workers: int, mode: str) -> None:
    """Train up to a step, from a checkpoint if there is one."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loader = packload.shards(
        str(folder / "*.tar"), schema={"jpg": "_ h w"}, budget=PIXELS, mixed=4, workers=workers, mode=mode
    )
    model = Texture(8)

    def loss(batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["jpg"]), batch["cls"])

    with loader:
        _stopping.train(loader, model, loss, until, path)


def main() -> None:
    """Write shards, train without and with stops, compare."""
    started = _stopping.arguments()
    if started is not None:
        return train(*started)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--pictures", type=int, default=300)
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), settings.pictures)
        _stopping.compare("examples.stream_images", Path(name), settings.steps)


if __name__ == "__main__":
    main()

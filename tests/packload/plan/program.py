"""A program for torchrun: two epochs of a plan over all ranks, in this process's own rank.

Every rank writes what it served to ``<folder>/<rank>.json``: a list of epochs, each a list of batches.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist
from torch.utils.data import DataLoader

from packload import BudgetBatchSampler


def main(folder: str) -> None:
    """Serve two epochs, with two worker processes, and step together with the other ranks."""
    dist.init_process_group("gloo")
    lengths = [(7 * i * i + 3 * i) % 90 + 1 for i in range(1001)]
    sampler = BudgetBatchSampler(lengths, 256)
    loader = DataLoader(range(len(lengths)), batch_sampler=sampler, num_workers=2, collate_fn=list)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = []
        for batch in loader:
            dist.barrier()
            batches.append(batch)
        epochs.append(batches)
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(epochs))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])

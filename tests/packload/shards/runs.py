"""Programs for tests of whole runs: one that may be killed at any time, and one of several ranks.

As a module it is what ``torchrun`` starts: ``python -m tests.packload.shards.runs FOLDER OUT``.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

import packload


def loader_of(folder, workers, **arguments):
    return packload.shards(
        str(Path(folder) / "*.tar"), lengths="txt.words", budget=16, workers=workers, **arguments
    )


def save(path, checkpoint):
    part = Path(f"{path}.part")
    part.write_text(json.dumps(checkpoint))
    os.replace(part, path)


def train(folder, path, epochs, workers, pause):
    """Serve epochs, with a checkpoint after each step; go on from the checkpoint that is there."""
    loader = loader_of(folder, workers, rank=0, world_size=1)
    served = []
    if Path(path).exists():
        checkpoint = json.loads(Path(path).read_text())
        loader.load_state_dict(checkpoint["state"])
        served = checkpoint["served"]
    while len(served) < epochs or served[-1]["left"]:
        if not served or not served[-1]["left"]:
            served.append({"keys": [], "left": True})
        for batch in loader:
            served[-1]["keys"].append(batch["__key__"])
            save(path, {"state": loader.state_dict(), "served": served})
            time.sleep(pause)
        served[-1]["left"] = False
        save(path, {"state": loader.state_dict(), "served": served})
    loader.close()


def serve_rank(folder, out):
    """One rank of several: two epochs, with the state taken inside of the second and gone on from."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    first = [batch["__key__"] for batch in loader_of(folder, workers=2)]
    begun = loader_of(folder, workers=2)
    begun.set_epoch(1)
    run = iter(begun)
    second = [next(run)["__key__"] for _ in range(2)]
    again = loader_of(folder, workers=1)
    again.load_state_dict(begun.state_dict())
    second += [batch["__key__"] for batch in again]
    Path(out, f"{rank}.json").write_text(json.dumps([first, second]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    serve_rank(sys.argv[1], sys.argv[2])

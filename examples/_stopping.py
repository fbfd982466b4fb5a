"""Train, stop, and go on in another process: what the streaming examples share."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from packload.loader import Loader


def train(loader: Loader, model: nn.Module, loss_of: Callable[[Any], Tensor], until: int, path: Path) -> None:
    """Train up to a step, from the checkpoint at ``path`` if there is one, and leave a checkpoint there."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    step = 0
    if path.exists():
        checkpoint = torch.load(path)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        loader.load_state_dict(checkpoint["loader"])
        step = checkpoint["step"]
    while step < until:
        for batch in loader:
            loss = loss_of(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 5 == 0 or step == until:
                print(f"step {step}: loss {loss.item():.3f}", flush=True)
            if step == until:
                break
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "loader": loader.state_dict(),
            "step": step,
        },
        path,
    )


def compare(module: str, folder: Path, steps: int) -> None:
    """Train once without a break, once stopped twice and gone on with other workers; compare the weights."""
    with tempfile.TemporaryDirectory() as name:
        whole, parts = Path(name, "whole.pt"), Path(name, "parts.pt")
        print("without a break, 2 threads")
        _start(module, folder, whole, steps, 2, "thread")
        for part, (workers, mode) in enumerate(((1, "thread"), (2, "process"), (0, "thread")), start=1):
            print(f"a process of its own, {workers} workers ({mode})")
            _start(module, folder, parts, steps * part // 3, workers, mode)
        one, other = (torch.load(path)["model"] for path in (whole, parts))
    different = [name for name in one if not torch.equal(one[name], other[name])]
    if different:
        raise SystemExit(f"the weights {different} differ")
    print(f"all {len(one)} weights are equal, bit for bit")


def _start(module: str, folder: Path, path: Path, until: int, workers: int, mode: str) -> None:
    command = [sys.executable, "-m", module, "train", folder, path, until, workers, mode]
    subprocess.run([*map(str, command)], check=True)


def arguments() -> tuple[Path, Path, int, int, str] | None:
    """What :func:`compare` started this process with; None if a user did."""
    if sys.argv[1:2] != ["train"]:
        return None
    folder, path, until, workers, mode = sys.argv[2:]
    return Path(folder), Path(path), int(until), int(workers), mode

"""How much memory a training step takes.

The figure is the most bytes of tensors that were alive at once during the call, over what was alive when it
began: activations, gradients, temporaries. Weights and the batch, which exist before, are not in it. On a GPU
the caching allocator keeps that count. On a CPU it is summed from the allocator's own events, which
``torch.profiler`` records; unlike the process's resident size it does not depend on what ran before, nor on
how the C library reuses pages. Scratch space that BLAS and oneDNN take for themselves is not seen.
"""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """The most bytes that tensors on ``device`` took at once while ``call`` ran, over those at its start."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - start
    return _peak_of_events(_cpu_allocations(call))


def _cpu_allocations(call: Callable[[], object]) -> list[tuple[float, int]]:
    """(time, bytes) of each allocation on the CPU during ``call``; bytes are negative where it frees."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # no messages about start and stop
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    return [
        (event["ts"], event["args"]["Bytes"])
        for event in events
        if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0
    ]


def _peak_of_events(events: list[tuple[float, int]]) -> int:
    alive = peak = 0
    for _, size in sorted(events, key=lambda event: event[0]):
        alive += size
        peak = max(peak, alive)
    return peak

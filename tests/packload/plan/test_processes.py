"""Real processes: ranks of torchrun serve the data set between them, in equal steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_two_ranks_serve_the_data_set_between_them(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    program = ["--nproc-per-node", "2", "-m", "tests.packload.plan.program", str(tmp_path)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command + program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for epochs in zip(*ranks):
        assert len(epochs[0]) == len(epochs[1])
        assert sorted(i for batches in epochs for batch in batches for i in batch) == list(range(1001))
    assert ranks[0][0] != ranks[0][1]

"""Settings of the whole suite: reproducible, quick by default."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("fast", max_examples=20, derandomize=True, database=None, **COMMON)
settings.register_profile("thorough", max_examples=400, **COMMON)
torch.set_num_threads(1)  # the tensors are tiny: on a busy machine threads only wait for each other
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)

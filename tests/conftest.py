"""Settings of the whole suite: reproducible, quick by default."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch
from hypothesis import HealthCheck, settings

#: A compiler's cache of its own: keys do not cover how a custom operator is registered, so graphs of
#: another version of the package, left in the user's cache, would be tested in place of these.
CACHE = tempfile.TemporaryDirectory(prefix="packed-tests-")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = CACHE.name

COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("fast", max_examples=20, derandomize=True, database=None, **COMMON)
settings.register_profile("thorough", max_examples=400, **COMMON)
torch.set_num_threads(1)  # the tensors are tiny: on a busy machine threads only wait for each other
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)

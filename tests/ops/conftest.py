from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing compiled and nothing counted before the test."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()

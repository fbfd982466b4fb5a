"""Fixtures of plans."""

from __future__ import annotations

import pytest

from packload.plan import budget, policy


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> int:
    """Windows of few steps, so that little data makes many."""
    for module in (policy, budget):
        monkeypatch.setattr(module, "STEPS", 4)
    return 4

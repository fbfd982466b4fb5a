"""Tests with real frameworks: ``pytest -m frameworks``. Their modules import what only they need."""

import re
from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the modules unread unless their marker was asked for."""
    asked = re.search(r"(?<!not )\bframeworks\b", config.option.markexpr)
    return None if asked or not collection_path.name.startswith("test_") else True

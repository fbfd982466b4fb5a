"""The page on sampling: its programs run."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[3] / "docs" / "sampling.md"


def test_the_programs_of_the_page_run_one_after_another():
    programs = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(programs) > 4
    names: dict[str, object] = {}
    for program in programs:
        exec(program, names)

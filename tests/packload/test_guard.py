"""packload does not start on another package that is called ``ops``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import packload

ROOT = Path(packload.__file__).parents[1]


def test_another_package_named_ops_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "__init__.py").write_text("")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", "import packload"],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "ImportError: packload needs the package 'ops'" in done.stderr
    assert str(tmp_path / "ops" / "__init__.py") in done.stderr

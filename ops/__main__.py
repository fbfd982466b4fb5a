"""``python -m ops [PATH]``: counts of operators by kind, and the table of all as ``docs/operators.md``."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from .dispatch import Covered, coverage

HEAD = """# Operators

Written by `python -m ops`. An operator stands here once, whatever module PyTorch offers it in; in-place
forms end in `_`. *packed* ones work on all samples at once, *fallback* ones on one sample at a time, in
eager only.
"""


TAIL = """## What has no row

| operator | why | instead |
| --- | --- | --- |
| `trace`, `diag`, `diagflat` | they take one matrix or vector, without a batch | `x.diagonal(...).sum(-1)`, \
`diag_embed` |
| `pdist` | n (n - 1) / 2 is no length that a derived axis can have | `cdist` and a mask |
| `put`, `resize_`, `set_` | they write or lie by places in the payload, which are no places in a sample | \
`scatter`, `x[...] = y` |
| `grouped_mm`, `scaled_mm`, `scaled_grouped_mm` | formats of one GPU kernel | `x @ w`, `einsum` |
| convolution, pooling, resizing, sampling of grids | no packed form yet | each of `x.to_list()` |
"""


def counts(rows: list[Covered]) -> str:
    """How many operators there are, in words."""
    distinct = [row for row in rows if not row.operator.endswith("_")]
    packed = sum(row.mode == "packed" for row in distinct)
    return (
        f"{len(distinct)} operators, {packed} of them packed and {len(distinct) - packed} by fallback; "
        f"{len(rows) - len(distinct)} in-place forms"
    )


def table(rows: list[Covered]) -> str:
    """The page."""
    lines = [HEAD, counts(rows) + ".\n"]
    for kind in sorted({row.kind for row in rows}):
        lines += [f"## {kind}\n", "| operator | how | in a graph |", "| --- | --- | --- |"]
        lines += [
            f"| `{row.operator}` | {row.mode} | {'yes' if row.compiles else 'no'} |"
            for row in rows
            if row.kind == kind
        ]
        lines.append("")
    lines.append(TAIL)
    return "\n".join(lines)


def main(path: Path) -> None:
    """Print the counts and write the page."""
    rows = coverage()
    for kind, number in sorted(Counter(row.kind for row in rows).items()):
        print(f"{kind:12} {number}")
    print(counts(rows))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table(rows))
    print(f"written to {path}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/operators.md"))

"""The commands ``packload shard`` and ``packload index``."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .convert import shard as write_shards
from .errors import ShardError
from .index import ShardIndex
from .indexing import index_shards
from .kinds import Measure
from .safety import Safety

_Links = Annotated[bool, typer.Option(help="Pass over links and devices instead of refusing the shard.")]
_Names = Annotated[bool, typer.Option(help="Take names with '..' or from the root as keys.")]
_Keys = Annotated[bool, typer.Option(help="Take a key that returns later in a shard as one more sample.")]
_Workers = Annotated[int, typer.Option(min=1, help="Processes.")]
_CPUS = os.cpu_count() or 1


def shard(
    source: Annotated[str, typer.Argument(help="A folder, a .jsonl file, or archives ('old/*.tar').")],
    dest: Annotated[Path, typer.Argument(help="The folder for the shards.")],
    size: Annotated[str, typer.Option(help="Most bytes of a shard.")] = "256MB",
    classes: Annotated[
        bool, typer.Option(help="Add the field 'cls': the number of the first folder.")
    ] = False,
    shuffle: Annotated[int | None, typer.Option(help="Mix the samples with this seed.")] = None,
    workers: _Workers = _CPUS,
    allow_links: _Links = False,
    allow_outside_names: _Names = False,
    allow_duplicate_keys: _Keys = False,
) -> None:
    """Write files as shards in WebDataset's format, each with its index. Can be stopped and called again."""
    safety = _safety(allow_links, allow_outside_names, allow_duplicate_keys)
    with _run("shards") as progress:
        indexes = write_shards(
            source,
            dest,
            size=size,
            classes=classes,
            shuffle=shuffle,
            workers=workers,
            safety=safety,
            progress=progress,
        )
    _tell(indexes, f"in {dest}")


def index(
    urls: Annotated[list[str], typer.Argument(help="Shards; patterns with * or {000..099} in quotes.")],
    out: Annotated[
        Path | None, typer.Option(help="A folder for the indexes; else beside the shards.")
    ] = None,
    again: Annotated[bool, typer.Option(help="Also shards that have a fitting index.")] = False,
    tolerant: Annotated[bool, typer.Option(help="Index what is whole of a shard that is cut off.")] = False,
    measure: Annotated[
        list[str] | None,
        typer.Option(help="Own lengths: FIELD=MODULE:FUNCTION, a function of the member's bytes."),
    ] = None,
    workers: _Workers = _CPUS,
    allow_links: _Links = False,
    allow_outside_names: _Names = False,
    allow_duplicate_keys: _Keys = False,
) -> None:
    """Index shards: places, lengths and checksums of their samples, in one pass."""
    safety = _safety(allow_links, allow_outside_names, allow_duplicate_keys)
    with _run("shards") as progress:
        indexes = index_shards(
            urls,
            out=out,
            again=again,
            tolerant=tolerant,
            measures=dict(map(_measure, measure or [])),
            workers=workers,
            safety=safety,
            progress=progress,
        )
    _tell(indexes, "indexed")


def _safety(links: bool, names: bool, keys: bool) -> Safety:
    return Safety(allow_links=links, allow_outside_names=names, allow_duplicate_keys=keys)


def _measure(text: str) -> tuple[str, Measure]:
    field, _, rest = text.partition("=")
    module, _, name = rest.partition(":")
    try:
        found: Measure = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--measure {text!r}: give FIELD=MODULE:FUNCTION ({error})") from None
    return field, found


@contextmanager
def _run(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar, and errors as one line."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True))
    task = bar.add_task(what, total=None)

    def tell(done: int, of: int) -> None:
        bar.update(task, completed=done, total=of)

    try:
        with bar:
            yield tell
    except (ShardError, ValueError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


def _tell(indexes: list[ShardIndex], where: str) -> None:
    samples = sum(map(len, indexes))
    total = sum(index.tar_bytes for index in indexes)
    typer.echo(f"{samples} samples, {total / 1e6:.1f} MB, {len(indexes)} shards {where}")
    columns = dict.fromkeys(name for index in indexes for name in index.columns)
    names = [name if name.isprintable() else repr(name) for name in columns]
    typer.echo(f"lengths: {', '.join(names) or 'none'}")
    skipped: dict[str, int] = {}
    for found in indexes:
        for reason, count in found.skipped.items():
            skipped[reason] = skipped.get(reason, 0) + count
    for reason, count in skipped.items():
        typer.echo(f"in no sample: {count} ({reason})", err=True)
    for found in indexes:
        if not found.whole:
            typer.echo(f"{found.tar} is cut off: {len(found)} samples are whole", err=True)

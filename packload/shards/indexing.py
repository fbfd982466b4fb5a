"""Index shards that are there already."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

from .errors import Place, ShardError
from .index import ShardIndex, build_index, index_name
from .jobs import Progress, run_jobs
from .kinds import Measure
from .read import Urls
from .safety import DEFAULT, Safety
from .store import Store, expand, local_path
from .write import replace


@dataclass(frozen=True)
class _Job:
    url: str
    out: str | None
    again: bool
    tolerant: bool
    measures: Mapping[str, Measure] | None
    safety: Safety
    options: Mapping[str, Any] | None


def index_shards(
    urls: Urls,
    *,
    out: str | os.PathLike[str] | None = None,
    again: bool = False,
    tolerant: bool = False,
    measures: Mapping[str, Measure] | None = None,
    workers: int = 0,
    safety: Safety = DEFAULT,
    options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> list[ShardIndex]:
    """Write the index of every shard, in one pass over its bytes.

    Args:
        urls: the shards: paths, addresses, patterns with braces or stars, or a list of these.
        out: a folder for the indexes, made if missing; by default each lies beside its shard.
        again: also for shards whose index is there and fits their size. Columns of lengths that it alone
            has, given when the shard was written or measured before, stay if the samples are the same.
        tolerant: index what is whole of a shard that is cut off.
        measures: own lengths, a function of a member's bytes for a field: its length (column
            ``FIELD.length``), or lengths by name (``FIELD.NAME``). With these every shard is read again.
        workers: processes. With two or more, a script needs ``if __name__ == "__main__"``, as for any work in
            processes.
        safety: what is allowed.
        options: what `fsspec` needs to reach the files.
        progress: called after each shard with the number done and the number of all.

    Returns:
        The indexes, in the order of the shards.

    Raises:
        ShardError: a shard cannot be indexed; the indexes that were written stay.
    """
    folder = None if out is None else os.fspath(out)
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
    found = expand(urls, safety)
    jobs = [_Job(url, folder, again, tolerant, measures, safety, options) for url in found]
    if folder is not None and len({_place(job) for job in jobs}) < len(jobs):
        raise ValueError(
            f"shards of one name from several folders cannot have their indexes in one: {folder!r}"
        )
    return run_jobs(_index_one, jobs, workers, progress)


def _place(job: _Job) -> str:
    name = index_name(job.url)
    return name if job.out is None else os.path.join(job.out, name.rpartition("/")[2])


def _index_one(job: _Job) -> ShardIndex:
    store = Store(options=job.options, safety=job.safety)
    size = store.size(job.url)
    place = _place(job)
    known = _known(store, place)
    if known is not None and known.tar_bytes == size and not (job.again or job.measures):
        return known
    with store.open(job.url) as stream:
        index = build_index(
            stream,
            job.url.rpartition("/")[2],
            size,
            safety=job.safety,
            measures=job.measures,
            tolerant=job.tolerant,
        )
    if known is not None and known.digest() == index.digest():
        index = _with_own(index, known)
    path = local_path(place)
    if path is not None:
        replace(Path(path), index.to_bytes())
        return index
    fs, name = fsspec.core.url_to_fs(place, **dict(job.options or {}))
    try:
        fs.pipe_file(name, index.to_bytes())
    except Exception as error:
        raise ShardError(
            f"{Place(job.url)}: nothing can be written beside it. Give a folder for the index: out=..., "
            f"packload index --out. ({error!r})"
        ) from error
    return index


def _with_own(index: ShardIndex, known: ShardIndex) -> ShardIndex:
    """An index, with what only the one before knows of the same samples: lengths of one's own, the source."""
    own = [i for i, column in enumerate(known.columns) if column not in index.columns]
    return dataclasses.replace(
        index,
        columns=index.columns + tuple(known.columns[i] for i in own),
        lengths=np.concatenate([index.lengths.astype(np.int64), known.lengths[own].astype(np.int64)]),
        source=index.source or known.source,
    )


def _known(store: Store, place: str) -> ShardIndex | None:
    try:
        return ShardIndex.from_bytes(store.whole(place), place)
    except (FileNotFoundError, ShardError):
        return None

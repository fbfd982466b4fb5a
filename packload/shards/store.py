"""Bytes of shards, from local files, HTTP and object stores.

What is asked for is a list of ranges of one file. Ranges that lie close together are read as one. Local files
are read where they are. Anything else goes through `fsspec`, by ranged requests, several at once; and where a
cache is given, in blocks that stay on the local disk::

    ranges -> blocks -> in the cache? -> else one request a block, then the next few blocks ahead

A store can be pickled and forked; each process opens its own files and connections.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, BinaryIO, NamedTuple, TypeVar
from urllib.parse import unquote

import fsspec
from braceexpand import braceexpand

from .cache import BlockCache, renew_after_fork
from .errors import DamagedShardError, Place, ShardError
from .safety import DEFAULT, Safety, check_address, is_command

T = TypeVar("T")
_FILES_OPEN = 128
_MOST_ADDRESSES = 10**6
_RANGE = re.compile(r"{(-?\d{1,99})[.][.](-?\d{1,99})")
_OUTPUTS_KEPT = 4
_PATIENT = 2
_GAP_LOCAL = 8 << 10
_GAP_REMOTE = 256 << 10
_MOST_AT_ONCE = 64 << 20
_TRIES = 4
_FIRST_PAUSE = 0.1
_LASTING = (FileNotFoundError, PermissionError, ShardError, ImportError, TypeError, ValueError)


def local_path(url: str) -> str | None:
    """The path of a local file, given as one or as ``file:``; None for any other address.

    Raises:
        ValueError: it is a file of another machine.
    """
    if is_command(url):
        return None
    if url.startswith("file:"):
        if not url.startswith("file://"):
            return unquote(url[5:])
        host, slash, rest = url[7:].partition("/")
        if host not in ("", "localhost"):
            raise ValueError(f"{url!r} is a file of the machine {host!r}. Files of this one are file:///...")
        return unquote(slash + rest)
    return None if "://" in url else url


def expand(
    urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], safety: Safety = DEFAULT
) -> list[str]:
    """The addresses that a pattern, or several, stand for.

    Braces (``shard-{000000..000099}.tar``) are spelt out in order; ``*`` and ``[`` are looked up and sorted
    by name. The name of a local file that is there stands for that file, whatever signs it has.

    Raises:
        UnsafeShardError: a command is among them.
        FileNotFoundError: a pattern matches nothing.
        IsADirectoryError: an address is that of a folder on the local disk.
        ValueError: no address was given, or one twice; or braces stand for more than a million.
    """
    given = [urls] if isinstance(urls, (str, os.PathLike)) else list(urls)
    found: list[str] = []
    for pattern in (one for entry in given for one in _spell_out(os.fspath(entry))):
        check_address(pattern, safety)
        literal = is_command(pattern) or not any(sign in pattern for sign in "*[") or _is_there(pattern)
        found += [pattern] if literal else _glob(pattern)
    if not found:
        raise ValueError("no shard was given")
    for url in found:
        if os.path.isdir(local_path(url) or ""):
            raise IsADirectoryError(
                f"{url!r} is a folder: name the shards in it, {url.rstrip('/') + '/*.tar'!r}"
            )
    twice = {url for url in found if found.count(url) > 1} if len(set(found)) < len(found) else set()
    if twice:
        raise ValueError(
            f"given twice: {sorted(twice)[:3]}. A sample would be served more than once an epoch."
        )
    return found


def _is_there(url: str) -> bool:
    path = local_path(url)
    return path is not None and os.path.exists(path)


def _spell_out(pattern: str) -> list[str]:
    """What the braces of a pattern stand for."""
    if _is_there(pattern):
        return [pattern]
    wide = any(abs(int(a) - int(b)) >= _MOST_ADDRESSES for a, b in _RANGE.findall(pattern))
    try:
        found = [] if wide else list(islice(braceexpand(pattern), _MOST_ADDRESSES + 1))
    except RecursionError:
        raise ValueError(f"{pattern[:80]!r}: braces in braces in braces, too many") from None
    if wide or len(found) > _MOST_ADDRESSES:
        raise ValueError(f"{pattern[:80]!r}: its braces stand for more than {_MOST_ADDRESSES} addresses")
    return found


def _glob(pattern: str) -> list[str]:
    fs, path = fsspec.core.url_to_fs(local_path(pattern) or pattern)
    names = sorted(fs.glob(path))
    if not names:
        raise FileNotFoundError(f"no shard matches {pattern!r}")
    return names if local_path(pattern) else [fs.unstrip_protocol(name) for name in names]


class Span(NamedTuple):
    """Bytes ``begin`` to ``end`` of a file, read as one, and the numbers of the ranges that lie in it."""

    begin: int
    end: int
    ranges: list[int]


def merge(starts: Sequence[int], sizes: Sequence[int], gap: int, most: int = _MOST_AT_ONCE) -> list[Span]:
    """Ranges to fewer and longer ones, in order of their begin.

    Args:
        starts: [R] first bytes, in any order.
        sizes: [R].
        gap: ranges with at most so many bytes between them are read as one,
        most: as long as that one is not longer than this. Ranges that overlap always are.
    """
    spans: list[Span] = []
    begin = end = -1
    inside: list[int] = []
    for i in sorted(range(len(starts)), key=starts.__getitem__):
        start, stop = starts[i], starts[i] + sizes[i]
        if inside and (start < end or (start <= end + gap and stop - begin <= most)):
            inside.append(i)
            end = max(end, stop)
        else:
            if inside:
                spans.append(Span(begin, end, inside))
            begin, end, inside = start, stop, [i]
    if inside:
        spans.append(Span(begin, end, inside))
    return spans


class Store:
    """Reads ranges of files wherever they lie.

    Args:
        cache: a folder on a local disk for blocks of remote files; None reads ranges without one. Several
            processes may share it.
        cache_bytes: most bytes in it.
        block: bytes of a block.
        ahead: blocks that are fetched ahead of those that were asked for.
        connections: blocks that are fetched at a time.
        options: what `fsspec` needs to reach the files: keys, endpoints, headers.
        safety: see :class:`~packload.shards.safety.Safety`.
    """

    def __init__(
        self,
        cache: str | os.PathLike[str] | None = None,
        cache_bytes: int = 10 * 10**9,
        *,
        block: int = 4 << 20,
        ahead: int = 4,
        connections: int = 8,
        options: Mapping[str, Any] | None = None,
        safety: Safety = DEFAULT,
    ) -> None:
        self._given = (cache, cache_bytes, block, ahead, connections, dict(options or {}), safety)
        self.ahead = ahead
        self.connections = connections
        self.options = dict(options or {})
        self.safety = safety
        self.cache = None if cache is None else BlockCache(cache, cache_bytes, block)
        self._files: OrderedDict[str, BinaryIO] = OrderedDict()
        self._lock = threading.Lock()
        self._outputs: OrderedDict[str, bytes] = OrderedDict()
        self._pools: dict[bool, ThreadPoolExecutor] = {}
        renew_after_fork(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _make, self._given

    def after_fork(self) -> None:
        """Start anew in a child process: the parent's threads are not there, and may have held the lock."""
        self._lock = threading.Lock()
        self._pools = {}

    def size(self, url: str) -> int | None:
        """The bytes of a file; None where a server does not tell.

        Raises:
            FileNotFoundError: it is not there.
        """
        path = local_path(url)
        if path is not None:
            return os.stat(path).st_size
        if is_command(url):
            return len(self._output(url))
        size = _again(url, lambda: self._info(url)).get("size")
        return None if size is None else int(size)

    def whole(self, url: str) -> bytes:
        """All bytes of a file.

        Raises:
            FileNotFoundError: it is not there.
        """
        path = local_path(url)
        if path is not None:
            with open(path, "rb") as file:
                return file.read()

        if is_command(url):
            return self._output(url)

        def fetch() -> bytes:
            fs, name = self._remote(url)
            content: bytes = fs.cat_file(name)
            return content

        return _again(url, fetch)

    def open(self, url: str) -> BinaryIO:
        """A file to be read from its beginning."""
        check_address(url, self.safety)
        path = local_path(url)
        if path is not None:
            return open(path, "rb", buffering=1 << 20)
        if is_command(url):
            return io.BytesIO(self._output(url))
        fs, name = self._remote(url)
        file: BinaryIO = fs.open(name, "rb", block_size=8 << 20, cache_type="readahead")
        return file

    def is_cached(self, url: str) -> bool:
        """Whether what is read of a file goes through the cache."""
        return self.cache is not None and local_path(url) is None and not is_command(url)

    def warm(self, url: str, starts: Sequence[int], sizes: Sequence[int], total: int) -> None:
        """Begin to fetch what :meth:`read` with the same arguments will need, where there is a cache."""
        if self.cache is None or not self.is_cached(url):
            return
        block = self.cache.block
        for start, size in zip(starts, sizes):
            for number in range(start // block, -(-(start + size) // block)):
                self._begin(url, number, total)

    def fetch(self, url: str, total: int) -> None:
        """Begin to fetch all of a file into the cache, in order, behind whatever else is on its way."""
        if self.cache is None or not self.is_cached(url):
            return
        for number in range(-(-total // self.cache.block)):
            self._begin(url, number, total, patient=True)

    def read(
        self, url: str, starts: Sequence[int], sizes: Sequence[int], total: int, *, fresh: bool = False
    ) -> list[bytes]:
        """Ranges of a file.

        Args:
            url: its address.
            starts: [R] first bytes, in any order.
            sizes: [R] bytes of each.
            total: the file's size.
            fresh: read past the cache, and drop what it has of the file.

        Returns:
            R contents, in the order of ``starts``.

        Raises:
            DamagedShardError: the file ends before a range does.
            OSError: it cannot be read.
        """
        local = local_path(url)
        gap = _GAP_REMOTE if local is None and (self.cache is None or fresh) else _GAP_LOCAL
        spans = merge(starts, sizes, gap)
        if local is not None:
            blocks = self._read_local(url, local, spans)
        elif is_command(url):
            output = self._output(url)
            blocks = [_checked(output[b:e], url, b, e) for b, e, _ in spans]
        elif self.cache is not None and not fresh:
            blocks = [self._read_cached(url, span.begin, span.end, total) for span in spans]
        else:
            if self.cache is not None:
                self.cache.drop(url, total)
            blocks = self._fetch(url, [span.begin for span in spans], [span.end for span in spans], total)
        contents: list[bytes] = [b""] * len(starts)
        for span, block in zip(spans, blocks):
            if len(span.ranges) == 1:
                contents[span.ranges[0]] = block
                continue
            for i in span.ranges:
                at = starts[i] - span.begin
                contents[i] = block[at : at + sizes[i]]
        return contents

    def _read_local(self, url: str, path: str, spans: list[Span]) -> list[bytes]:
        file = self._file(path)
        blocks = []
        for begin, end, _ in spans:
            block = os.pread(file.fileno(), end - begin, begin)
            while len(block) < end - begin:
                more = os.pread(file.fileno(), end - begin - len(block), begin + len(block))
                if not more:
                    break
                block += more
            blocks.append(_checked(block, url, begin, end))
        return blocks

    def _file(self, path: str) -> BinaryIO:
        """An open file; it closes when the last one that reads it lets go of it."""
        with self._lock:
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = open(path, "rb", buffering=0)
                if len(self._files) > _FILES_OPEN:
                    self._files.popitem(last=False)
            else:
                self._files.move_to_end(path)
            return file

    def _read_cached(self, url: str, begin: int, end: int, total: int) -> bytes:
        cache = self.cache
        assert cache is not None
        if begin == end:
            return b""
        first, last = begin // cache.block, max(end - 1, begin) // cache.block
        parts = []
        for number in range(first, last + 1):
            at = number * cache.block
            get = self._getter(url, at, min(at + cache.block, total), total)
            parts.append(cache.read(url, total, number, max(begin - at, 0), end - at, get))
        self._go_ahead(url, last + 1, total)
        return _checked(b"".join(parts), url, begin, end)

    def _getter(self, url: str, begin: int, end: int, total: int) -> Callable[[], bytes]:
        return lambda: self._fetch(url, [begin], [end], total)[0]

    def _go_ahead(self, url: str, first: int, total: int) -> None:
        cache = self.cache
        assert cache is not None
        for number in range(first, min(first + self.ahead, -(-total // cache.block))):
            self._begin(url, number, total)

    def _begin(self, url: str, number: int, total: int, patient: bool = False) -> None:
        """Fetch a block in a thread, unless it is there or on its way."""
        cache = self.cache
        assert cache is not None
        at = number * cache.block
        if cache.claim(url, total, number, patient):
            get = self._getter(url, at, min(at + cache.block, total), total)
            self._threads(patient).submit(cache.fill, url, total, number, get, patient)

    def _threads(self, patient: bool) -> ThreadPoolExecutor:
        with self._lock:
            if patient not in self._pools:
                pool = ThreadPoolExecutor(_PATIENT if patient else self.connections, "packload-ahead")
                weakref.finalize(self, pool.shutdown, wait=False, cancel_futures=True)
                self._pools[patient] = pool
            return self._pools[patient]

    def _fetch(self, url: str, begins: list[int], ends: list[int], total: int) -> list[bytes]:
        """Ranges of a remote file, by one request each, several at once."""

        def fetch() -> list[bytes]:
            fs, name = self._remote(url)
            if not any(end > begin for begin, end in zip(begins, ends)):
                return [b""] * len(begins)
            if len(begins) == 1:
                contents = [fs.cat_file(name, start=begins[0], end=ends[0])]
            else:
                contents = fs.cat_ranges([name] * len(begins), begins, ends, on_error="raise")
            return [_cut(content, url, b, e, total) for content, b, e in zip(contents, begins, ends)]

        return _again(url, fetch)

    def _output(self, url: str) -> bytes:
        """What a command writes; the outputs of a few are kept."""
        check_address(url, self.safety)
        with self._lock:
            if url in self._outputs:
                self._outputs.move_to_end(url)
                return self._outputs[url]
        command = url.strip()[len("pipe:") :]
        done = subprocess.run(command, shell=True, stdout=subprocess.PIPE)
        if done.returncode:
            raise FileNotFoundError(f"{url!r}: the command ended with {done.returncode}")
        with self._lock:
            self._outputs[url] = done.stdout
            if len(self._outputs) > _OUTPUTS_KEPT:
                self._outputs.popitem(last=False)
        return done.stdout

    def _info(self, url: str) -> dict[str, Any]:
        fs, name = self._remote(url)
        info: dict[str, Any] = fs.info(name)
        return info

    def _remote(self, url: str) -> tuple[Any, str]:
        check_address(url, self.safety)
        try:
            fs, name = fsspec.core.url_to_fs(url, **self.options)
        except (ImportError, ValueError) as error:
            raise ShardError(f"{url!r} cannot be reached: {error}") from error
        return fs, name


def _make(
    cache: Any,
    cache_bytes: int,
    block: int,
    ahead: int,
    connections: int,
    options: dict[str, Any],
    safety: Safety,
) -> Store:
    return Store(
        cache,
        cache_bytes,
        block=block,
        ahead=ahead,
        connections=connections,
        options=options,
        safety=safety,
    )


def _again(url: str, fetch: Callable[[], T]) -> T:
    """Try again, with pauses, what can go wrong on the way."""
    pause = _FIRST_PAUSE
    for attempt in range(1, _TRIES + 1):
        try:
            return fetch()
        except _LASTING:
            raise
        except Exception as error:
            if attempt == _TRIES:
                raise OSError(f"{Place(url)}: cannot be read after {_TRIES} tries: {error!r}") from error
            time.sleep(pause)
            pause *= 4
    raise AssertionError("unreachable")


def _checked(content: bytes, url: str, begin: int, end: int) -> bytes:
    if len(content) < end - begin:
        raise DamagedShardError(
            f"{Place(url)}: it ends at byte {begin + len(content)}, and bytes up to {end} are indexed. It "
            "was cut off or replaced since; copy it again, or index it: packload index --again."
        )
    return content


def _cut(content: bytes, url: str, begin: int, end: int, total: int) -> bytes:
    """The range of an answer; a server without ranges answers with the whole file."""
    if len(content) == total and end - begin < total:
        return content[begin:end]
    if len(content) > end - begin:
        raise DamagedShardError(
            f"{Place(url)}: {len(content)} bytes came for a range of {end - begin}: the file has another "
            f"size than the {total} bytes that were indexed, or the server does not know ranges."
        )
    return _checked(content, url, begin, end)

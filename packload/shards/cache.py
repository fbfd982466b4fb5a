"""Blocks of remote files on the local disk, shared by processes and bounded.

A block is a file of its own, ``FOLDER/<hash of address and size>/<number>``. It is written under another name
and renamed, so it is there whole or not at all; a reader that has opened it keeps it even when it is removed.
Whoever needs a block that is missing takes its lock, looks again, and fetches it: it is fetched once. The sum
of all blocks stands in the file ``total``, which is changed under a lock; when it would pass the limit, the
blocks that were not used for the longest time go. (A removed block takes its place on the disk as long as a
process has it open; a process keeps up to 32 open.)
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Protocol

from filelock import FileLock


class _Renewed(Protocol):
    def after_fork(self) -> None: ...


_alive: weakref.WeakSet[_Renewed] = weakref.WeakSet()


def renew_after_fork(thing: _Renewed) -> None:
    """Have ``thing.after_fork()`` called in every child process that is forked."""
    _alive.add(thing)


def _renew_all() -> None:
    for thing in list(_alive):
        thing.after_fork()


os.register_at_fork(after_in_child=_renew_all)
_LOCKS = 256
_FILES_OPEN = 32
_KEPT = 0.9
_STALE = 3600.0


class BlockCache:
    """See the module.

    Args:
        folder: where the blocks lie; made if missing.
        most: most bytes of all blocks, at least four blocks.
        block: bytes of a block.

    Raises:
        ValueError: ``most`` is less than four blocks.
    """

    def __init__(self, folder: str | os.PathLike[str], most: int, block: int = 4 << 20) -> None:
        if most < 4 * block:
            raise ValueError(f"a cache of {most} bytes is smaller than four blocks of {block}: give more")
        self.folder = Path(folder).absolute()
        self.most = most
        self.block = block
        (self.folder / "locks").mkdir(parents=True, exist_ok=True)
        self._files: OrderedDict[Path, BinaryIO] = OrderedDict()
        self._claimed: set[tuple[Path, bool]] = set()
        self._lock = threading.Lock()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Start anew in a child process: the parent's threads are not there, and may have held the lock."""
        self._lock = threading.Lock()
        self._claimed = set()

    def read(
        self, url: str, total: int, number: int, begin: int, end: int, get: Callable[[], bytes]
    ) -> bytes:
        """Bytes ``begin`` to ``end`` of a block, which is fetched if it is missing.

        Args:
            url, total: the file's address and size.
            number: the block's number.
            begin, end: places in the block; what lies behind its end is left out.
            get: fetches the block.
        """
        path = self._path(url, total, number)
        file = self._open(path)
        while file is None:
            content = self._fill(path, get)
            if content is not None:
                return content[begin:end]
            file = self._open(path)
        end = min(end, self.block)
        return os.pread(file.fileno(), max(0, end - begin), begin)

    def claim(self, url: str, total: int, number: int, patient: bool = False) -> bool:
        """Whether a block is missing and nobody in this process is about to fetch it; then the caller is.

        Who is patient and who is not do not wait for each other.
        """
        path = self._path(url, total, number)
        with self._lock:
            if (path, patient) in self._claimed or path in self._files or path.exists():
                return False
            self._claimed.add((path, patient))
            return True

    def fill(
        self, url: str, total: int, number: int, get: Callable[[], bytes], patient: bool = False
    ) -> None:
        """Fetch a block that was claimed; when it cannot be had, whoever reads it will say so."""
        path = self._path(url, total, number)
        try:
            self._fill(path, get)
        except Exception:
            return
        finally:
            with self._lock:
                self._claimed.discard((path, patient))

    def drop(self, url: str, total: int) -> None:
        """Remove all blocks of a file."""
        folder = self._path(url, total, 0).parent
        for path in folder.iterdir() if folder.is_dir() else ():
            path.unlink(missing_ok=True)
        with self._lock:
            for path in [path for path in self._files if path.parent == folder]:
                del self._files[path]

    def size(self) -> int:
        """The bytes of all blocks that lie in the folder."""
        return sum(size for _, size, _ in self._scan())

    def _path(self, url: str, total: int, number: int) -> Path:
        name = hashlib.sha256(f"{url}\n{total}\n{self.block}".encode()).hexdigest()[:32]
        return self.folder / name / f"{number:08d}"

    def _open(self, path: Path) -> BinaryIO | None:
        with self._lock:
            file = self._files.get(path)
            if file is not None:
                self._files.move_to_end(path)
                return file
            try:
                file = open(path, "rb", buffering=0)
            except FileNotFoundError:
                return None
            with suppress(
                OSError
            ):  # it was removed since, or the folder can only be read: it is there to read
                os.utime(path)
            self._files[path] = file
            if len(self._files) > _FILES_OPEN:
                self._files.popitem(last=False)
            return file

    def _fill(self, path: Path, get: Callable[[], bytes]) -> bytes | None:
        """Fetch a block and keep it; None if it was there already."""
        stripe = int(hashlib.sha256(str(path).encode()).hexdigest(), 16) % _LOCKS
        with FileLock(self.folder / "locks" / f"{stripe}.lock"):
            if path.exists():
                return None
            content = get()
            part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.part")
            try:
                part.parent.mkdir(exist_ok=True)
                part.write_bytes(content)
                self._reserve(len(content))
                os.replace(part, path)
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"the cache {str(self.folder)!r} cannot be written ({error}). Make room there, or give "
                    "another folder or a smaller limit: cache=..., cache_bytes=...",
                ) from error
            finally:
                part.unlink(missing_ok=True)
            return content

    def _reserve(self, size: int) -> None:
        """Count a new block, and make room for it."""
        record = self.folder / "total"
        with FileLock(self.folder / "locks" / "total.lock"):
            try:
                total = int(record.read_text())
            except (FileNotFoundError, ValueError):
                total = self.size()
            if total + size > self.most:
                total = self._evict(int(_KEPT * self.most) - size)
            record.write_text(str(total + size))

    def _evict(self, most: int) -> int:
        blocks = sorted(self._scan())
        total = sum(size for _, size, _ in blocks)
        for _, size, path in blocks:
            if total <= most:
                break
            path.unlink(missing_ok=True)
            with self._lock:
                self._files.pop(path, None)
            total -= size
        return total

    def _scan(self) -> list[tuple[float, int, Path]]:
        """When it was used last, the size and the path of each block; what a killed process left goes."""
        found = []
        for folder in self.folder.iterdir():
            if folder.name == "locks" or not folder.is_dir():
                continue
            for path in folder.iterdir():
                try:
                    status = path.stat()
                except FileNotFoundError:
                    continue
                if path.suffix != ".part":
                    found.append((status.st_mtime, status.st_size, path))
                elif time.time() - status.st_mtime > _STALE:
                    path.unlink(missing_ok=True)
        return found

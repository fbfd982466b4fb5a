import errno
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from packload.shards.cache import BlockCache

BLOCK = 1000


def block(number):
    return bytes([number % 256]) * BLOCK


def get(number, fetched=None):
    def fetch():
        if fetched is not None:
            fetched.append(number)
        return block(number)

    return fetch


def test_blocks_are_fetched_once_and_read_in_part(tmp_path):
    fetched = []
    cache = BlockCache(tmp_path, 10 * BLOCK, BLOCK)
    for _ in range(3):
        assert cache.read("u", 5000, 2, 10, 15, get(2, fetched)) == block(2)[10:15]
    assert cache.read("u", 5000, 2, 990, 3000, get(2, fetched)) == block(2)[990:]
    assert fetched == [2]
    assert BlockCache(tmp_path, 10 * BLOCK, BLOCK).read("u", 5000, 2, 0, 3, get(2, fetched)) == block(2)[:3]
    assert fetched == [2]


def test_other_addresses_and_sizes_have_other_blocks(tmp_path):
    fetched = []
    cache = BlockCache(tmp_path, 10 * BLOCK, BLOCK)
    for url, total in [("u", 1), ("v", 1), ("u", 2)]:
        cache.read(url, total, 0, 0, 1, get(0, fetched))
    assert fetched == [0, 0, 0]


def test_the_cache_is_never_larger_than_asked_for(tmp_path):
    cache = BlockCache(tmp_path, 8 * BLOCK, BLOCK)
    for number in range(60):
        cache.read("u", 10**6, number, 0, 1, get(number))
        assert cache.size() <= 8 * BLOCK


def test_what_was_not_used_for_long_goes_first(tmp_path):
    cache = BlockCache(tmp_path, 8 * BLOCK, BLOCK)
    for number in range(8):
        cache.read("u", 10**6, number, 0, 1, get(number))
        time.sleep(0.005)
    fetched = []
    BlockCache(tmp_path, 8 * BLOCK, BLOCK).read("u", 10**6, 0, 0, 1, get(0, fetched))
    cache.read("u", 10**6, 8, 0, 1, get(8))
    for number in (0, 8):
        cache.read("u", 10**6, number, 0, 1, get(number, fetched))
    assert fetched == []
    cache.read("u", 10**6, 1, 0, 1, get(1, fetched))
    assert fetched == [1]


def test_a_fetch_that_fails_leaves_nothing(tmp_path):
    cache = BlockCache(tmp_path, 8 * BLOCK, BLOCK)

    def fail():
        raise OSError("away")

    with pytest.raises(OSError, match="away"):
        cache.read("u", 10**6, 0, 0, 1, fail)
    assert cache.claim("u", 10**6, 0) and not cache.claim("u", 10**6, 0)
    cache.fill("u", 10**6, 0, fail)
    assert cache.claim("u", 10**6, 0) and cache.size() == 0


def test_dropped_blocks_are_fetched_again(tmp_path):
    fetched = []
    cache = BlockCache(tmp_path, 8 * BLOCK, BLOCK)
    cache.read("u", 10**6, 0, 0, 1, get(0, fetched))
    cache.drop("u", 10**6)
    cache.drop("v", 10**6)
    cache.read("u", 10**6, 0, 0, 1, get(0, fetched))
    assert fetched == [0, 0]


def test_what_a_killed_process_left_is_no_block_and_goes(tmp_path):
    cache = BlockCache(tmp_path, 8 * BLOCK, BLOCK)
    cache.read("u", 10**6, 0, 0, 1, get(0))
    (folder,) = [path for path in tmp_path.iterdir() if path.is_dir() and path.name != "locks"]
    old, new = folder / "00000001.77.1.part", folder / "00000002.77.1.part"
    old.write_bytes(b"x" * 50)
    new.write_bytes(b"x" * 50)
    os.utime(old, (1, 1))
    (tmp_path / "total").write_text("nonsense")
    for number in range(1, 20):
        assert cache.read("u", 10**6, number, 0, BLOCK, get(number)) == block(number)
    assert not old.exists() and new.exists() and cache.size() <= 8 * BLOCK


def hammer(folder, seed, log):
    cache = BlockCache(folder, 8 * BLOCK, BLOCK)
    for i in range(150):
        number = (seed * 7 + i * i) % 16
        assert cache.read("u", 10**6, number, 0, BLOCK, get(number)) == block(number)
        assert cache.size() <= 8 * BLOCK
    log.put(seed)


def test_processes_share_a_cache(tmp_path):
    context = multiprocessing.get_context("fork")
    log = context.Queue()
    processes = [context.Process(target=hammer, args=(tmp_path, seed, log)) for seed in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert sorted(log.get(timeout=5) for _ in processes) == [0, 1, 2, 3]
    assert not list(tmp_path.glob("*/*.part"))


def test_a_cache_of_less_than_four_blocks_is_refused(tmp_path):
    with pytest.raises(ValueError, match="smaller than four blocks"):
        BlockCache(tmp_path, 3 * BLOCK, BLOCK)


def test_a_full_disk_is_told_with_the_folder(tmp_path, monkeypatch):
    cache = BlockCache(tmp_path, 8 * BLOCK, BLOCK)

    def full(self, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=f"the cache '{tmp_path}' cannot be written.*another folder") as told:
        cache.read("u", 10**6, 0, 0, 1, get(0))
    assert told.value.errno == errno.ENOSPC


def test_blocks_in_a_folder_that_can_only_be_read_are_read(tmp_path, monkeypatch):
    BlockCache(tmp_path, 8 * BLOCK, BLOCK).read("u", 10**6, 0, 0, 1, get(0))

    def refuse(*arguments):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    assert BlockCache(tmp_path, 8 * BLOCK, BLOCK).read("u", 10**6, 0, 3, 9, get(1)) == block(0)[3:9]

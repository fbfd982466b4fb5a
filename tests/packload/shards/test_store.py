import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packload.shards import DamagedShardError, ShardError
from packload.shards.store import Store, expand, local_path, merge

from .web import Web


@pytest.fixture
def content():
    return np.random.default_rng(0).integers(0, 256, 100_000, np.uint8).tobytes()


@pytest.fixture
def web(tmp_path, content):
    (tmp_path / "www").mkdir()
    (tmp_path / "www" / "a.tar").write_bytes(content)
    with Web(tmp_path / "www") as web:
        yield web


def read(store, url, ranges, total):
    return store.read(url, [start for start, _ in ranges], [size for _, size in ranges], total)


spans = st.lists(st.tuples(st.integers(0, 99_000), st.integers(0, 1000)), max_size=30)


@given(spans, st.integers(0, 5000), st.sampled_from([500, 4000, 10**6]))
def test_merged_ranges_cover_all_and_close_gaps(ranges, gap, most):
    merged = merge([start for start, _ in ranges], [size for _, size in ranges], gap, most)
    assert sorted(i for span in merged for i in span.ranges) == list(range(len(ranges)))
    for begin, end, numbers in merged:
        inside = [ranges[i] for i in numbers]
        assert begin == inside[0][0] and end == max(start + size for start, size in inside)
        covered = inside[0][0] + inside[0][1]
        overlap = False
        for start, size in inside[1:]:
            assert begin <= start <= covered + gap
            overlap |= start < covered
            covered = max(covered, start + size)
        assert end - begin <= most or len(inside) == 1 or overlap
    for (_, end, _), after in zip(merged, merged[1:]):
        assert after.begin >= end
        joined = ranges[after.ranges[0]][1] + after.begin - merged[merged.index(after) - 1].begin
        assert after.begin > end + gap or joined > most


@given(ranges=spans)
def test_ranges_of_local_files_in_any_order(ranges, tmp_path_factory):
    path = tmp_path_factory.mktemp("x") / "a.tar"
    content = os.urandom(100_000)
    path.write_bytes(content)
    for url in (str(path), f"file:{path}", f"file://{path}"):
        found = read(Store(), url, ranges, len(content))
        assert found == [content[start : start + size] for start, size in ranges]


def test_ranges_over_http_with_and_without_a_cache(web, content, tmp_path):
    rng = np.random.default_rng(1)
    url = web.url("a.tar")
    for store in (Store(), Store(tmp_path / "cache", block=8 << 10)):
        assert store.size(url) == len(content) and store.whole(url) == content
        for _ in range(5):
            ranges = [(int(rng.integers(99_000)), int(rng.integers(1000))) for _ in range(20)]
            assert read(store, url, ranges, len(content)) == [content[s : s + n] for s, n in ranges]


def test_near_ranges_are_one_request(web, content):
    read(Store(), web.url("a.tar"), [(10, 20), (5000, 10), (40, 3)], len(content))
    assert [r for _, r in web.requests if r] == ["bytes=10-5009"]


def test_a_block_is_fetched_once_and_the_next_ones_ahead(web, content, tmp_path):
    store = Store(tmp_path / "cache", block=10_000, ahead=2)
    url = web.url("a.tar")
    for _ in range(3):
        read(store, url, [(100, 50), (9990, 20)], len(content))
    again = Store(tmp_path / "cache", block=10_000, ahead=0)
    web.wait_for(4)
    read(again, url, [(25_000, 50)], len(content))
    starts = sorted(int(r.removeprefix("bytes=").partition("-")[0]) for _, r in web.requests if r)
    assert starts == [0, 10_000, 20_000, 30_000]


def test_many_threads_fetch_a_block_once(web, content, tmp_path):
    store = Store(tmp_path / "cache", block=50_000, ahead=0)
    with ThreadPoolExecutor(8) as pool:
        found = list(
            pool.map(lambda i: read(store, web.url("a.tar"), [(i, 30)], len(content)), range(0, 800, 100))
        )
    assert found == [[content[i : i + 30]] for i in range(0, 800, 100)]
    assert len([r for _, r in web.requests if r]) == 1


def test_warming_fetches_what_reading_needs(web, content, tmp_path):
    store = Store(tmp_path / "cache", block=10_000, ahead=0)
    starts, sizes = [5, 45_000, 59_990], [10, 10, 20]
    store.warm(web.url("a.tar"), starts, sizes, len(content))
    web.wait_for(4)
    store.read(web.url("a.tar"), starts, sizes, len(content))
    assert len([r for _, r in web.requests if r]) == 4


def test_a_server_without_ranges_still_serves(web, content, tmp_path):
    web.ranges = False
    for store in (Store(), Store(tmp_path / "cache", block=8 << 10)):
        assert read(store, web.url("a.tar"), [(70_000, 100), (3, 4)], len(content)) == [
            content[70_000:70_100],
            content[3:7],
        ]


def test_errors_that_pass_are_tried_again(web, content, tmp_path):
    for store in (Store(), Store(tmp_path / "cache", block=8 << 10, ahead=0)):
        web.failures = 2
        assert read(store, web.url("a.tar"), [(7, 9)], len(content)) == [content[7:16]]
        assert web.failures == 0


def test_errors_that_stay_name_the_shard(web, content):
    web.failures = 100
    with pytest.raises(OSError, match="a.tar': cannot be read after 4 tries"):
        read(Store(), web.url("a.tar"), [(7, 9)], len(content))


def test_what_is_missing(web, tmp_path):
    for url in (web.url("b.tar"), str(tmp_path / "b.tar")):
        with pytest.raises(FileNotFoundError):
            Store().size(url)
        with pytest.raises(FileNotFoundError):
            Store().whole(url)
    with pytest.raises(ShardError, match="'nosuch://b/a.tar' cannot be reached"):
        Store().size("nosuch://b/a.tar")


def test_a_file_that_ends_early_names_itself(web, content, tmp_path):
    path = tmp_path / "www" / "a.tar"
    with pytest.raises(DamagedShardError, match="a.tar': it ends at byte 100000, and bytes up to 100500"):
        read(Store(), str(path), [(99_990, 510)], 200_000)
    path.write_bytes(content[:50])
    with pytest.raises(DamagedShardError, match="a.tar'"):
        read(Store(), web.url("a.tar"), [(10, 100)], len(content))


def test_a_store_can_be_pickled_and_used_in_threads_and_after_a_fork(web, content, tmp_path):
    store = Store(tmp_path / "cache", block=10_000)
    url = web.url("a.tar")
    read(store, url, [(0, 10)], len(content))
    again = pickle.loads(pickle.dumps(store))
    assert read(again, url, [(5, 10)], len(content)) == [content[5:15]]
    store._lock.acquire()
    child = os.fork()
    if not child:
        right = read(store, url, [(60_000, 10)], len(content)) == [content[60_000:60_010]]
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    store._lock.release()


def test_few_files_stay_open(tmp_path):
    store = Store()
    for i in range(300):
        (tmp_path / f"{i}.tar").write_bytes(b"%03d" % i)
        assert read(store, str(tmp_path / f"{i}.tar"), [(0, 3)], 3) == [b"%03d" % i]
    links = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{fd}")
    ]
    assert sum(str(tmp_path) in link for link in links) <= 130


def test_reading_ends_with_the_store(tmp_path, web, content):
    others = threading.enumerate()
    store = Store(tmp_path / "cache", block=10_000)
    read(store, web.url("a.tar"), [(0, 10)], len(content))
    own = [thread for thread in threading.enumerate() if thread not in others]
    assert any(thread.name.startswith("packload-ahead") for thread in own)
    del store
    for thread in own:
        if thread.name.startswith("packload-ahead"):
            thread.join(5)
            assert not thread.is_alive()


def test_patterns_of_addresses(tmp_path, web):
    for name in ("b-1.tar", "b-0.tar", "c.tar"):
        (tmp_path / name).write_bytes(b"")
    base = str(tmp_path)
    assert expand(f"{base}/b-*.tar") == [f"{base}/b-0.tar", f"{base}/b-1.tar"]
    assert expand([f"{base}/b-{{0..1}}.tar", tmp_path / "c.tar"]) == [
        f"{base}/{n}.tar" for n in ("b-0", "b-1", "c")
    ]
    assert expand("s3://bucket/{a,b}-{08..10}.tar")[:2] == ["s3://bucket/a-08.tar", "s3://bucket/a-09.tar"]
    assert expand(f"file:{base}/b-*.tar") == [f"{base}/b-0.tar", f"{base}/b-1.tar"]
    with pytest.raises(FileNotFoundError, match="no shard matches"):
        expand(f"{base}/x-*.tar")
    with pytest.raises(IsADirectoryError, match=r"is a folder: name the shards in it, '.*/\*\.tar'"):
        expand(f"{base}/")
    with pytest.raises(ValueError, match="no shard was given"):
        expand([])
    with pytest.raises(ValueError, match="given twice"):
        expand([f"{base}/c.tar", f"{base}/c.tar"])


def test_local_paths():
    assert local_path("a/b c.tar") == local_path("file:a/b c.tar") == "a/b c.tar"
    assert local_path("file:///a/b%20c.tar") == "/a/b c.tar"
    assert local_path("https://x/a.tar") is None


def test_a_file_that_is_there_is_meant_whatever_its_name(tmp_path):
    (tmp_path / "run[1]").mkdir()
    for name in ("a{b,c}.tar", "a*.tar", "a[0].tar", "a{.tar"):
        path = tmp_path / "run[1]" / name
        path.write_bytes(b"x")
        assert expand(path) == [str(path)] and Store().size(str(path)) == 1
    assert local_path("file:///a%20b#1?c.tar") == local_path("file://localhost/a b#1?c.tar") == "/a b#1?c.tar"
    with pytest.raises(ValueError, match="a file of the machine 'data'"):
        expand("file://data/a.tar")


@pytest.mark.parametrize("pattern", ["a{0..99999999999}.tar", "a" + "{0,1}" * 40, "{" * 2000 + "}" * 2000])
def test_braces_that_never_end_are_refused(pattern, monkeypatch):
    monkeypatch.setitem(expand.__globals__, "_MOST_ADDRESSES", 1000)
    with pytest.raises(ValueError, match="braces"):
        expand(pattern)

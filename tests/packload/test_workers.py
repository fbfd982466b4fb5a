import threading
import time

import pytest

from packload.feed import Feed, Task
from packload.workers import Threads, Worker, batch_seed, describe, run


class Stage:
    name, remote = "stage", True

    def __init__(self, function=lambda item: item, bound=None):
        self.function, self.bound = function, [] if bound is None else bound

    def bind(self, worker):
        self.bound.append(worker)
        return self.function


def read_all(feed):
    results = []
    while not (done := feed.read(10)).last:
        results.append(done.result)
        feed.permit()
    return results


def test_one_pool_serves_one_feed_after_the_other():
    stage = Stage(lambda item: item * 2)
    pool = Threads([stage], 3)
    for size in (5, 0, 20):
        feed = Feed(iter(range(size)), lambda: None, 6)
        pool.begin(feed, (0,))
        assert read_all(feed) == [2 * k for k in range(size)]
    pool.close()
    assert sorted(worker.number for worker in stage.bound) == [0, 1, 2]
    assert all(worker == Worker(worker.number, 3) for worker in stage.bound)


def test_closing_waits_for_what_workers_are_at():
    ended = []

    def work(item):
        time.sleep(0.1)
        ended.append(item)

    pool = Threads([Stage(work)], 2)
    pool.begin(Feed(iter(range(10)), lambda: None, 4), (0,))
    time.sleep(0.03)
    pool.close()
    assert len(ended) <= 2 and not [t for t in threading.enumerate() if t.name.startswith("packload")]
    pool.close()


def test_a_new_feed_stops_the_one_before():
    pool = Threads([Stage(lambda item: time.sleep(0.01) or item)], 2)
    first = Feed(iter(range(1000)), lambda: None, 1000)
    pool.begin(first, (0,))
    second = Feed(iter(range(3)), lambda: None, 4)
    pool.begin(second, (0,))
    assert read_all(second) == [0, 1, 2] and first.stopped
    pool.close()


def test_a_batch_s_seed_differs_by_every_part_of_its_key():
    def seed(number, key):
        task = Feed(iter([0]), lambda: None, 1, number).draw()
        return run([("seed", lambda item: batch_seed())], task, key, None)[0]

    seeds = [seed(0, (0, 0)), seed(1, (0, 0)), seed(0, (1, 0)), seed(0, (0, 1)), seed(0, (2**40, 0))]
    assert len(set(seeds)) == 5 and all(0 <= s < 2**63 for s in seeds)
    assert seed(1, (0, 0)) == seeds[1]
    with pytest.raises(RuntimeError):
        batch_seed()


def test_indices_are_shown_in_errors_up_to_a_number():
    assert describe([3, "a"]) == ", samples [3, 'a']"
    assert describe(list(range(1000))).endswith("126, 127, ...]")
    assert describe([]) == describe([object()]) == describe("text") == ""


def test_a_loader_inside_of_a_stage_leaves_its_seed():
    seeds = []

    def stage(item):
        seeds.append(batch_seed())
        run([("inner", lambda inner: inner)], Task(7, None, None, []), (1,), None)
        seeds.append(batch_seed())

    assert run([("outer", stage)], Task(3, None, None, []), (0,), None)[1] is None
    assert seeds[0] == seeds[1]

import queue
import threading

import pytest

from packload.feed import Done, Feed


class Counting:
    """Numbers below ``size``; its state is how many it gave."""

    def __init__(self, size):
        self.size, self.given = size, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.given == self.size:
            raise StopIteration
        self.given += 1
        return self.given - 1


def feed_of(size, permits=3, first=0):
    source = Counting(size)
    return source, Feed(source, lambda: source.given, permits, first)


def done(task):
    return Done(task, task.item * 10, None, [])


def test_results_come_in_the_order_drawn_with_the_state_after_each():
    _, feed = feed_of(3)
    tasks = [feed.draw() for _ in range(3)]
    for task in reversed(tasks):
        feed.put(done(task))
    results = [feed.read() for _ in range(3)]
    assert [(r.result, r.task.state) for r in results] == [(0, 1), (10, 2), (20, 3)]


def test_no_more_is_drawn_than_permitted():
    source, feed = feed_of(10, permits=2)
    assert [feed.draw(wait=False) is None for _ in range(4)] == [False, False, True, True]
    feed.permit()
    assert feed.draw(wait=False).number == 2 and source.given == 3


def test_the_end_is_told_once_to_the_consumer_and_to_every_worker():
    _, feed = feed_of(1, permits=4, first=5)
    task = feed.draw()
    assert [feed.draw() for _ in range(3)] == [None] * 3
    feed.put(done(task))
    assert feed.read().task.number == 5
    last = feed.read()
    assert last.last and last.error is None and last.task.state == 1
    with pytest.raises(queue.Empty):
        feed.read(timeout=0.01)


def test_an_error_of_the_source_comes_after_what_was_drawn_before():
    def source():
        yield 1
        raise KeyError("source")

    feed = Feed(source(), lambda: None, 4)
    feed.put(done(feed.draw()))
    assert feed.draw() is None
    assert feed.read().result == 10
    assert isinstance(feed.read().error, KeyError)


def test_an_error_outside_of_tasks_comes_at_once():
    _, feed = feed_of(3)
    feed.fail(OSError("worker"))
    with pytest.raises(OSError, match="worker"):
        feed.read()


@pytest.mark.parametrize("workers", [1, 4])
def test_stopping_ends_waiting_workers(workers):
    _, feed = feed_of(100, permits=1)
    got = []

    def work():
        while (task := feed.draw()) is not None:
            got.append(task.number)

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    feed.stop()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    assert len(got) <= 1


def test_only_one_thread_at_a_time_is_inside_of_the_source():
    inside, most = [], []

    def source():
        for k in range(200):
            inside.append(k)
            most.append(len(inside))
            yield k
            inside.clear()

    feed = Feed(source(), lambda: None, 1000)

    def work():
        while (task := feed.draw()) is not None:
            feed.put(done(task))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert [feed.read().result for _ in range(200)] == [10 * k for k in range(200)]
    assert feed.read().last and max(most) == 1


def test_who_waits_for_a_batch_when_the_pass_is_ended_gets_an_error():
    feed = Feed(iter(range(3)), lambda: None, 1)
    raised = []

    def read():
        try:
            feed.read()
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    feed.stop()
    thread.join(5)
    assert not thread.is_alive() and "ended" in raised[0]


def test_a_feed_settles_when_its_source_is_left():
    inside, leave = threading.Event(), threading.Event()

    def source():
        inside.set()
        leave.wait()
        yield 0

    feed = Feed(source(), lambda: None, 1)
    thread = threading.Thread(target=feed.draw)
    thread.start()
    inside.wait()
    feed.stop()
    with pytest.raises(TimeoutError, match="inside the source"):
        feed.settle(0.01)
    leave.set()
    feed.settle(5.0)
    thread.join(5)

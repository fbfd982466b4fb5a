"""Stages of a loader, as nodes of ``torchdata.nodes``.

    Indices -> Fetch -> Collate -> Pin -> Copy        each a function of one item
    \\______________________________________/
                    Parallel                          runs those that come last in its source on workers

:class:`packload.Loader` is this chain. The nodes can be put together otherwise, with one's own functions
(:class:`Map`), with other sources, and with the nodes of torchdata::

    import packload.nodes as pn

    node = pn.Indices(batch_sampler)
    node = pn.Map(pn.Fetch(node, dataset), augment)
    node = pn.Parallel(pn.Collate(node, collate), workers=4)
    for batch in torchdata.nodes.Loader(node):
        ...

A :class:`Map` is lazy about what it hands on: inside of a chain a batch stays whole (a Batch, even where
samples are bare leaves), and on its way to a device (an event goes with it). Only who calls ``next`` on the
last node gets what a loop wants.
"""

from __future__ import annotations

import queue
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from time import perf_counter
from typing import Any, Literal

import torch
from torchdata.nodes import BaseNode

from .batch import Batch
from .collate import Collate as Packing
from .collate import collate as pack_by_default
from .feed import Done, Feed
from .processes import Processes
from .shared import SharedRing
from .transfer import Arriving, Ring, Streams, Transfer, pinned, streams_of
from .workers import PATIENCE, Threads, Worker, no_end, run

State = dict[str, Any]
Mode = Literal["thread", "process"]
WorkerInit = Callable[[Any, int], Any]


class Indices(BaseNode):
    """The index lists of a batch sampler.

    Its state is that of the sampler's iterator if it has ``state_dict``, else the sampler's if it has that.
    It is loaded into the sampler if it has ``load_state_dict``, else into an iterator. With any other sampler
    it counts, and what was drawn before is drawn again and dropped: the sampler must then repeat its order.

    The state after a pass has ended is that before the next one.

    Args:
        batch_sampler: any iterable of index lists. An iterator is used up after one pass.
    """

    def __init__(self, batch_sampler: Iterable[Any]) -> None:
        super().__init__()
        self.batch_sampler = batch_sampler
        self._iterator: Iterator[Any] = iter(())
        self._count = 0
        self._finished = False
        self._loaded: State | None = None

    def load(self, state: State) -> None:
        """Load a state into the sampler; ``reset`` with the same object begins where the sampler stands.

        Raises:
            ValueError: it is of a sampler that keeps its state otherwise. And what the sampler raises.
        """
        keeps = _where(self.batch_sampler)
        if (state["where"] == "count") != (keeps is None):
            raise ValueError(
                f"the batch sampler, {type(self.batch_sampler).__name__}, "
                f"{'has no' if keeps is None else 'has a'} state of its own, other than that which the "
                "state was saved with. Load it with that one."
            )
        if keeps == "sampler":
            self.batch_sampler.load_state_dict(state["state"])  # type: ignore[attr-defined]
        self._loaded = state

    def reset(self, initial_state: State | None = None) -> None:
        """Begin a pass, or continue one."""
        super().reset(initial_state)
        if initial_state is not None and initial_state is not self._loaded:
            self.load(initial_state)
        self._loaded = None
        self._iterator = iter(self.batch_sampler)
        if self._finished and self._iterator is self.batch_sampler and initial_state is None:
            raise RuntimeError(
                f"the batch sampler is an iterator, {type(self.batch_sampler).__name__}, and the pass before "
                "used it up. Give an iterable that begins anew: a list, or an object with __iter__."
            )
        self._count, self._finished = 0, False
        self._again = initial_state is not None and initial_state["finished"]
        if initial_state is None:
            return
        if _where(self.batch_sampler) == "iterator":
            self._iterator.load_state_dict(initial_state["state"])  # type: ignore[attr-defined]
        if not self._again:
            self._count = initial_state["count"]
            if initial_state["where"] == "count":
                self._skip(self._count)

    def next(self) -> Any:
        """The next index list."""
        try:
            item = next(self._iterator)
        except StopIteration:
            if not self._again:
                self._finished = True
                raise
            self._iterator = iter(self.batch_sampler)
            item = next(self._iterator)
        self._again = False
        self._count += 1
        if not isinstance(item, Iterable):
            raise TypeError(
                f"the batch sampler gave {item!r} where a list of indices was expected: it samples, but does "
                "not make batches. torch.utils.data.BatchSampler(sampler, batch_size, drop_last=False) does."
            )
        return item

    def get_state(self) -> State:
        """``count`` of lists in this pass, whether it ``finished``, ``where`` the ``state`` comes from."""
        place: Any = next((x for x in (self._iterator, self.batch_sampler) if hasattr(x, "state_dict")), None)
        return {
            "where": "count" if place is None else "sampler",
            "state": None if place is None else place.state_dict(),
            "count": self._count,
            "finished": self._finished,
        }

    def _skip(self, count: int) -> None:
        for k in range(count):
            if next(self._iterator, self) is self:
                raise ValueError(
                    f"the state is that after {count} batches; the batch sampler has {k}. Load it with the "
                    "data and the batch sampler it was saved with."
                )


def _where(sampler: Any) -> Literal["sampler", "iterator"] | None:
    """What a state is loaded into."""
    if hasattr(sampler, "load_state_dict"):
        return "sampler"
    return "iterator" if hasattr(iter(sampler), "load_state_dict") else None


class Map(BaseNode):
    """A function of every item.

    A subclass may have another function for every worker (:meth:`bind`), and something left to do in the
    thread of who asks for the result (:meth:`deliver`).

    Args:
        source: the node before.
        function: of an item.
        name: for figures and errors; by default that of the function.
    """

    remote = True
    """Whether it may run in another process, for which it is pickled without its source."""

    def __init__(
        self, source: BaseNode, function: Callable[[Any], Any] | None = None, name: str | None = None
    ) -> None:
        super().__init__()
        self.source = source
        self.function = function
        self.name = name or getattr(function, "__name__", None) or type(self).__name__.lower()
        self._chain: tuple[BaseNode, list[Map], list[Callable[[Any], Any]]] | None = None

    def bind(self, worker: Worker) -> Callable[[Any], Any]:
        """The function that a worker runs on items; asked for once a worker."""
        if self.function is None:
            raise TypeError(f"{type(self).__name__} has no function: give one, or define bind()")
        return self.function

    def deliver(self, item: Any) -> Any:
        """What the consumer gets of an item that went through all stages after this one, too."""
        return item

    def reset(self, initial_state: State | None = None) -> None:
        """Reset the source."""
        super().reset(initial_state)
        self.source.reset(None if initial_state is None else initial_state["source"])

    def next(self) -> Any:
        """The next item, through all functions from here back."""
        if self._chain is None:
            base, stages = chain(self)
            self._chain = base, stages, [stage.bind(Worker()) for stage in stages]
        base, stages, steps = self._chain
        item = next(base)
        try:
            for step in steps:
                item = step(item)
        except StopIteration as error:
            raise no_end(error) from error
        return deliver(stages, item)

    def get_state(self) -> State:
        """The source's state."""
        return {"source": self.source.state_dict()}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "source": None, "_chain": None}


def chain(node: BaseNode) -> tuple[BaseNode, list[Map]]:
    """The last node before ``node`` that is no :class:`Map`, and those after it up to ``node``, in order."""
    stages: list[Map] = []
    while isinstance(node, Map):
        stages.append(node)
        node = node.source
    return node, stages[::-1]


def deliver(stages: list[Map], item: Any) -> Any:
    """What the consumer gets of an item: what each stage has left to do, the last stage first."""
    for stage in reversed(stages):
        item = stage.deliver(item)
    return item


class Fetch(Map):
    """Samples of a dataset by their indices.

    A dataset with ``__getitems__`` gets the whole list, any other one index after the other.

    Args:
        source: gives index lists.
        dataset: has ``__getitem__``; used by all workers at a time, unless ``worker_init`` gives each its
            own.
        worker_init: called with the dataset and the worker's number, once in each worker, before the first
            sample; returns the dataset for this worker (None: the one it got). The place to open a file, to
            copy what is not thread-safe, and to take worker processes' own resources.
    """

    def __init__(self, source: BaseNode, dataset: Any, worker_init: WorkerInit | None = None) -> None:
        super().__init__(source, name="fetch")
        self.dataset = dataset
        self.worker_init = worker_init

    def bind(self, worker: Worker) -> Callable[[Any], Any]:
        """Fetching from this worker's dataset."""
        dataset = self.dataset
        if self.worker_init is not None:
            own = self.worker_init(dataset, worker.number)
            dataset = dataset if own is None else own
        whole = getattr(dataset, "__getitems__", None)
        if whole is not None:
            return whole

        def fetch(indices: Iterable[Any]) -> list[Any]:
            samples, index = [], None
            try:
                for index in indices:
                    samples.append(dataset[index])
            except BaseException as error:
                error.add_note(f"packload: sample {index!r} of the dataset")
                raise
            return samples

        return fetch


class Collate(Map):
    """Lists of samples to batches.

    Args:
        source: gives lists of samples.
        collate: a :class:`packload.Collate`, by default one without a schema, or any other function: its
            result goes through as it is.
        ring: where batches are written; by default fresh memory each. Functions other than
            :class:`packload.Collate` do not use it.
    """

    def __init__(
        self, source: BaseNode, collate: Callable[[list[Any]], Any] | None = None, ring: Ring | None = None
    ) -> None:
        super().__init__(source, name="collate")
        self.collate = Packing() if collate is None or collate is pack_by_default else collate
        self.ring = ring

    def bind(self, worker: Worker) -> Callable[[Any], Any]:
        """Collating into the worker's memory, or the ring's."""
        collate = self.collate
        if not isinstance(collate, Packing):
            return collate
        allocate = worker.allocate or (None if self.ring is None else self.ring.allocate)
        return lambda samples: collate.pack(samples, allocate)

    def deliver(self, item: Any) -> Any:
        """The field alone, where samples are bare leaves."""
        return item.unwrap() if isinstance(item, Batch) and isinstance(self.collate, Packing) else item

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "ring": None}


class Pin(Map):
    """Batches in page-locked memory, which devices can read by themselves.

    Nothing is done without an accelerator, and for a batch that lies in such memory already. Other than
    Batches are pinned as a DataLoader does it.
    """

    remote = False

    def __init__(self, source: BaseNode) -> None:
        super().__init__(source, name="pin")
        self.moved: deque[int] = deque()

    def bind(self, worker: Worker) -> Callable[[Any], Any]:
        """Pinning; the bytes of batches that had to be copied for it go to ``moved``."""

        def pin(batch: Any) -> Any:
            result = pinned(batch)
            if result is not batch:
                self.moved.append(getattr(result, "nbytes", 0))
            return result

        return pin


class Copy(Map):
    """Batches on a device, copied on a side stream.

    Args:
        source: gives batches.
        device: where to.
        streams: the device's streams, see :class:`packload.transfer.Streams`; by default its own.
    """

    remote = False

    def __init__(
        self, source: BaseNode, device: torch.device | str | int, streams: Streams | None = None
    ) -> None:
        super().__init__(source, name="copy")
        where = torch.device(device)
        self.transfer = Transfer(where, streams_of(where) if streams is None else streams)

    def bind(self, worker: Worker) -> Callable[[Any], Any]:
        """Issuing copies."""
        return self.transfer.copy

    def deliver(self, item: Arriving) -> Any:
        """The batch, for the stream of the calling thread."""
        return self.transfer.arrive(item)


class Parallel(BaseNode):
    """Runs the :class:`Map` nodes that its source ends in on workers; items keep their order.

    Workers draw from what the chain of maps starts from, one at a time, run an item through all
    maps, and are ahead of the consumer by at most ``workers * prefetch`` items. The state is that after the
    last item handed out, whatever was drawn ahead.

    ``ParallelMapper`` of torchdata does the same for one function with a thread more for reading and one for
    sorting; on items that take a tenth of a millisecond this takes two thirds of its time, and in processes
    it hands batches over in shared memory that is used again.

    Args:
        source: the chain.
        workers: how many threads or processes; 0 runs everything when an item is asked for.
        mode: ``"thread"``, or ``"process"``: maps with ``remote`` run in processes.
        prefetch: items for each worker that are drawn and not handed out yet.
        hold: batches that the consumer holds at a time; if it holds more, they are made in fresh memory.
        context: how processes are started; see :mod:`multiprocessing`.
        persistent: keep the workers when a pass ends, until :meth:`close`.
        seed: what :func:`packload.batch_seed` follows from, with the number of the item.
        timeout: seconds that an item may take from when it is asked for; None for any.

    Raises:
        ValueError: a number or a mode is not one of these.
    """

    def __init__(
        self,
        source: BaseNode,
        workers: int = 4,
        *,
        mode: Mode = "thread",
        prefetch: int = 2,
        hold: int = 2,
        context: str = "spawn",
        persistent: bool = False,
        seed: int = 0,
        timeout: float | None = None,
    ) -> None:
        super().__init__()
        if workers < 0 or prefetch < 1 or hold < 0:
            raise ValueError(f"workers >= 0, prefetch >= 1, hold >= 0; got {workers}, {prefetch}, {hold}")
        if mode not in ("thread", "process"):
            raise ValueError(f"mode is 'thread' or 'process', not {mode!r}")
        self.source = source
        self.workers = workers
        self.mode = mode
        self.permits = workers * prefetch
        self.persistent = persistent
        self.key: tuple[int, ...] = (seed,)
        self.timeout = timeout
        self.on_done: Callable[[Done, float], None] | None = None
        self._base, self._stages = chain(source)
        self._prefetch, self._hold, self._context = prefetch, hold, context
        self._pool: Threads | None = None
        self._ring: SharedRing | None = None
        self._feed: Feed | None = None
        self._left: Feed | None = None
        self._ahead = False
        self._state: State = {}
        self._number = 0
        self._ended = False
        self._inline: list[tuple[str, Callable[[Any], Any]]] | None = None

    @property
    def overflows(self) -> int:
        """How many results found no slot of shared memory free."""
        return 0 if self._ring is None else self._ring.overflows

    def reset(self, initial_state: State | None = None) -> None:
        """Begin a pass, or continue one; workers start with the first item, or with :meth:`start`."""
        super().reset(initial_state)
        self.pause()
        self._ended = self._ahead = False
        self._base.reset(None if initial_state is None else initial_state["source"])
        self._number = 0 if initial_state is None else initial_state["number"]
        self._state = self._base.state_dict()

    def start(self) -> None:
        """Let the workers begin."""
        if self._pool is not None and not self._pool.here:
            self._halt()
            self._pool = self._ring = None
        if self._feed is not None or not self.workers:
            return
        if self._pool is None:
            self._pool = self._make_pool()
        self._feed = self._make_feed(self.permits)
        self._pool.begin(self._feed, self.key)

    def pause(self) -> None:
        """Take workers out of the source; the next item goes on after the last one handed out.

        Raises:
            TimeoutError: a worker does not come back from there.
        """
        self._halt()
        if self._left is not None:
            self._left.settle(PATIENCE)
            self._left = None

    def next(self) -> Any:
        """The next item, in order.

        Raises:
            TimeoutError: it took longer than ``timeout`` seconds.
            Exception: what a stage raised for this item, with a note that says where; the pass has ended.
        """
        if self._ended:
            raise StopIteration
        begin = perf_counter()
        try:
            done = self._next_inline() if not self.workers else self._next_done()
            waited = perf_counter() - begin
            if done.error is not None:
                raise done.error
            if done.last:
                self._state, self._number = done.task.state, 0
                raise StopIteration
            result = deliver(self._stages, done.result)
        except StopIteration:
            self.end()
            raise
        except BaseException:
            self._ended = True
            self.close()
            raise
        self._number += 1
        self._state = done.task.state
        if self.on_done is not None:
            self.on_done(done, waited)
        feed = self._feed
        if feed is not None:
            feed.permit()
        return result

    def get_state(self) -> State:
        """The state after the last item handed out."""
        return {"source": self._state, "number": self._number}

    def close(self) -> None:
        """End all workers. A later ``reset`` or ``next`` starts new ones; none of the items is lost."""
        self._halt()
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        for stage in self._stages:
            if isinstance(stage, Copy):
                stage.transfer.finish()

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.__dict__.get("_pool") is not None and not finalizing():
            self.close()

    def _halt(self) -> None:
        feed, self._feed = self._feed, None
        if feed is None:
            return
        self._ahead = True
        if self._pool is not None and self._pool.here:
            self._pool.halt()
            self._left = feed

    def _make_feed(self, permits: int) -> Feed:
        """A feed that begins after the last item handed out, however far the one before had drawn."""
        self.pause()
        if self._ahead:
            self._base.reset(self._state)
            self._ahead = False
        return Feed(self._base, self._base.state_dict, permits, self._number)

    def end(self) -> None:
        """End a pass before its time, and with it the workers, unless they are persistent."""
        self._ended = True
        self._halt()
        if not self.persistent:
            self.close()

    def _make_pool(self) -> Threads:
        if self.mode == "thread":
            return Threads(self._stages, self.workers)
        if self._ring is None:
            self._ring = SharedRing(self.permits + self._hold, self._lock_of_pages())
        return Processes(self._stages, self.workers, self._ring, min(2, self._prefetch), self._context)

    def _lock_of_pages(self) -> Any:
        streams = [stage.transfer.streams for stage in self._stages if isinstance(stage, Copy)]
        return streams[0].lock if streams and streams[0] is not None else None

    def _next_done(self) -> Done:
        self.start()
        feed = self._feed
        assert feed is not None
        try:
            return feed.read(self.timeout)
        except queue.Empty:
            raise TimeoutError(
                f"batch {self._number} was not ready {self.timeout} seconds after it was asked for. Is a "
                "worker stuck? Give a longer timeout if it is slow."
            ) from None

    def _next_inline(self) -> Done:
        if self._inline is None:
            worker = Worker()
            self._inline = [(stage.name, stage.bind(worker)) for stage in self._stages]
        if self._feed is None:
            self._feed = self._make_feed(1)
        task = self._feed.draw()
        if task is not None:
            result, error, seconds = run(self._inline, task, self.key, task.item)
            self._feed.put(Done(task, result, error, task.seconds + seconds))
        return self._feed.read()

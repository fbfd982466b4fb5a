"""Loader: batches of a dataset, made ahead of the loop by workers, and copied to the device beside it."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import Any

import torch

from .block import fresh_memory
from .feed import Done
from .nodes import Collate, Copy, Fetch, Indices, Mode, Parallel, Pin, WorkerInit
from .stats import Recorder, Stats
from .transfer import Arriving, Ring, streams_of

State = dict[str, Any]
_VERSION = 1


class Loader:
    """Iterates over batches of a dataset, in the order of a batch sampler.

    Workers fetch samples and collate them into memory that is used again and again (see
    :mod:`packload.transfer`); with a device they also issue the copy. A batch is valid for as long as
    anything of it is kept, and costs fresh memory only while more than ``hold`` are kept.

    State: :meth:`state_dict` is that after the last batch handed out, whatever was made ahead of it, and does
    not depend on ``workers``, ``mode`` or ``device``. When the sampler's own state cannot be had, batches are
    counted.

    Args:
        dataset: has ``__getitem__``, or ``__getitems__`` for lists of indices.
        batch_sampler: any iterable of index lists.
        collate: a :class:`packload.Collate` (by default without a schema), or any function of a list of
            samples.
        workers: how many; with 0 the loop's own thread does everything.
        mode: ``"thread"``; or ``"process"`` for datasets that are slow in Python itself: threads run Python
            code one at a time.
        device: where batches go; by default they stay in host memory.
        prefetch: batches for each worker that are made ahead.
        hold: batches that the loop keeps at a time before more memory is taken.
        pin_memory: without a device: hand out batches in page-locked memory, so that the loop's own
            ``batch.to(device)`` does not wait. Without an accelerator it does nothing.
        worker_init: called with the dataset and the worker's number, once in each worker; returns the
            dataset for this worker. See :class:`packload.nodes.Fetch`.
        seed: what :func:`packload.batch_seed` follows from, with the epoch and the batch's number.
        context: how processes are started: ``"spawn"``, ``"forkserver"`` or ``"fork"``. What forks must not
            have threads, and a loader has.
        persistent_workers: keep workers between passes, as is good for processes, whose start takes seconds.
            :meth:`close` ends them.
        timeout: seconds that the loop waits for a batch before it raises; None for any.

    Raises:
        TypeError: the dataset has no ``__getitem__``, or the batch sampler gives no lists.
        ValueError: a number is out of range.
    """

    batch_size = None
    """Batches differ in size; frameworks that look here must not assume one."""

    def __init__(
        self,
        dataset: Any,
        batch_sampler: Iterable[Any],
        collate: Callable[[list[Any]], Any] | None = None,
        *,
        workers: int = 4,
        mode: Mode = "thread",
        device: torch.device | str | int | None = None,
        prefetch: int = 2,
        hold: int = 2,
        pin_memory: bool = False,
        worker_init: WorkerInit | None = None,
        seed: int = 0,
        context: str = "spawn",
        persistent_workers: bool = False,
        timeout: float | None = None,
    ) -> None:
        _check(dataset, batch_sampler)
        self.dataset = dataset
        self.batch_sampler = batch_sampler
        self.num_workers = workers
        self.device = None if device is None else torch.device(device)
        self.seed = seed
        self._indices = Indices(batch_sampler)
        streams = None if self.device is None else streams_of(self.device)
        make = fresh_memory if streams is None else streams.memory
        self._ring = Ring(max(1, workers * prefetch) + hold, make)
        collated = Collate(Fetch(self._indices, dataset, worker_init), collate, self._ring)
        self._pin: Pin | None = None
        node: Any = collated
        if pin_memory or streams is not None:
            node = self._pin = Pin(node)
        self._copies = 1
        if self.device is not None and self.device.type != "cpu":
            node = Copy(node, self.device, streams)
            self._ring.reclaim = node.transfer.reclaim
            self._copies = 2
        self.root = Parallel(
            node,
            workers,
            mode=mode,
            prefetch=prefetch,
            hold=hold,
            context=context,
            persistent=persistent_workers,
            timeout=timeout,
        )
        self.collate_fn = collated.collate
        self._epoch = 0
        self._told: int | None = None
        self._pending: State | None = None
        self._begun = False
        self._iterator: Callable[[], _Iterator | None] = lambda: None
        self._record()

    # ------------------------------------------------------------ iteration

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass, or go on from a state that was loaded; ends an iterator that is under way."""
        before = self._iterator()
        if before is not None:
            before.supersede()
        iterator = _Iterator(self)
        self._iterator = weakref.ref(iterator)
        return iterator

    def __len__(self) -> int:
        """Batches of a pass, as the batch sampler says."""
        return len(self.batch_sampler)  # type: ignore[arg-type]

    @property
    def sampler(self) -> _Epochs:
        """What frameworks call ``set_epoch`` on; forwards it."""
        return _Epochs(self)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next pass is, for the sampler's order and for seeds.

        A state that was loaded, and stands in this epoch, stays loaded.
        """
        if self._pending is not None and self._pending["epoch"] != epoch:
            self._pending = None
        self._epoch = epoch
        self._tell(epoch)

    def _tell(self, epoch: int) -> None:
        """Set the sampler's epoch."""
        self._told = epoch
        for target in (self.batch_sampler, getattr(self.batch_sampler, "sampler", None)):
            set_epoch = getattr(target, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
                return

    def close(self) -> None:
        """End all workers; a later pass starts new ones."""
        self.root.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------ state

    def state_dict(self) -> State:
        """Where the loop stands: after the last batch handed out. JSON-able if the sampler's state is."""
        if self._pending is not None:
            return copy.deepcopy(self._pending)
        root = self.root.get_state() if self._begun else None
        return {
            "version": _VERSION,
            "epoch": self._epoch,
            "told": self._told,
            "seed": self.seed,
            "root": copy.deepcopy(root),
        }

    def load_state_dict(self, state: State) -> None:
        """Go on from a state: the next pass does, and so does an iterator that is alive, with its next batch.

        Args:
            state: as :meth:`state_dict` gave it; not changed, not kept.

        Raises:
            ValueError: it is none, or was saved with another seed or another kind of batch sampler; and what
                the batch sampler raises.
        """
        missing = {"version", "epoch", "seed", "root"} - set(state)
        if missing or state["version"] != _VERSION:
            what = f"it lacks {sorted(missing)}" if missing else f"its version is {state['version']!r}"
            raise ValueError(f"this is not the state of a packload.Loader of version {_VERSION}: {what}")
        if state["seed"] != self.seed:
            raise ValueError(f"the state was saved with seed {state['seed']}; this loader's is {self.seed}")
        state = copy.deepcopy(state)
        self.root.pause()  # workers that draw would move the sampler on from where it is put
        if state["root"] is not None:
            self._indices.load(state["root"]["source"])
        self._pending = state

    # ------------------------------------------------------------ figures

    def stats(self) -> Stats:
        """Figures of the latest pass, finished or not; see :class:`packload.stats.Stats`."""
        moved = sum(self._pin.moved) if self._pin is not None else 0
        skipped = next(filter(None, map(_skipped, (self.batch_sampler, self.dataset))), 0)
        before_moved, before_overflows = self._before
        return self._recorder.stats(skipped, moved - before_moved, self._overflows - before_overflows)

    @property
    def _overflows(self) -> int:
        return self._ring.overflows + self.root.overflows

    def _record(self) -> None:
        self._recorder = Recorder()
        self._before = (sum(self._pin.moved) if self._pin is not None else 0), self._overflows
        self.root.on_done = partial(_note, self._recorder, self._copies)

    # ------------------------------------------------------------ for the iterator

    def _begin(self) -> None:
        """Begin a pass at the state that was loaded, or the next one."""
        state, self._pending = self._pending, None
        root = None
        if state is not None:
            self._epoch, root = state["epoch"], state["root"]
            told = state.get("told")
            if told is not None and (root is None or root["source"]["where"] == "count"):
                self._tell(told)  # a sampler with a state has its epoch in there
        self.root.key = (self.seed, self._epoch)
        self.root.reset(root)
        self._begun = True
        self._record()
        self.root.start()


class _Iterator(Iterator[Any]):
    """One pass. Only the loop holds it, so that leaving the loop ends the workers."""

    def __init__(self, loader: Loader) -> None:
        self._loader: Loader | None = loader
        self._superseded = False
        loader._begin()

    def __iter__(self) -> _Iterator:
        return self

    def __len__(self) -> int:
        return len(self._loader) if self._loader is not None else 0

    def __next__(self) -> Any:
        loader = self._loader
        if loader is None:
            if self._superseded:
                raise RuntimeError("another iter() of this loader ended this pass: one is under way at once")
            raise StopIteration
        if loader._pending is not None:
            loader._begin()
        loader._recorder.asked()
        try:
            return next(loader.root)
        except StopIteration:
            loader._epoch += 1
            self._loader = None
            raise
        except BaseException:
            self._loader = None
            raise

    def supersede(self) -> None:
        """End a pass that is under way because another begins."""
        self._superseded = self._loader is not None
        self.close()

    def close(self) -> None:
        """End the pass, and with it the workers, unless they are persistent."""
        loader, self._loader = self._loader, None
        if loader is not None:
            loader.root.end()

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():  # then workers were ended before, and modules may be gone
            self.close()


class _Epochs:
    """Hands ``set_epoch`` on to a loader."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        """See :meth:`Loader.set_epoch`."""
        self._loader.set_epoch(epoch)


def _note(recorder: Recorder, copies: int, done: Done, waited: float) -> None:
    """Note down a batch that is handed out."""
    result = done.result.batch if isinstance(done.result, Arriving) else done.result
    recorder.handed_out(result, done.task.item, [("wait", waited), *done.seconds], copies + done.moves)


def _skipped(source: Any) -> int:
    skipped = getattr(source, "skipped", None)
    if skipped is None:  # counts of a plan are planned for when they are asked for
        counts = getattr(source, "counts", None)
        skipped = counts.get("skipped") if isinstance(counts, dict) else None
    return skipped if isinstance(skipped, int) else 0


def _check(dataset: Any, batch_sampler: Any) -> None:
    if not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__getitems__"):
        raise TypeError(
            f"the dataset, {type(dataset).__name__}, has no __getitem__. For a stream of samples put stages "
            "together: packload.nodes.Parallel(packload.nodes.Collate(source))."
        )
    if not hasattr(batch_sampler, "__iter__"):
        raise TypeError(f"the batch sampler, {type(batch_sampler).__name__}, is no iterable of index lists")

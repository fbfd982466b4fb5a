"""Worker processes, and the threads that speak for them.

    thread k                                          process k
    draw a task, take a slot     -- tasks pipe ---->  run the stages, write into the slot
    make the batch over the slot <-- replies pipe --  how much there is, and the small rest
    run the other stages

Slots are owned here: who sends a task says where its result goes, so that nobody waits for memory inside a
process. What waits is the feed: it permits so many batches that are not read yet. While the consumer holds so
many that no slot is free, a task gets one that belongs to its thread, and the result is copied to fresh
memory.

A process has no descriptor of another one's pipes. When this process ends, in whatever way, its workers find
their tasks pipe closed, or its sentinel gone, and end too; nothing that they share has a name.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .batch import Batch
from .block import Bytes, fresh_memory
from .feed import Done, Feed, Seconds, Task
from .shared import Dumped, SharedFile, SharedRing, dump, dumps, load
from .workers import Stage, Threads, Worker, batch_seed, describe, run

Key = tuple[int, ...]

_SENT_AHEAD = 1 << 14
"""Bytes of an order that is sent while the process is at another: it must fit into the pipe. With a larger
one this side would wait for the process to read, and the process for this side to read its reply."""


class Order(NamedTuple):
    """A task, as it is sent to a process: its number and item, the seed's key, and the slot to write into."""

    number: int
    item: Any
    key: Key
    slot: int


class Reply(NamedTuple):
    """What a process sends back.

    Attributes:
        value: a Batch's header, or how to load another object out of the slot.
        nbytes: how much of the slot is used.
        seconds: of the stages.
        error: pickled, and its notes, where one was raised.
    """

    value: Any = None
    nbytes: int = 0
    seconds: Seconds = []
    error: tuple[bytes, list[str]] | None = None


class Processes(Threads):
    """A number of processes that run the stages which may run elsewhere, and as many threads for the others.

    Args:
        stages: in order; those with ``remote`` come first.
        count: how many processes.
        ring: the memory that results come back in.
        ahead: tasks that a process has at a time: the one it is at, and those that wait for it.
        context: how processes are started: ``"spawn"``, ``"forkserver"``, ``"fork"``.
    """

    def __init__(
        self, stages: Sequence[Stage], count: int, ring: SharedRing, ahead: int, context: str
    ) -> None:
        remote = [stage for stage in stages if stage.remote]
        super().__init__(stages[len(remote) :], count)
        if any(stage.remote for stage in self.stages):
            raise ValueError(
                f"stages that run in other processes come first; the order is {[s.name for s in stages]}"
            )
        self._remote_stages = remote
        self._ring = ring
        self._ahead = ahead
        self._context = multiprocessing.get_context(context)
        self._remotes: list[_Remote] = []

    def _start(self) -> None:
        own = self._ahead * self.count
        self._ring.reserve(own)
        forked = self._context.get_start_method() == "fork"
        arrays, dumped = SharedFile(), None
        if not forked:
            dumped = _dump_stages(self._remote_stages, arrays)
        pipes = [(self._context.Pipe(False), self._context.Pipe(False)) for _ in range(self.count)]
        ends = [end for pair in pipes for pipe in pair for end in pipe]
        for number, ((tasks, send), (receive, replies)) in enumerate(pipes):
            slots = self._ring.slots + number * self._ahead
            reserved = range(slots, slots + self._ahead)
            files = {k: self._ring.files[k] for k in (*range(self._ring.slots), *reserved)}
            others = [end for end in ends if end not in (tasks, replies)] if forked else []
            process = self._context.Process(  # type: ignore[attr-defined]
                target=_work,
                args=(
                    tasks,
                    replies,
                    files,
                    arrays,
                    self._remote_stages if forked else None,
                    (number, self.count),
                    others,
                ),
                name=f"packload-{number}",
                daemon=True,
            )
            self._remotes.append(_Remote(number, process, send, receive, deque(reserved), dumped))
            process.start()
        for (tasks, _), (_, replies) in pipes:
            tasks.close()
            replies.close()
        super()._start()

    def _server(self, number: int) -> Callable[[Feed, Key], None]:
        remote = self._remotes[number]
        remote.make_ready()
        worker = Worker(number, self.count, fresh_memory)
        steps = [(stage.name, stage.bind(worker)) for stage in self.stages]

        def serve(feed: Feed, key: Key) -> None:
            while True:
                while len(remote.sent) < self._ahead:
                    task = feed.draw(wait=not remote.sent)
                    if task is None:
                        break
                    slot, order = remote.order(task, key, self._ring)
                    while remote.sent and len(order) > _SENT_AHEAD:
                        feed.put(self._finish(remote, steps, key))
                    remote.send(task, slot, order)
                    del task, order
                if not remote.sent:
                    return
                feed.put(self._finish(remote, steps, key))

        return serve

    def _leave(self, number: int) -> None:
        self._remotes[number].dismiss()

    def _finish(self, remote: _Remote, steps: list[tuple[str, Callable[[Any], Any]]], key: Key) -> Done:
        """Receive the reply to the oldest task, and run the stages that are left."""
        reply = remote.receive()
        task, slot = remote.sent.popleft()
        seconds = task.seconds + reply.seconds
        if reply.error is not None:
            remote.give_back(slot, self._ring)
            return Done(task, None, _unpickle_error(reply.error), seconds)
        if slot < self._ring.slots:
            memory = self._ring.lease(slot, reply.nbytes)
        else:
            memory = fresh_memory(reply.nbytes)
            memory[:] = self._ring.memory(slot, reply.nbytes)[: reply.nbytes]
            remote.give_back(slot, self._ring)
        value = _unship(reply, memory)
        del memory, reply
        result, error, more = run(steps, task, key, value)
        return Done(task, result, error, seconds + more, moves=int(slot >= self._ring.slots))

    def _end(self, until: float) -> None:
        half = (until + monotonic()) / 2
        for remote in self._remotes:
            remote.end(half)
        super()._end(until)
        for remote in self._remotes:
            remote.tasks.close()
            remote.replies.close()
            for _, slot in remote.sent:
                remote.give_back(slot, self._ring)
            remote.sent.clear()


class _Remote:
    """The process of one thread, seen from here."""

    def __init__(
        self,
        number: int,
        process: BaseProcess,
        tasks: Connection,
        replies: Connection,
        reserved: deque[int],
        dumped: Dumped | None,
    ) -> None:
        self.number = number
        self.process = process
        self.tasks = tasks
        self.replies = replies
        self.reserved = reserved
        self.sent: deque[tuple[Task, int]] = deque()
        self._dumped = dumped

    def make_ready(self) -> None:
        """Send the stages, and wait until the process has made them ready; raises what it raised."""
        try:
            if self._dumped is not None:
                self.tasks.send_bytes(pickle.dumps(self._dumped))
        except OSError:
            pass  # it has died, which is seen next
        reply = self.receive()
        if reply.error is not None:
            raise _unpickle_error(reply.error)

    def order(self, task: Task, key: Key, ring: SharedRing) -> tuple[int, bytes]:
        """A slot for a task, and what is to be sent for it."""
        slot = ring.take()
        slot = self.reserved.popleft() if slot is None else slot
        try:
            return slot, dumps(Order(task.number, task.item, key, slot))
        except BaseException:
            self.give_back(slot, ring)
            raise

    def give_back(self, slot: int, ring: SharedRing) -> None:
        """A slot that is done with: the ring's, or one reserved for this process."""
        if slot < ring.slots:
            ring.give_back(slot)
        else:
            self.reserved.append(slot)

    def send(self, task: Task, slot: int, order: bytes) -> None:
        """Send a task."""
        self.sent.append((task, slot))
        try:
            self.tasks.send_bytes(order)
        except OSError:
            pass  # it has died, which is seen when its reply is received

    def dismiss(self) -> None:
        """Tell the process to end. (Closing its pipe would not do if forks of this process have it open.)"""
        try:
            self.tasks.send_bytes(dumps(None))
        except OSError:
            pass  # it has ended

    def receive(self) -> Reply:
        """The next reply.

        Raises:
            RuntimeError: the process has died.
        """
        try:
            return pickle.loads(self.replies.recv_bytes())
        except (EOFError, OSError):
            self.process.join(1.0)
        at = f"at batch {self.sent[0][0].number}{describe(self.sent[0][0].item)}" if self.sent else ""
        raise RuntimeError(
            f"worker process {self.number} (pid {self.process.pid}) {_how(self.process.exitcode)} "
            + (at or "before it was ready. " + _UNREADY)
        )

    def end(self, until: float) -> None:
        """Wait until the process has ended; kill it when it takes too long."""
        if self.process.pid is None:
            return  # it could not be started
        self.process.join(max(0.0, until - monotonic()))
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join(1.0)


_UNREADY = (
    "What it printed says why. A program that starts processes needs its main part under "
    "`if __name__ == '__main__':`."
)


def _how(code: int | None) -> str:
    if code is None:
        return "closed its pipe"
    if code >= 0:
        return f"ended with exit code {code}"
    hint = ", as the system does when it runs out of memory," if -code == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


def _dump_stages(stages: list[Stage], arrays: SharedFile) -> Dumped:
    """Pickle the stages once for all processes; the arrays inside lie in memory that they all map."""
    try:
        return dump(stages, arrays.memory)[0]
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        error.add_note(
            "packload: the dataset, the collate function and worker_init are pickled for worker processes. "
            "Define them at the top level of a module, open files in worker_init, or use mode='thread' or "
            "context='fork'."
        )
        raise


# ---------------------------------------------------------------- in the process


def _work(*given: Any) -> None:
    """The main function of a worker process; takes what :func:`_serve` takes."""
    _serve(*given)
    _exit()


def _exit() -> None:
    """End this process without taking the interpreter apart, which takes most of a second."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _serve(
    tasks: Connection,
    replies: Connection,
    files: dict[int, SharedFile],
    arrays: SharedFile,
    stages: list[Stage] | None,
    place: tuple[int, int],
    others: list[Connection],
) -> None:
    """Do what is ordered until told to end."""
    for end in others:
        end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process tells when to end
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    slot = _Slot()
    try:
        if stages is None:
            stages = load(pickle.loads(tasks.recv_bytes()), arrays.private_memory())
        worker = Worker(*place, slot.allocate)
        steps = [(stage.name, stage.bind(worker)) for stage in stages]
    except BaseException as error:
        replies.send_bytes(dumps(Reply(error=_pickle_error(error))))
        return
    replies.send_bytes(dumps(Reply()))
    while True:
        try:
            order: Order | None = pickle.loads(tasks.recv_bytes())
        except EOFError:
            return
        if order is None:
            return
        slot.use(files[order.slot])
        reply = _reply(steps, order, slot)
        try:
            replies.send_bytes(reply)
        except OSError:
            return


def _reply(steps: list[tuple[str, Callable[[Any], Any]]], order: Order, slot: _Slot) -> bytes:
    task = Task(order.number, order.item, None, [])
    first = ("", _seeded)
    result, error, seconds = run([first, *steps], task, order.key, order.item)
    if error is None:
        try:
            value, nbytes = _ship(result, slot)
            return dumps(Reply(value, nbytes, seconds[1:]))
        except BaseException as raised:
            raised.add_note(
                f"packload: batch {order.number}{describe(order.item)}, on its way to the consumer"
            )
            error = raised
    return dumps(Reply(seconds=seconds[1:], error=_pickle_error(error)))


def _seeded(item: Any) -> Any:
    """Seed this process's generators for the batch at hand."""
    seed = batch_seed()
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)
    return item


class _Slot:
    """Where the result of the task at hand is written."""

    def use(self, file: SharedFile) -> None:
        """Begin a task."""
        self._file = file
        self._lent: Bytes | None = None

    def allocate(self, nbytes: int) -> Bytes:
        """The slot's memory, or fresh memory if it is in use already."""
        if self._lent is not None:
            return fresh_memory(nbytes)
        self._lent = self._file.memory(nbytes, nbytes // 8)
        return self._lent

    def fill(self, source: Bytes) -> None:
        """See that the slot begins with these bytes."""
        if self._lent is None or source.ctypes.data != self._lent.ctypes.data:
            self._file.memory(source.nbytes, source.nbytes // 8)[: source.nbytes] = source


def _ship(value: Any, slot: _Slot) -> tuple[Any, int]:
    """See that all large parts of a result lie in the slot; return the small rest, and how many bytes."""
    if isinstance(value, Batch) and isinstance(value.buffer, Tensor):
        source = value.buffer.numpy()
        slot.fill(source)
        return value.header(), source.nbytes
    dumped, memory = dump(value, slot.allocate)
    slot.fill(memory[: dumped.nbytes])
    return dumped, dumped.nbytes


def _unship(reply: Reply, memory: Bytes) -> Any:
    if isinstance(reply.value, Dumped):
        return load(reply.value, memory)
    return Batch.from_buffer(torch.from_numpy(memory[: reply.nbytes]), reply.value)


def _pickle_error(error: BaseException) -> tuple[bytes, list[str]]:
    text = "".join(traceback.format_exception(error, chain=True)).rstrip()
    notes = [*getattr(error, "__notes__", []), f"packload: in worker process {os.getpid()}:\n{text}"]
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        data = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return data, notes


def _unpickle_error(pickled: tuple[bytes, list[str]]) -> BaseException:
    error: BaseException = pickle.loads(pickled[0])
    error.__notes__ = pickled[1]
    return error


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

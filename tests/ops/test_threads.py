"""The pool of threads that works on samples: it does all of the work, once, and leaves nothing behind."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ops.kernels.threads import for_each
from ops.testing import pack
from tests.strategies import make


@pytest.fixture(params=[1, 2, 3])
def threads(request: Any) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_each_item_is_worked_on_once(threads: int, count: int) -> None:
    done: list[int] = []
    for_each(done.append, list(range(count)), [1.0] * count, 0.0)
    assert sorted(done) == list(range(count))


def test_the_number_of_threads_stays_as_it_was(threads: int) -> None:
    inside = set()
    for_each(lambda _: inside.add(torch.get_num_threads()), list(range(20)), [1.0] * 20, 0.0)
    assert torch.get_num_threads() == threads
    assert inside == {1}
    found: list[int] = []
    later = threading.Thread(target=lambda: found.append((torch.ones(9).sum(), torch.get_num_threads())[1]))
    later.start()
    later.join()
    assert found == [threads]


def natives() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads by /proc")
def test_threads_that_would_spin_leave_their_cores() -> None:
    """OpenMP's of the last operator; where the work is little they stay. Operators go on as before."""
    before, big = torch.get_num_threads(), torch.ones(1 << 20)
    torch.set_num_threads(3)
    try:
        for_each(lambda _: None, [0, 1, 2], [1.0] * 3, 1.0)  # the pool is there
        for least, gone in ((1.0, 0), (3.0 / 16, 2)):
            assert big.add(1).sum() == 1 << 21
            at_work = natives()
            for_each(lambda _: None, [0, 1, 2], [1.0] * 3, least)
            assert natives() == at_work - gone
        assert big.add(1).sum() == 1 << 21
        assert (torch.get_num_threads(), natives()) == (3, at_work)
    finally:
        torch.set_num_threads(before)


def test_settings_of_the_caller_hold_in_the_work(threads: int) -> None:
    def work(_: int) -> None:
        seen.append(
            (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"))
        )
        time.sleep(0.001)

    for inference in (False, True):
        seen: list[tuple[bool, ...]] = []
        with torch.inference_mode(inference), torch.autocast("cpu", torch.bfloat16):
            for_each(work, list(range(8)), [1.0] * 8, 0.0)
        assert set(seen) == {(False, inference, False)}
    assert torch.is_grad_enabled()


def test_an_error_reaches_the_caller(threads: int) -> None:
    def work(i: int) -> None:
        if i == 3:
            raise ValueError("the fourth")

    for _ in range(2):
        with pytest.raises(ValueError, match="the fourth"):
            for_each(work, list(range(6)), [1.0] * 6, 0.0)


def test_several_callers_at_once(threads: int) -> None:
    done: list[list[int]] = [[] for _ in range(4)]
    callers = [
        threading.Thread(target=for_each, args=(d.append, list(range(100)), [1.0] * 100, 0.0)) for d in done
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(30)
    assert [sorted(d) for d in done] == [list(range(100))] * 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore")
def test_a_child_of_a_fork_makes_its_own_pool() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        done: list[int] = []
        for_each(done.append, list(range(8)), [1.0] * 8, 0.0)
        child = os.fork()
        if child == 0:
            mine: list[int] = []
            for_each(mine.append, list(range(8)), [1.0] * 8, 0.0)
            os._exit(0 if sorted(mine) == list(range(8)) else 1)
        deadline = time.monotonic() + 30
        status = 0
        while time.monotonic() < deadline:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                break
            time.sleep(0.05)
        else:
            os.kill(child, 9)
            pytest.fail("the child hangs")
        assert os.waitstatus_to_exitcode(status) == 0
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parallel_attention_gives_the_bits_of_one_thread(dtype: torch.dtype) -> None:
    lengths, found, before = [120, 0, 90, 200, 1, 150], [], torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
                x, b = pack(make(lengths, "4 n 32", dtype=dtype), make(lengths, "4 n n", dtype=dtype, seed=1))
                with mode():
                    recorded = torch.is_grad_enabled()
                    out = F.scaled_dot_product_attention(
                        *[x.requires_grad_(recorded)] * 3, attn_mask=b.requires_grad_(recorded)
                    )
                    found.append([out.values])
                if recorded:
                    out.values.float().square().sum().backward()
                    found[-1] = [out.values.detach(), x.grad.values, b.grad.values]
    finally:
        torch.set_num_threads(before)
    for one in found[1:]:
        for a, b in zip(found[0], one):
            assert torch.equal(a, b)
    for a, b in zip(found[0], found[3], strict=True):
        assert torch.equal(a, b)

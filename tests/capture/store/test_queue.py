"""Work in the background: in order, bounded, and no error lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch

from quantexp.capture.store.queue import WorkQueue

Work = Callable[[], object]


def work_queue(most_bytes: int) -> WorkQueue[Work]:
    """A queue whose batches are functions to call."""
    return WorkQueue(most_bytes, lambda work: work())


def put(queue: WorkQueue[Work], work: Work, num_bytes: int = 0) -> None:
    queue.reserve(num_bytes)
    queue.put(work, num_bytes)


def test_work_is_done_in_order() -> None:
    queue, order = work_queue(1 << 20), list[int]()
    for i in range(100):
        put(queue, partial(order.append, i), 10)
    queue.flush()
    assert order == list(range(100))
    assert queue.num_bytes == 0
    queue.close()


def test_the_thread_works_beside_training() -> None:
    queue, num_threads = work_queue(1 << 20), dict[str, int]()

    def look() -> None:
        num_threads[threading.current_thread().name] = torch.get_num_threads()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    put(queue, look)
    queue.flush()
    torch.set_num_threads(before)
    assert num_threads == {"capture": 1}
    queue.close()


def test_waiting_bytes_stay_within_the_limit_and_the_wait_is_counted() -> None:
    queue, gate = work_queue(100), threading.Event()
    put(queue, gate.wait, 60)
    put(queue, lambda: None, 40)
    threading.Timer(0.2, gate.set).start()
    put(queue, lambda: None, 1)
    assert gate.is_set()
    assert queue.waited_s > 0
    queue.flush()
    assert queue.peak_bytes == 100
    queue.close()


def test_bytes_are_counted_from_when_they_are_reserved_until_the_work_is_done() -> None:
    queue, gate = work_queue(100), threading.Event()
    queue.reserve(30)
    queue.reserve(30)
    assert queue.num_bytes == 60
    assert queue.has_room(40)
    assert not queue.has_room(41)
    queue.put(gate.wait, 60)
    threading.Timer(0.2, gate.set).start()
    queue.reserve(41)
    assert gate.is_set()
    assert queue.waited_s > 0
    queue.put(lambda: None, 41)
    queue.flush()
    assert (queue.num_bytes, queue.peak_bytes) == (0, 60)
    queue.close()


def test_a_batch_larger_than_the_limit_goes_alone() -> None:
    queue = work_queue(10)
    for _ in range(3):
        put(queue, lambda: time.sleep(0.01), 1000)
    queue.flush()
    assert queue.peak_bytes == 1000
    queue.close()


def test_an_error_ends_the_work_and_reaches_the_next_caller() -> None:
    queue, calls, gate = work_queue(1 << 20), list[int](), threading.Event()

    def fail() -> None:
        gate.wait()
        raise ValueError("full")

    put(queue, fail, 10)
    put(queue, lambda: calls.append(1), 20)
    gate.set()
    for call in (
        queue.flush,
        queue.flush,
        lambda: queue.put(lambda: None),
        lambda: queue.reserve(1),
    ):
        with pytest.raises(ValueError, match="full"):
            call()
    queue.close()
    assert not calls
    assert queue.num_bytes == 0, "later batches are dropped"


def test_an_error_reaches_a_caller_that_waits_for_room() -> None:
    queue, gate = work_queue(100), threading.Event()

    def fail() -> None:
        gate.wait()
        raise ValueError("full")

    put(queue, fail, 60)
    put(queue, lambda: None, 40)
    threading.Timer(0.2, gate.set).start()
    with pytest.raises(ValueError, match="full"):
        queue.reserve(50)
    queue.close()


def test_closing_finishes_queued_work() -> None:
    queue, order = work_queue(1 << 20), list[int]()

    def slow(i: int) -> None:
        time.sleep(0.01)
        order.append(i)

    for i in range(5):
        put(queue, partial(slow, i))
    queue.close()
    assert order == list(range(5))
    work_queue(1).close()

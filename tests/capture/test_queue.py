"""Work in the background: in order, bounded, and no error lost."""

from __future__ import annotations

import threading
import time

import pytest

from quantexp.capture.queue import WorkQueue


def test_work_is_done_in_order() -> None:
    queue, done = WorkQueue(1 << 20), list[int]()
    for i in range(100):
        queue.put(lambda i=i: done.append(i), 10)  # type: ignore[misc]
    queue.flush()
    assert done == list(range(100))
    assert queue.num_bytes == 0
    queue.close()


def test_bytes_that_wait_stay_within_the_limit_and_the_wait_is_counted() -> None:
    queue, gate = WorkQueue(100), threading.Event()
    queue.put(gate.wait, 60)  # type: ignore[arg-type]
    queue.put(lambda: None, 40)
    threading.Timer(0.2, gate.set).start()
    queue.put(lambda: None, 1)
    assert gate.is_set()
    assert queue.waited_s > 0.1
    queue.flush()
    assert queue.peak_bytes == 100
    queue.close()


def test_a_piece_larger_than_the_limit_goes_alone() -> None:
    queue = WorkQueue(10)
    for _ in range(3):
        queue.put(lambda: time.sleep(0.01), 1000)
    queue.flush()
    assert queue.peak_bytes == 1000
    queue.close()


def test_an_error_ends_the_work_and_reaches_whoever_comes_next() -> None:
    queue, done, gate = WorkQueue(1 << 20), list[int](), threading.Event()

    def fail() -> None:
        gate.wait()
        raise ValueError("full")

    queue.put(fail)
    queue.put(lambda: done.append(1))
    gate.set()
    for call in (queue.flush, queue.flush, lambda: queue.put(lambda: None)):
        with pytest.raises(ValueError, match="full"):
            call()
    queue.close()
    assert not done


def test_closing_finishes_what_is_queued() -> None:
    queue, done = WorkQueue(1 << 20), list[int]()
    for i in range(5):
        queue.put(lambda i=i: (time.sleep(0.01), done.append(i)))  # type: ignore[misc]
    queue.close()
    assert done == list(range(5))
    WorkQueue(1).close()

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
    for i in range(5, 10):
        queue.put(lambda: time.sleep(0.001), then=lambda i=i: done.append(i))  # type: ignore[misc]
    queue.close()
    assert done == list(range(10))
    WorkQueue(1).close()


def test_what_follows_is_done_in_order_while_the_next_is_worked_on() -> None:
    queue, done, gate = WorkQueue(1 << 20), list[str](), threading.Event()

    def slow() -> None:
        gate.wait(10)
        done.append("0 followed")

    queue.put(lambda: done.append("0"), 10, then=slow)
    queue.put(lambda: (done.append("1"), gate.set()), 10, then=lambda: done.append("1 followed"))
    queue.then(lambda: done.append("2 followed"))
    queue.flush()
    assert done == ["0", "1", "0 followed", "1 followed", "2 followed"]
    assert (queue.num_bytes, queue.peak_bytes) == (0, 20)
    queue.close()


def test_bytes_count_until_what_follows_is_done() -> None:
    queue, gate = WorkQueue(100), threading.Event()
    queue.put(lambda: None, 60, then=lambda: gate.wait(10) and None)
    threading.Timer(0.2, gate.set).start()
    queue.put(lambda: None, 60)
    assert gate.is_set()
    queue.flush()
    assert queue.peak_bytes == 60
    assert queue.followed_s > 0.1
    queue.close()


def test_an_error_in_what_follows_ends_the_work() -> None:
    queue, done = WorkQueue(1 << 20), list[int]()

    def fail() -> None:
        raise ValueError("full")

    queue.put(lambda: None, then=fail)
    with pytest.raises(ValueError, match="full"):
        queue.flush()
    with pytest.raises(ValueError, match="full"):
        queue.then(lambda: done.append(1))
    queue.close()
    assert not done


def test_nothing_follows_work_that_failed() -> None:
    queue, done = WorkQueue(1 << 20), list[int]()

    def fail() -> None:
        raise ValueError("broken")

    queue.put(fail, then=lambda: done.append(1))
    with pytest.raises(ValueError, match="broken"):
        queue.flush()
    queue.close()
    assert not done

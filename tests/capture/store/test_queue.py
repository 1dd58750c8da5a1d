"""Work in the background: in order, bounded, and no error lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch

from quantexp.capture.store.queue import WorkQueue

Follower = Callable[[], object]


def work_queue(most_bytes: int, works_beside: bool = True) -> WorkQueue[Follower]:
    """What follows is called."""

    def follow(followers: Sequence[Follower]) -> None:
        for follower in followers:
            follower()

    return WorkQueue(most_bytes, follow, works_beside)


def test_work_is_done_in_order() -> None:
    queue, done = work_queue(1 << 20), list[int]()
    for i in range(100):
        queue.put(partial(done.append, i), 10)
    queue.flush()
    assert done == list(range(100))
    assert queue.num_bytes == 0
    queue.close()


def test_both_threads_work_beside_training() -> None:
    queue, found = work_queue(1 << 20), dict[str, int]()

    def look() -> None:
        found[threading.current_thread().name] = torch.get_num_threads()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    queue.put(look, then=look)
    queue.flush()
    torch.set_num_threads(before)
    assert found == {"capture": 1, "capture-disk": 1}
    queue.close()


def test_bytes_that_wait_stay_within_the_limit_and_the_wait_is_counted() -> None:
    queue, gate = work_queue(100), threading.Event()
    queue.put(gate.wait, 60)
    queue.put(lambda: None, 40)
    threading.Timer(0.2, gate.set).start()
    queue.put(lambda: None, 1)
    assert gate.is_set()
    assert queue.waited_s > 0.1
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
    queue.put_reserved(gate.wait, 60)
    threading.Timer(0.2, gate.set).start()
    queue.reserve(41)
    assert gate.is_set()
    assert queue.waited_s > 0.1
    queue.put_reserved(lambda: None, 41)
    queue.flush()
    assert (queue.num_bytes, queue.peak_bytes) == (0, 60)
    queue.close()


def test_a_piece_larger_than_the_limit_goes_alone() -> None:
    queue = work_queue(10)
    for _ in range(3):
        queue.put(lambda: time.sleep(0.01), 1000)
    queue.flush()
    assert queue.peak_bytes == 1000
    queue.close()


def test_an_error_ends_the_work_and_reaches_whoever_comes_next() -> None:
    queue, done, gate = work_queue(1 << 20), list[int](), threading.Event()

    def fail() -> None:
        gate.wait()
        raise ValueError("full")

    queue.put(fail)
    queue.put(lambda: done.append(1))
    gate.set()
    later = (lambda: queue.put(lambda: None), lambda: queue.put_reserved(lambda: None, 0))
    for call in (queue.flush, queue.flush, *later, lambda: queue.reserve(1)):
        with pytest.raises(ValueError, match="full"):
            call()
    queue.close()
    assert not done


def test_closing_finishes_what_is_queued() -> None:
    queue, done = work_queue(1 << 20), list[int]()

    def slow(i: int) -> None:
        time.sleep(0.01)
        done.append(i)

    for i in range(5):
        queue.put(partial(slow, i))
    for i in range(5, 10):
        queue.put(partial(time.sleep, 0.001), then=partial(done.append, i))
    queue.close()
    assert done == list(range(10))
    work_queue(1).close()


def test_what_follows_is_done_in_order_while_the_next_is_worked_on() -> None:
    queue, done, gate = work_queue(1 << 20), list[str](), threading.Event()

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
    queue, gate = work_queue(100), threading.Event()
    queue.put(lambda: None, 60, then=lambda: gate.wait(10) and None)
    threading.Timer(0.2, gate.set).start()
    queue.put(lambda: None, 60)
    assert gate.is_set()
    queue.flush()
    assert queue.peak_bytes == 60
    assert queue.followed_s > 0.1
    queue.close()


def test_an_error_in_what_follows_ends_the_work() -> None:
    queue, done = work_queue(1 << 20), list[int]()

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
    queue, done = work_queue(1 << 20), list[int]()

    def fail() -> None:
        raise ValueError("broken")

    queue.put(fail, then=lambda: done.append(1))
    with pytest.raises(ValueError, match="broken"):
        queue.flush()
    queue.close()
    assert not done


def test_what_was_worked_on_meanwhile_follows_together() -> None:
    is_followed, is_worked, may_go_on = (threading.Event() for _ in range(3))
    seen = list[list[int]]()

    def follow(numbers: Sequence[int]) -> None:
        seen.append(list(numbers))
        is_followed.set()
        assert may_go_on.wait(10)

    queue = WorkQueue(1 << 30, follow)
    queue.put(lambda: None, 10, then=0)
    assert is_followed.wait(10)
    for number, num_bytes in enumerate((1, 1 << 23, (1 << 23) - 1, 1, 1 << 25, 1), start=1):
        queue.put(lambda: None, num_bytes, then=number)
    queue.put(is_worked.set)
    assert is_worked.wait(10)
    may_go_on.set()
    queue.flush()
    assert seen == [[0], [1, 2, 3], [4], [5], [6]], "up to 16 MiB, or one of any size"
    queue.close()


def test_without_a_thread_of_its_own_the_caller_does_the_work() -> None:
    queue, found = work_queue(1 << 20, works_beside=False), list[tuple[int, str]]()

    def look(i: int) -> None:
        found.append((i, threading.current_thread().name))

    for i in range(3):
        queue.put(partial(look, i), 10, then=partial(look, i))
    here = threading.current_thread().name
    assert [work for work in found if work[1] == here] == [(i, here) for i in range(3)]
    queue.flush()
    assert [work for work in found if work[1] != here] == [(i, "capture-disk") for i in range(3)]
    assert queue.num_bytes == 0
    queue.close()


def test_the_caller_gets_the_error_of_its_own_work_at_once_and_alone() -> None:
    queue, done = work_queue(1 << 20, works_beside=False), list[int]()

    def fail() -> None:
        raise ValueError("full")

    with pytest.raises(ValueError, match="full"):
        queue.put(fail, 10, then=lambda: done.append(0))
    assert queue.num_bytes == 0
    queue.put(lambda: done.append(1), 10, then=lambda: done.append(2))
    queue.flush()
    assert done == [1, 2]
    queue.close()


def test_an_error_in_what_follows_the_callers_work_reaches_whoever_comes_next() -> None:
    queue, done = work_queue(1 << 20, works_beside=False), list[int]()

    def fail() -> None:
        raise ValueError("full")

    queue.put(lambda: done.append(1), then=fail)
    with pytest.raises(ValueError, match="full"):
        queue.flush()
    with pytest.raises(ValueError, match="full"):
        queue.put(lambda: done.append(2), then=lambda: done.append(3))
    queue.close()
    assert done == [1]

"""Torch's threads, and background threads beside training."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from quantexp.processes.threads import NICE, started_beside, threads


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_threads_are_fewer_for_a_while_and_never_more() -> None:
    with threads(1):
        assert torch.get_num_threads() == 1
        with threads(99):
            assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


def test_a_thread_beside_training_works_alone_and_others_as_before() -> None:
    counts, has_started = list[int](), threading.Event()

    def work() -> None:
        has_started.wait()
        counts.append(torch.get_num_threads())

    beside = started_beside(work, "beside")
    assert torch.get_num_threads() == 2
    has_started.set()
    beside.join()
    later = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert counts == [1, 2]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux lists a process's threads")
def test_a_thread_beside_training_gets_no_helpers() -> None:
    def tasks() -> set[str]:
        return {path.name for path in Path("/proc/self/task").iterdir()}

    def helpers(started: Callable[[Callable[[], object], str], threading.Thread]) -> int:
        """The number of threads that a long operation starts."""
        new_tasks = list[set[str]]()

        def work() -> None:
            before = tasks()
            torch.ones(1 << 20).add_(1)
            new_tasks.append(tasks() - before)

        started(work, "work").join()
        return len(new_tasks[0])

    def common(work: Callable[[], object], name: str) -> threading.Thread:
        thread = threading.Thread(target=work, name=name)
        thread.start()
        return thread

    assert helpers(common) == 1
    assert helpers(started_beside) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux")
def test_a_thread_beside_training_has_low_priority() -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    priorities = list[int]()
    started_beside(lambda: priorities.append(priority()), "beside").join()
    assert priorities == [min(19, priority() + NICE)]

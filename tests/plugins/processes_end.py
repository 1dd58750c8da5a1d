"""What a test starts ends with it, also if the test fails: processes that are left after a test are killed.

They are all processes that inherited the test's mark in their environment, however far they have detached themselves,
and children of this process that were started without it. Fixtures of a wider scope start theirs before the mark of a
test is set; what is left of those is killed with the session. Pools that tests share end with this process by
themselves.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

#: The environment variable with the mark.
MARK = "QUANTEXP_TEST"
#: Words in the command lines of pools that tests share.
_POOLS = ("multiprocessing", "torch/_inductor", "tests.proof.lies.ranks")
_tests = itertools.count()


@pytest.fixture(scope="session", autouse=True)
def _end_with_the_session() -> Iterator[str]:
    os.environ[MARK] = mark = f"{os.getpid()}."
    yield mark
    end_processes(mark, set())


@pytest.fixture(autouse=True)
def _end_with_the_test(_end_with_the_session: str) -> Iterator[None]:
    before = set(psutil.pids())
    os.environ[MARK] = mark = f"{_end_with_the_session}{next(_tests)}."
    yield
    os.environ[MARK] = _end_with_the_session
    end_processes(mark, before)


def end_processes(mark: str, but: set[int]) -> None:
    """Kill the processes whose mark begins with this one, and this process's children without any, until all ended."""
    for _ in range(1000):
        left = [pid for pid in psutil.pids() if pid not in but and _is_left(pid, mark)]
        if not left:
            return
        for pid in left:
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                for each in (*process.children(recursive=True), process):
                    with suppress(psutil.Error):
                        each.kill()
        time.sleep(0.01)


def _is_left(pid: int, mark: str) -> bool:
    try:
        process = psutil.Process(pid)
        own = process.environ().get(MARK)
        is_ours = process.ppid() == os.getpid() if own is None else own.startswith(mark)
        if not is_ours or process.status() == psutil.STATUS_ZOMBIE:
            return False
        return not any(pool in word for word in process.cmdline() for pool in _POOLS)
    except psutil.Error:
        return False  # it has ended, or is another user's

"""Workers must be able to import their work, so these tests let them evaluate expressions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator, Iterator

import psutil
import pytest
import torch

from quantexp.analysis.pool import Pool
from quantexp.errors import CaptureError

PROCESS = "(__import__('os').getpid(), __import__('torch').get_num_threads())"
MISSING = "__import__('os').stat('/nowhere')"
DEATH = "__import__('os').kill(__import__('os').getpid(), 9)"


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Two workers; starting them takes seconds."""
    both = Pool(2)
    yield both
    both.close()


def test_results_come_in_order_and_errors_in_their_place(pool: Pool) -> None:
    items = [f"{number}**2" for number in range(20)]
    items[5] = MISSING
    results = list(pool.each(eval, items))
    assert [item for item, _ in results] == items
    assert isinstance(results[5][1], FileNotFoundError)
    assert [results[n][1] for n in range(20) if n != 5] == [n * n for n in range(20) if n != 5]


def test_workers_are_other_processes_with_one_thread_each(pool: Pool) -> None:
    results = [result for _, result in pool.each(eval, [PROCESS] * 4)]
    assert len(results) == 4
    for process, num_threads in results:  # type: ignore[misc]
        assert process != os.getpid()
        assert num_threads == 1


def test_work_is_handed_out_only_a_few_pieces_ahead(pool: Pool) -> None:
    numbers = []

    def items() -> Iterator[str]:
        for number in range(1000):
            numbers.append(number)
            yield str(number)

    results = pool.each(eval, items())
    next(results)
    assert isinstance(results, Generator)
    results.close()
    assert len(numbers) < 20


def test_work_that_ends_its_worker_fails_alone_and_the_rest_continues(pool: Pool) -> None:
    items = ["1", DEATH, "2", "3", DEATH, *map(str, range(4, 14))]
    results = list(pool.each(eval, items))
    assert [item for item, _ in results] == items
    for item, result in results:
        if item == DEATH:
            assert isinstance(result, CaptureError)
            assert "a worker process died with it, out of memory perhaps" in str(result)
            assert str(result).endswith("try it with --jobs 1")
        else:
            assert result == int(item)
    assert list(pool.each(eval, ["3"])) == [("3", 3)]


def test_with_one_job_this_process_does_the_work_and_keeps_its_threads() -> None:
    before = torch.get_num_threads()
    results = list(Pool(1).each(eval, [PROCESS, MISSING]))
    assert results[0][1] == (os.getpid(), 1)
    assert isinstance(results[1][1], OSError)
    assert torch.get_num_threads() == before


KILLED = """\
import os
from quantexp.analysis.pool import Pool
if __name__ == "__main__":
    (_, pid), = Pool(2).each(eval, ["__import__('os').getpid()"])
    print(pid, flush=True)
    os.kill(os.getpid(), 9)
"""


def test_workers_end_with_a_killed_process() -> None:
    process = subprocess.run([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, check=False)
    assert process.returncode == -9, "the pipe is closed: no worker holds it"
    _, alive = psutil.wait_procs(
        [psutil.Process(pid) for pid in [int(process.stdout)] if psutil.pid_exists(pid)], 120
    )
    assert not alive

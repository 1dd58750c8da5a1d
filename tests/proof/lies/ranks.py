"""Processes that serve every run of several ranks, one after another: Megatron is imported once in each.

    python -m tests.proof.lies.ranks RANK        reads a line of JSON for each run, answers with one

A rank that hangs, as where a fault lets the others wait for a collective, ends all of them; the next run has new ones.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from quantexp.launch.attempt import open_run
from quantexp.runs.ranks import RENDEZVOUS
from quantexp.schema import Experiment

_ROOT = Path(__file__).parents[3]
#: Seconds that a run may take, imports included.
_LIMIT_S = 150.0
_processes: list[subprocess.Popen[str]] = []


def trace_of_ranks(
    experiment: Experiment, fault: str | None, num_processes: int, *, proved: bool
) -> Any:
    """What rank 0 computed; the error is that of the first rank that the proof ended, or of the first that failed."""
    from .bench import Trace

    with open_run(experiment, "cpu", ["lies"]) as (opened, _):
        rendezvous = opened.run.root / "logs" / "rendezvous-of-lies"
        rendezvous.parent.mkdir(exist_ok=True)
        task = {
            "run": str(opened.run.root),
            "fault": fault,
            "proved": proved,
            "rendezvous": str(rendezvous),
            "world": num_processes,
        }
        try:
            answers = _answers(task, num_processes)
        except TimeoutError as error:
            _end()
            return Trace([], "", "TimeoutError", str(error))
    traces = [Trace(**answer) for answer in answers]
    ended = [each for each in traces if each.is_caught] + [each for each in traces if each.error]
    first = ended[0] if ended else traces[0]
    weights = "".join(each.weights for each in traces)
    numbers = [
        [*lines[0][:3], "".join(str(line[3]) for line in lines)]
        for lines in zip(*(_padded(each.numbers, traces) for each in traces), strict=True)
    ]
    fired = sum(each.fired for each in traces)
    return Trace(numbers, weights, first.error, first.reason, fired, traces[0].seconds)


def _padded(numbers: list[list[Any]], traces: list[Any]) -> list[list[Any]]:
    """A rank's lines; rank 0 alone writes metrics, and an unproved rank has its own."""
    longest = max(len(each.numbers) for each in traces)
    return numbers + [[None] * 4] * (longest - len(numbers))


def _answers(task: dict[str, Any], number: int) -> list[dict[str, Any]]:
    if len(_processes) < number or any(process.poll() is not None for process in _processes):
        _end()
        _processes.extend(_started(rank) for rank in range(number))
    for process in _processes[:number]:
        assert process.stdin is not None
        process.stdin.write(json.dumps(task) + "\n")
        process.stdin.flush()
    deadline = time.monotonic() + _LIMIT_S
    return [_line(process, deadline) for process in _processes[:number]]


def _line(process: subprocess.Popen[str], deadline: float) -> dict[str, Any]:
    """The next answer.

    Raises:
        TimeoutError: there is none in time, or the process ended.
    """
    stream: IO[str] | None = process.stdout
    assert stream is not None
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            if selector.select(1.0):
                line = stream.readline()
                if not line:
                    raise TimeoutError(f"a rank ended with code {process.wait()}")
                answer: dict[str, Any] = json.loads(line)
                return answer
    raise TimeoutError(f"a rank gave no answer in {_LIMIT_S:g} s")


def _started(rank: int) -> subprocess.Popen[str]:
    root = Path(sys.modules["quantexp"].__file__ or "").parents[1]
    path = os.pathsep.join([str(root), str(root / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.proof.lies.ranks", str(rank)],
        cwd=root,
        env={**os.environ, **own, "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


@atexit.register
def _end() -> None:
    for process in _processes:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            with suppress(OSError):
                if stream is not None:
                    stream.close()
    _processes.clear()


def serve() -> None:
    """Run every task that arrives."""
    from quantexp.config.load import read
    from quantexp.runs.paths import RunDir
    from quantexp.runs.ranks import own_rank

    from .bench import work
    from .faults import FAULTS
    from .planting import Planter

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else may write between the answers
    for line in sys.stdin:
        task = json.loads(line)
        os.environ |= {"WORLD_SIZE": str(task["world"]), RENDEZVOUS: task["rendezvous"]}
        run = RunDir(Path(task["run"]))
        planter = None if task["fault"] is None else Planter(FAULTS[task["fault"]])
        rank = own_rank(task["world"])
        trace = work(run, read(run.config), rank, planter, proved=task["proved"])
        answers.write(json.dumps(asdict(trace)) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()

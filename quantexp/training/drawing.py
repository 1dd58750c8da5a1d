"""The process that draws a run and writes its report: a rank imports nothing of the figures.

It is `python -m quantexp.analysis.after_run RUN_DIR DRAWING`, and serves requests: a word on its standard input, a line
of JSON on its standard output. It imports torch and matplotlib first, which takes seconds. For a short run it starts
with the rank and imports beside it; a long run saves the memory, and starts it with the first request. Where a rank is
a fork of a process that has imported all of this, `fork_early` has it be a fork, too. It ends with the rank. Ctrl-C and
SLURM's warning before the time limit do not reach it: the rank decides what these end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from quantexp.processes.with_parent import end_with_parent
from quantexp.runs.outcome import by_signal
from quantexp.runs.paths import RunDir
from quantexp.schema import AutoDraw, Experiment

#: The module that draws; it is in a room that a rank does not import.
AFTER_RUN = "quantexp.analysis.after_run"
#: The most iterations of a short run.
SHORT = 100


@dataclass(frozen=True)
class Failure:
    """Why something was not drawn."""

    #: In one line.
    reason: str
    #: Empty if its process died.
    traceback: str


class Drawing:
    """The figures and the report of a run, made by another process."""

    def __init__(self, run: RunDir, experiment: Experiment) -> None:
        words = [str(run.root), experiment.analysis.drawing.value]
        self._command = [sys.executable, "-m", AFTER_RUN, *words]
        threads = experiment.launcher.num_threads
        self._variables = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        self._process: subprocess.Popen[str] | _Fork | None = None
        is_drawn = experiment.analysis.drawing is not AutoDraw.nothing
        self._starts_early = is_drawn and experiment.training.iterations <= SHORT

    def prepare(self) -> None:
        """Start the process of a short run, so that it has imported what it needs when it is asked."""
        if self._starts_early:
            with contextlib.suppress(OSError):  # `make` tries again, and tells the failure
                self._process = self._started()

    def make(self, what: str) -> Failure | None:
        """Make `figures` or `report`; returns the failure."""
        try:
            process = self._process = self._process or self._started()
        except OSError as error:
            return Failure(f"the process that draws cannot be started: {error.strerror}", "")
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended
            process.stdin.write(f"{what}\n")
            process.stdin.flush()
        answer = process.stdout.readline()
        if answer.endswith("\n"):
            failure = json.loads(answer)
            return None if failure is None else Failure(*failure)
        code = process.wait()
        how = by_signal(code) if code < 0 else f"ended with exit code {code}"
        return Failure(f"the process that draws {how}", "")

    def _started(self) -> subprocess.Popen[str] | _Fork:
        if _EARLY:
            fork = _EARLY.pop()
            fork.begin(self._command, self._variables)
            return fork
        # SLURM warns every process of a job before its time limit, which would end this one: it inherits the mask.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
        try:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                process_group=0,
                env=os.environ | self._variables,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


class _Fork:
    """The process as a fork of this one, with those parts of `subprocess.Popen` that `Drawing` takes."""

    def __init__(self, own: Sequence[int], show_as: Callable[[Sequence[str]], None]) -> None:
        (requests, to_requests), (from_answers, answers) = os.pipe(), os.pipe()
        self._code: int | None = None
        self._pid = os.fork()
        if self._pid == 0:
            for fd in (to_requests, from_answers, *own):
                os.close(fd)
            _serve(requests, answers, show_as)
        os.close(requests)
        os.close(answers)
        self.stdin, self.stdout = os.fdopen(to_requests, "w"), os.fdopen(from_answers)

    def begin(self, command: list[str], variables: dict[str, str]) -> None:
        """Name the run, and the environment variables of its figures."""
        with contextlib.suppress(BrokenPipeError):  # it has ended, which `make` reports
            self.stdin.write(f"{json.dumps([command, variables])}\n")
            self.stdin.flush()

    def kill(self) -> None:
        if self._code is None:
            os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> int:
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self._code

    def communicate(self) -> None:
        self.wait()
        for stream in (self.stdin, self.stdout):
            with contextlib.suppress(OSError):
                stream.close()


#: The process that `fork_early` has started.
_EARLY: list[_Fork] = []


def fork_early(own: Sequence[int], show_as: Callable[[Sequence[str]], None]) -> None:
    """Start the process that draws as a fork of this one, which has no threads yet.

    Args:
        own: file descriptors of this process alone.
        show_as: shows a command line as that of the process that calls it.
    """
    _EARLY.append(_Fork(own, show_as))


def keep_threads() -> None:
    """Leave torch its threads in a fork of a process that had started none; without effect if it imported no torch."""
    kernels = sys.modules.get("quantexp.formats.kernels")
    if kernels is not None:
        kernels.keep_threads()


def _serve(requests: int, answers: int, show_as: Callable[[Sequence[str]], None]) -> None:
    """Become the process that draws, and end with it."""
    code = 1
    try:
        end_with_parent(None)
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
        os.dup2(requests, sys.stdin.fileno())
        os.dup2(answers, sys.stdout.fileno())
        os.close(requests)
        os.close(answers)
        keep_threads()
        if line := sys.stdin.readline():
            command, variables = json.loads(line)
            show_as(command)
            if number := variables.get("OMP_NUM_THREADS"):
                import_module("torch").set_num_threads(int(number))
            import_module(AFTER_RUN).main(command[3:])
        code = 0
    except BaseException:  # noqa: BLE001  (as Python would end)
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)

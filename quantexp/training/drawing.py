"""The process that draws a run and writes its report: a rank imports nothing of the figures.

It is `python -m quantexp.analysis.after_run RUN_DIR DRAWING`, and serves requests: a word on its standard input, a line
of JSON on its standard output. It imports torch and matplotlib first, which takes seconds. For a short run it starts
with the rank and imports beside it; a long run saves the memory, and starts it with the first request. It ends with the
rank. Ctrl-C and SLURM's warning before the time limit do not reach it: the rank decides what these end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass

from quantexp.runs.outcome import by_signal
from quantexp.runs.paths import RunDir
from quantexp.schema import AutoDraw, Experiment

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
        self._command = [sys.executable, "-m", "quantexp.analysis.after_run", *words]
        threads = experiment.launcher.num_threads
        self._variables = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        self._process: subprocess.Popen[str] | None = None
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

    def _started(self) -> subprocess.Popen[str]:
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

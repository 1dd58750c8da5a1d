"""Runs what is missing of a design: a process for each seed, as many at once as `launcher.max_parallel` says.

This process alone writes results.jsonl, a line as soon as a branch, or an arm's gradients, are whole.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from quantexp.config.load import save
from quantexp.errors import RunError
from quantexp.extras.resolve.design import BRANCHES, Branch, Design
from quantexp.extras.resolve.results import append, cut_incomplete
from quantexp.launch.duration import about
from quantexp.launch.recorded import recorded
from quantexp.processes import with_parent
from quantexp.runs.status import now
from quantexp.schema import LauncherConfig

LOGS = "logs"
#: Seconds between two lines about progress.
_REPORTED_S = 5.0
#: Seconds that processes have to end after a signal.
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Work:
    """What is to run."""

    #: Of the design; has results.jsonl, and `place` with a folder for each branch.
    folder: Path
    place: str
    launcher: LauncherConfig
    missing: Sequence[Branch]
    #: What all processes are told, and what each is told of a branch besides its name.
    task: Mapping[str, Any]
    told: Callable[[Branch], Mapping[str, Any]]
    #: The line of results.jsonl of what a process measured.
    line_of: Callable[[Branch, Mapping[str, Any]], Mapping[str, Any]]
    #: Its name in messages.
    noun: str = "branches"


def branches_work(design: Design, missing: Sequence[Branch]) -> Work:
    """The branches of a design that are missing."""
    return Work(
        design.folder,
        BRANCHES,
        design.launcher,
        missing,
        {
            "measure": "branch",
            "steps": list(design.steps),
            "sequences": design.sequences,
            "in_all": design.sequences_in_all,
        },
        lambda branch: {"first": branch.unit.first_sequence},
        lambda branch, content: line_of(design, branch, content),
    )


class Driver:
    """The processes of a design, and what they have done."""

    def __init__(self, work: Work, console: Console) -> None:
        self._work, self._missing, self._console = work, work.missing, console
        self._by_name = {branch.name: branch for branch in work.missing}
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[str]] = []
        self._done, self._begin, self._ends = 0, time.monotonic(), False
        self._reported = -_REPORTED_S

    def run(self) -> list[str]:
        """Run all branches; returns what went wrong in words, one for each failed proof.

        Raises:
            RunError: a seed's process ended without all its branches; those that are whole are kept.
            KeyboardInterrupt: the processes have ended.
        """
        folder = self._work.folder
        (folder / LOGS).mkdir(parents=True, exist_ok=True)
        cut_incomplete(folder)
        for branch in self._missing:
            branch.run.root.mkdir(parents=True, exist_ok=True)
            for old in (branch.run.metrics, branch.run.precision, branch.run.status):
                old.unlink(missing_ok=True)
            save(recorded(branch.experiment), branch.run.config)
        seeds = list(dict.fromkeys(branch.unit.base.seed for branch in self._missing))
        at_once = min(len(seeds), self._work.launcher.max_parallel or 1)
        with ThreadPoolExecutor(at_once) as pool:
            try:
                failures = list(pool.map(lambda seed: self._run_seed(seed, at_once), seeds))
            except BaseException:
                self._end()
                raise
        return [words for each in failures for words in each]

    def _end(self) -> None:
        self._ends = True
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()

    def _run_seed(self, seed: int, at_once: int) -> list[str]:
        if self._ends:
            return []
        own = [branch for branch in self._missing if branch.unit.base.seed == seed]
        log = self._work.folder / LOGS / f"seed{seed}.log"
        failures: list[str] = []
        left, error = len(own), ""
        with log.open("w") as stream, self._start(own, stream, at_once) as process:
            assert process.stdout is not None
            for line in process.stdout:
                content = json.loads(line)
                error = content.get("error", "")
                if not error:
                    failures += self._take(content)
                    left -= 1
            code = process.wait()
        if self._ends:
            return []
        if error:
            raise RunError(f"seed {seed}: {error}")
        if code or left:
            raise RunError(
                f"the process of seed {seed} ended with {left} of {len(own)} {self._work.noun} missing (exit code "
                f"{code}); see {log}, and give the same command again to go on"
            )
        return failures

    def _start(self, own: Sequence[Branch], log: Any, at_once: int) -> subprocess.Popen[str]:
        work = self._work
        launcher = work.launcher
        threads = launcher.num_threads or max(1, len(os.sched_getaffinity(0)) // at_once)
        variables = {"OMP_NUM_THREADS": str(threads), **os.environ}
        variables["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(work.folder.absolute()), os.environ.get("PYTHONPATH")])
        )
        variables[with_parent.PARENT] = str(os.getpid())
        process = subprocess.Popen(
            [sys.executable, "-m", "quantexp.extras.resolve.seed_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=variables,
        )
        self._processes.append(process)
        task = {
            **work.task,
            "folder": str(work.folder.absolute() / work.place),
            "branches": [{"name": branch.name, **work.told(branch)} for branch in own],
        }
        assert process.stdin is not None
        process.stdin.write(json.dumps(task))
        process.stdin.close()
        return process

    def _take(self, content: Mapping[str, Any]) -> list[str]:
        """Record a branch; returns its failure in words, if its proof failed."""
        branch = self._by_name[content["branch"]]
        with self._lock:
            append(self._work.folder, self._work.line_of(branch, content))
            self._done += 1
            self._report()
        if content["failure"] is None:
            return []
        return [f"{branch.name}, which counts as no unit: {content['failure']}"]

    def _report(self) -> None:
        """Print how far it is, at intervals."""
        left, passed = len(self._missing) - self._done, time.monotonic() - self._begin
        if left and passed - self._reported < _REPORTED_S:
            return
        self._reported = passed
        rest = f", {about(passed / self._done * left)} left" if left else ""
        self._console.print(
            f"{self._done} of {len(self._missing)} {self._work.noun}{rest}", markup=False
        )


def line_of(design: Design, branch: Branch, content: Mapping[str, Any]) -> dict[str, Any]:
    """The line of results.jsonl of what a process measured of a branch."""
    unit = branch.unit
    return {
        "branch": branch.name,
        "run": str(unit.base.run.root),
        "seed": unit.base.seed,
        "checkpoint": unit.checkpoint,
        "scheme": branch.arm.name,
        "control": branch.arm.control,
        "steps": list(design.steps),
        "held_out": [unit.first_sequence, design.sequences],
        "code": design.code,
        "time": now(),
        **{key: content[key] for key in ("working_loss", "scheme_loss", "skipped", "cpu_s")},
        "failure": content["failure"],
    }

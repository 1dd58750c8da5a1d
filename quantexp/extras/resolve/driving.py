"""Runs the branches that are missing: a process for each seed, as many at once as `launcher.max_parallel` says.

This process alone writes results.jsonl, a line as soon as a branch is whole.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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

LOGS = "logs"
#: Seconds between two lines about progress.
_REPORTED_S = 5.0
#: Seconds that processes have to end after a signal.
_PATIENCE_S = 10.0


class Driver:
    """The processes of a design, and what they have done."""

    def __init__(self, design: Design, missing: Sequence[Branch], console: Console) -> None:
        self._design, self._missing, self._console = design, missing, console
        self._by_name = {branch.name: branch for branch in missing}
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
        folder = self._design.folder
        (folder / LOGS).mkdir(parents=True, exist_ok=True)
        cut_incomplete(folder)
        for branch in self._missing:
            branch.run.root.mkdir(parents=True, exist_ok=True)
            for old in (branch.run.metrics, branch.run.precision, branch.run.status):
                old.unlink(missing_ok=True)
            save(recorded(branch.experiment), branch.run.config)
        seeds = list(dict.fromkeys(branch.unit.base.seed for branch in self._missing))
        at_once = min(len(seeds), self._design.launcher.max_parallel or 1)
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
        log = self._design.folder / LOGS / f"seed{seed}.log"
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
                f"the process of seed {seed} ended with {left} of {len(own)} branches missing (exit code {code}); see "
                f"{log}, and give the same command again to go on"
            )
        return failures

    def _start(self, own: Sequence[Branch], log: Any, at_once: int) -> subprocess.Popen[str]:
        design = self._design
        launcher = design.launcher
        threads = launcher.num_threads or max(1, len(os.sched_getaffinity(0)) // at_once)
        variables = {"OMP_NUM_THREADS": str(threads), **os.environ}
        variables["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(design.folder.absolute()), os.environ.get("PYTHONPATH")])
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
            "folder": str(design.folder.absolute() / BRANCHES),
            "steps": list(design.steps),
            "sequences": design.sequences,
            "in_all": design.sequences_in_all,
            "branches": [{"name": b.name, "first": b.unit.first_sequence} for b in own],
        }
        assert process.stdin is not None
        process.stdin.write(json.dumps(task))
        process.stdin.close()
        return process

    def _take(self, content: Mapping[str, Any]) -> list[str]:
        """Record a branch; returns its failure in words, if its proof failed."""
        branch = self._by_name[content["branch"]]
        with self._lock:
            append(self._design.folder, line_of(self._design, branch, content))
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
        self._console.print(f"{self._done} of {len(self._missing)} branches{rest}", markup=False)


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

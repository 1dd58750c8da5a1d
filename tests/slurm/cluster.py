"""One of the two SLURM clusters that setup.sh starts, as tests use it.

Each call is a real SLURM command with a time limit, because a client whose server is away waits for minutes. A
job's state comes from slurmctld (`scontrol show job`), which both kinds of cluster have.
"""

from __future__ import annotations

import getpass
import os
import re
import subprocess
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

SETUP = Path(__file__).with_name("setup.sh")
KINDS = ("accounting", "plain")
NODES = ("n1", "n2")


@dataclass(frozen=True)
class Cluster:
    """A running cluster."""

    #: accounting or plain.
    kind: str
    #: Its configuration file: all that SLURM's commands need to find it.
    slurm_conf: Path

    def env(self) -> dict[str, str]:
        """This process's environment, for a command that uses this cluster."""
        return {**os.environ, "SLURM_CONF": str(self.slurm_conf)}

    def call(
        self, *words: str, stdin: str = "", within_s: float = 30
    ) -> subprocess.CompletedProcess[str]:
        """Run any command in the cluster's environment, whatever its exit code is.

        Raises subprocess.TimeoutExpired after `within_s`.
        """
        return subprocess.run(
            words,
            env=self.env(),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
        )

    def _output(self, *words: str, stdin: str = "") -> str:
        process = self.call(*words, stdin=stdin)
        assert process.returncode == 0, (
            f"{' '.join(words)} exits {process.returncode}: {process.stderr.strip()}"
        )
        return process.stdout

    def scontrol(self, *words: str) -> str:
        """The output of scontrol; an exit code other than 0 fails the test."""
        return self._output("scontrol", *words)

    def squeue(self, *words: str) -> str:
        """The output of squeue, without its header."""
        return self._output("squeue", "--noheader", *words)

    def sacct(self, *words: str) -> str:
        """The output of sacct, without its header, fields between bars; only the kind `accounting` has it."""
        return self._output("sacct", "--noheader", "--parsable2", *words)

    def sbatch(self, script: str, *options: str) -> str:
        """Submit the lines of a bash script and return the job's id."""
        return self._output(
            "sbatch", "--parsable", *options, stdin=f"#!/bin/bash\n{script}\n"
        ).strip()

    def jobs(self, job_id: str) -> list[dict[str, str]]:
        """slurmctld's records of a job: one for each task of an array, one for all pending tasks; none once forgotten.

        A value ends at the next ` Word=`, so that one with blanks (a command line, a reason) stays whole.
        """
        process = self.call("scontrol", "show", "job", "--oneliner", job_id)
        if process.returncode != 0:
            assert "Invalid job id specified" in process.stderr, process.stderr
            return []
        return [
            dict(re.findall(r"(\S+?)=(.*?)(?= \S+?=| *$)", line))
            for line in process.stdout.splitlines()
            if line
        ]

    def states(self, job_id: str) -> dict[str, str]:
        """State by id (`12`, of an array's tasks `12_0`, `12_1`); empty once the cluster has forgotten the job."""
        states = {}
        for job in self.jobs(job_id):
            if "ArrayTaskId" in job:
                for task in _tasks(job["ArrayTaskId"]):
                    states[f"{job['ArrayJobId']}_{task}"] = job["JobState"]
            else:
                states[job["JobId"]] = job["JobState"]
        return states

    def wait_state(
        self, job_id: str, states: str | Collection[str], within_s: float = 30
    ) -> dict[str, str]:
        """Wait until every task of the job is in one of these states and return them; fail after `within_s`."""
        wanted = {states} if isinstance(states, str) else set(states)
        end = time.monotonic() + within_s
        while True:
            now = self.states(job_id)
            if now and set(now.values()) <= wanted:
                return now
            late = f"job {job_id} is not {sorted(wanted)} after {within_s} s"
            assert time.monotonic() < end, f"{late}: {self.jobs(job_id)}"
            time.sleep(0.1)

    def start_now(self, job_id: str) -> None:
        """Let a requeued job start in a second, instead of after SLURM's delay of two minutes.

        In the second in which its last run was killed the node would refuse it (`Job credential revoked`).
        """
        time.sleep(1.5)
        self.scontrol("update", f"jobid={job_id}", "starttime=now")

    def down_node(self, node: str) -> None:
        """Take a node out of service as the controller does for a dead one; SLURM requeues its jobs."""
        self._output(str(SETUP), "down-node", self.kind, node)

    def kill_node(self, node: str) -> None:
        """Kill the node's slurmd, as a crash would; the controller notices half a minute later.

        The tasks of its jobs run on, even beside the job's next run: the controller cannot end what it cannot reach.
        """
        self._output(str(SETUP), "kill-node", self.kind, node)

    def start_node(self, node: str) -> None:
        """Start the node's slurmd if it is not running and put the node back into service."""
        self._output(str(SETUP), "start-node", self.kind, node)

    def cancel_all(self) -> None:
        """Cancel every job and wait until the last has left its node."""
        user = f"--user={getpass.getuser()}"
        # Pending jobs first, or they take the freed nodes.
        self._output("scancel", "--quiet", "--state=PENDING", user)
        self._output("scancel", "--quiet", user)
        end = time.monotonic() + 60
        while jobs := self.squeue():
            assert time.monotonic() < end, f"jobs do not end:\n{jobs}"
            time.sleep(0.1)

    def restore(self) -> None:
        """Cancel all jobs and put every node into service."""
        self.cancel_all()
        for node in NODES:
            self.start_node(node)


def find(kind: str) -> Cluster | None:
    """The cluster of this kind, if it is running."""
    conf = Path(os.environ.get("QUANTEXP_SLURM_DIR", "/tmp/quantexp-slurm")) / kind / "slurm.conf"
    cluster = Cluster(kind, conf)
    if not conf.exists():
        return None
    try:
        ping = cluster.call("scontrol", "ping", within_s=10)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return cluster if ping.returncode == 0 else None


def _tasks(text: str) -> list[int]:
    """The tasks of SLURM's `1`, `4-7%2`, `1,3,5-9:2`."""
    tasks: list[int] = []
    for part in text.partition("%")[0].split(","):
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        tasks.extend(range(int(first), int(last or first) + 1, int(step or 1)))
    return tasks

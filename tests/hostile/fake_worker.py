"""A worker without a model: writes what a worker writes, and waits at one moment for a signal.

`python fake_worker.py RUN MOMENT` is a worker; with `--ranks N` it is a torchrun with N of them. At MOMENT
(`importing`, `training`, `drawing`) a worker creates `at-RANK` in the run folder and waits. It ends on a signal as the
real one does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from quantexp.processes.with_parent import end_with_parent, ended_command, parent_from
from quantexp.runs.paths import RunDir
from quantexp.runs.ranks import RankRecord, end_record, write_record
from quantexp.runs.status import INTERRUPTED, Phase, State, finish, now, read_status, write_status

#: Seconds until torchrun kills what does not end (30 in the real one).
KILL_S = 1.0


class Worker:
    def __init__(self, run: RunDir, moment: str) -> None:
        self.run, self.moment = run, moment
        self.rank, self.size = (
            int(os.environ.get(name, d)) for name, d in (("RANK", "0"), ("WORLD_SIZE", "1"))
        )
        self.status = read_status(run.status)
        self.ending = False

    def begin(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self.interrupt)
        end_with_parent(parent_from(os.environ))
        assert self.status is not None
        self.status.state, self.status.started = State.RUNNING, now()
        self.status.host, self.status.pid = os.uname().nodename, os.getpid()
        self.set(Phase.IMPORTING)
        self.record(RankRecord(os.getpid()))
        self.wait("importing")
        self.status.current_iteration, self.status.micro_batch, self.status.micro_batches = 3, 2, 4
        self.set(Phase.TRAINING)
        self.wait("training")
        self.status.trained = now()
        self.set(Phase.DRAWING)
        self.wait("drawing")
        self.end(State.COMPLETED, "", 0)

    def wait(self, moment: str) -> None:
        if moment == self.moment:
            (self.run.root / f"at-{self.rank}").touch()
            while not (self.run.root / "go-on").exists():
                time.sleep(0.05)

    def set(self, phase: Phase) -> None:
        assert self.status is not None
        self.status.phase = phase
        if self.rank == 0:
            write_status(self.run.status, self.status)

    def record(self, record: RankRecord) -> None:
        if self.size > 1:
            write_record(self.run, self.rank, record)

    def interrupt(self, signum: int, frame: object) -> None:
        if self.ending:
            return
        command = None if signum == signal.SIGINT else ended_command(os.environ)
        if command is not None:
            why = f"its quantexp command, process {command}, ended without ending it (killed?)"
            self.end(State.PREEMPTED, why, 130)
        self.end(State.CANCELLED, INTERRUPTED, 130, f"ended by {signal.Signals(signum).name}")

    def end(self, state: State, reason: str, code: int, in_record: str | None = None) -> None:
        self.ending = True
        assert self.status is not None
        finish(self.status, state, reason)
        self.record(end_record(state, in_record or reason))
        if self.rank == 0:
            write_status(self.run.status, self.status)
        os._exit(code)


def torchrun(run: str, moment: str, num_ranks: int) -> int:
    """Start the ranks; end all of them if one fails, or on a signal."""
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, run, moment],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(num_ranks)},
        )
        for rank in range(num_ranks)
    ]

    def stop(number: int = signal.SIGTERM) -> None:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)
        until = time.monotonic() + KILL_S
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < until:
            time.sleep(0.02)
        for rank in ranks:
            rank.kill()

    def signalled(signum: int, frame: object) -> None:
        stop(signum)
        sys.stderr.write(f"SignalException: Process {os.getpid()} got signal: {signum}\n")
        os._exit(1)

    signal.signal(signal.SIGTERM, signalled)
    while True:
        codes = [rank.poll() for rank in ranks]
        if all(code == 0 for code in codes):
            return 0
        if any(codes):
            stop()
            sys.stderr.write("Root Cause (first observed failure):\n")
            return 1
        time.sleep(0.1)


if __name__ == "__main__":
    words = sys.argv[1:]
    if "--ranks" in words:
        os.environ["QUANTEXP_PARENT"] = str(os.getpid())
        sys.exit(torchrun(words[0], words[1], int(words[words.index("--ranks") + 1])))
    Worker(RunDir(Path(words[0])), words[1]).begin()

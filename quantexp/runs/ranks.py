"""The rank of this process, from torchrun's environment, and each rank's record of its end.

A run of several processes has one `status.json`, which rank 0 writes. Each rank also writes `logs/rankN.json` (process
id, state, reason), from which the launcher determines which rank failed first: when one rank fails, the others fail
too, with errors that only name a lost peer.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from quantexp.errors import RunError
from quantexp.runs.paths import RunDir
from quantexp.runs.status import INTERRUPTED, State, now, write_json

#: Number of a log's last lines that a failure shows.
LOG_LINES = 12


@dataclass(frozen=True)
class Rank:
    """One process of a run; the default is a run of one process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @property
    def leads(self) -> bool:
        """Whether this process writes the files that a run has once."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether the run has one process."""
        return self.world_size == 1


def own_rank(num_processes: int) -> Rank:
    """This process's rank, from RANK, WORLD_SIZE and LOCAL_RANK.

    Raises:
        RunError: WORLD_SIZE differs from `num_processes`.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    values = [os.environ.get(name, default) for name, default in zip(names, "010", strict=True)]
    rank = Rank(*map(int, values))
    if rank.world_size != num_processes:
        raise RunError(
            f"this run is for launcher.num_processes={num_processes}, and was started with "
            f"WORLD_SIZE={rank.world_size}; start it with quantexp"
        )
    return rank


@dataclass(frozen=True)
class RankRecord:
    """The content of logs/rankN.json."""

    pid: int
    state: State = State.RUNNING
    reason: str = ""
    #: The failure was only that another rank stopped responding.
    lost_peer: bool = False
    finished: str | None = None


def write_record(run: RunDir, rank: int, record: RankRecord) -> None:
    """Replace logs/rankN.json."""
    run.logs.mkdir(exist_ok=True)
    write_json(run.rank_record(rank), asdict(record))


def end_record(state: State, reason: str, *, lost_peer: bool = False) -> RankRecord:
    """This process's record at its end."""
    return RankRecord(os.getpid(), state, reason, lost_peer, now())


def read_record(run: RunDir, rank: int) -> RankRecord | None:
    """A rank's record; None if the rank did not get as far as writing one."""
    try:
        content = json.loads(run.rank_record(rank).read_text())
    except FileNotFoundError:
        return None
    return RankRecord(**{**content, "state": State(content["state"])})


def outcome_of_ranks(run: RunDir, num_processes: int) -> tuple[State, str]:
    """State and reason of a run of several processes, from the records of its ranks.

    The first rank that failed by itself is the cause. If all failed ranks only lost a peer, the cause is a rank that
    has no record or no end in it. If every rank ended on a signal, the run is cancelled.
    """
    records = {rank: read_record(run, rank) for rank in range(num_processes)}
    failed = sorted(
        (record.finished or "", rank, record)
        for rank, record in records.items()
        if record is not None and record.state is State.FAILED
    )
    causes = [(rank, record) for _, rank, record in failed if not record.lost_peer]
    if causes:
        rank, record = causes[0]
        if all(other is not None and other.reason == record.reason for other in records.values()):
            return State.FAILED, record.reason
        return State.FAILED, f"rank {rank}: {record.reason}; {log_end(run.rank_log(rank))}"
    lost_peers = [f"rank {rank} then: {record.reason}; " for _, rank, record in failed[:1]]
    for rank, unfinished in records.items():
        if unfinished is None:
            return State.FAILED, f"rank {rank} did not start; {log_end(run.torchrun_log)}"
        if unfinished.state is State.RUNNING:
            return State.FAILED, (
                f"rank {rank} did not end by itself (killed, out of memory, or hanging); "
                f"{''.join(lost_peers)}{log_end(run.rank_log(rank))}"
            )
    if failed:
        _, rank, record = failed[0]
        return State.FAILED, f"rank {rank}: {record.reason}; {log_end(run.rank_log(rank))}"
    finished = [record for record in records.values() if record is not None]
    if all(record.state is State.COMPLETED for record in finished):
        return State.COMPLETED, finished[0].reason
    return State.CANCELLED, INTERRUPTED


def log_end(log: Path) -> str:
    """The last lines of a log below its name."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return "it left no log"
    return f"the end of {log}:\n" + "\n".join(lines[-LOG_LINES:])

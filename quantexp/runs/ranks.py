"""Which process of a run this is, from torchrun's environment, and what each process leaves about its end.

A run of several processes has one `status.json`, which rank 0 writes. Each rank also keeps `logs/rankN.json` (process
id, how it ended), so that the launcher can say afterwards which rank was the cause: a rank that fails pulls the others
down, whose errors only say that a peer is gone.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from quantexp.errors import RunError
from quantexp.runs.paths import RunDir
from quantexp.runs.status import INTERRUPTED, State, now, write_json

#: Lines of a rank's log that are shown with its failure.
LOG_LINES = 12


@dataclass(frozen=True)
class Rank:
    """One process of a run; alone where nothing else is said."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @property
    def leads(self) -> bool:
        """Whether this process writes what a run has once."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether the run is this one process."""
        return self.world_size == 1


def own_rank(num_processes: int) -> Rank:
    """This process's rank, from RANK, WORLD_SIZE and LOCAL_RANK.

    Raises:
        RunError: the environment has another number of processes than the run was configured for.
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
    """What logs/rankN.json holds."""

    pid: int
    state: State = State.RUNNING
    reason: str = ""
    #: The failure was only that another rank no longer answered.
    lost_peer: bool = False
    finished: str | None = None


def write_record(run: RunDir, rank: int, record: RankRecord) -> None:
    """Replace logs/rankN.json."""
    run.logs.mkdir(exist_ok=True)
    write_json(run.rank_record(rank), asdict(record))


def ended(state: State, reason: str, *, lost_peer: bool = False) -> RankRecord:
    """This process's record at its end."""
    return RankRecord(os.getpid(), state, reason, lost_peer, now())


def read_record(run: RunDir, rank: int) -> RankRecord | None:
    """A rank's record, or None where it did not get as far as that."""
    try:
        content = json.loads(run.rank_record(rank).read_text())
    except FileNotFoundError:
        return None
    return RankRecord(**{**content, "state": State(content["state"])})


def account(run: RunDir, num_processes: int) -> tuple[State, str]:
    """How a run of several processes that did not end well ended: its state, and the rank that was the cause.

    The first rank that failed by itself is the cause; where all only lost a peer, or were ended, it is the rank that
    left without a word; ranks that were all asked to end make the run cancelled.
    """
    records = {rank: read_record(run, rank) for rank in range(num_processes)}
    failed = sorted(
        (record.finished or "", rank, record)
        for rank, record in records.items()
        if record is not None and record.state is State.FAILED
    )
    own = [(rank, record) for _, rank, record in failed if not record.lost_peer]
    if own:
        rank, record = own[0]
        if all(other is not None and other.reason == record.reason for other in records.values()):
            return State.FAILED, record.reason
        return State.FAILED, f"rank {rank}: {record.reason}; {log_end(run.rank_log(rank))}"
    noticed = [f"rank {rank} then: {record.reason}; " for _, rank, record in failed[:1]]
    for rank, silent in records.items():
        if silent is None:
            return State.FAILED, f"rank {rank} did not start; {log_end(run.torchrun_log)}"
        if silent.state is State.RUNNING:
            return State.FAILED, (
                f"rank {rank} did not end by itself (killed, out of memory, or hanging); "
                f"{''.join(noticed)}{log_end(run.rank_log(rank))}"
            )
    if failed:
        _, rank, record = failed[0]
        return State.FAILED, f"rank {rank}: {record.reason}; {log_end(run.rank_log(rank))}"
    told = [record for record in records.values() if record is not None]
    if all(record.state is State.COMPLETED for record in told):
        return State.COMPLETED, told[0].reason
    return State.CANCELLED, INTERRUPTED


def log_end(log: Path) -> str:
    """The last lines of a log, with its name."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return "it left no log"
    return f"the end of {log}:\n" + "\n".join(lines[-LOG_LINES:])

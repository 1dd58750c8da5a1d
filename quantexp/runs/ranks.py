"""The rank of this process, from torchrun's environment, and each rank's record of its end.

A run of several processes has one `status.json`, which rank 0 writes. Each rank also writes `logs/rankN.json` (process
id, state, reason), from which the launcher determines which rank failed first: when one rank fails, the others fail
too, with errors that only name a lost peer.
"""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from quantexp.errors import RunError, UnreadableError
from quantexp.reading.files import open_file
from quantexp.reading.json_files import read_json
from quantexp.runs.paths import RunDir
from quantexp.runs.redaction import redacted_text
from quantexp.runs.status import INTERRUPTED, State, now, write_json

#: Number of a log's last lines that a failure shows.
LOG_LINES = 12
#: How many times `launcher.timeout_min` one of several ranks may wait: its own wait for another ends after once that.
RANK_MAY_WAIT = 2.0
#: The variable that names the file in which the ranks of one machine find each other.
RENDEZVOUS = "QUANTEXP_RENDEZVOUS"
#: Bytes at the end of a log that hold them.
END_BYTES = 1 << 16


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
    run.logs.mkdir(exist_ok=True, mode=0o700)
    write_json(run.rank_record(rank), asdict(record))


def end_record(
    state: State, reason: str, *, lost_peer: bool = False, finished: str | None = None
) -> RankRecord:
    """The record of a rank's end, now if no time is given; the reason has no secrets."""
    return RankRecord(os.getpid(), state, redacted_text(reason), lost_peer, finished or now())


def read_record(run: RunDir, rank: int) -> RankRecord | None:
    """A rank's record; None if the rank did not get as far as writing one.

    Raises:
        UnreadableError: the file cannot be read, or is not a record.
    """
    try:
        return read_json(run.rank_record(rank), RankRecord)
    except FileNotFoundError:
        return None


def outcome_of_ranks(run: RunDir, num_processes: int) -> tuple[State, str]:
    """State and reason of a run of several processes, from the records of its ranks.

    The reason has a line for each distinct cause, the first one first. Errors that only name a lost peer, and signals
    that followed another end, are no causes. If a rank has no end in its record and no other failed by itself, that
    rank is the cause. If every rank ended on a signal, the run is cancelled.
    """
    records = {rank: read_record(run, rank) for rank in range(num_processes)}
    known = {rank: record for rank, record in records.items() if record is not None}
    ends = sorted(
        ((rank, record) for rank, record in known.items() if record.state is not State.RUNNING),
        key=lambda end: end[1].finished or "",
    )
    failed = [(rank, each) for rank, each in ends if each.state is State.FAILED]
    causes = [(rank, each) for rank, each in failed if not each.lost_peer]
    signalled = [(rank, each) for rank, each in ends if each.state in _BY_SIGNAL]
    silent = [rank for rank, each in records.items() if each is None or each.state is State.RUNNING]
    if silent and not causes:
        words = [_silent(run, rank, has_record=rank in known) for rank in silent[:1]]
        return State.FAILED, _lines([*words, *_lost_peers(failed)])
    if signalled and (not failed or _ended_before(signalled[0][1], causes)):
        rank, record = signalled[0]
        if record.reason == INTERRUPTED or _torchrun_was_signalled(run):
            return State.CANCELLED, INTERRUPTED
        return State.CANCELLED, f"rank {rank} was {record.reason}"
    if failed:
        return State.FAILED, _lines(
            [*_distinct(run, causes or failed[:1], num_processes), *_lost_peers(failed, causes)]
        )
    return State.COMPLETED, known[0].reason


#: Reason of a rank that its launcher saw end without a record.
ENDED_SILENTLY = "did not end by itself (killed, out of memory, or hanging)"
_BY_SIGNAL = (State.CANCELLED, State.PREEMPTED)
#: The part of a reason that names a rank's own log, and what else differs between ranks with one cause.
_OWN = re.compile(r"; traceback in .*|\d+")


def _ended_before(record: RankRecord, causes: list[tuple[int, RankRecord]]) -> bool:
    return all((record.finished or "") < (cause.finished or "") for _, cause in causes)


def _torchrun_was_signalled(run: RunDir) -> bool:
    """Whether torchrun ended the ranks because it was ended itself, and not because one of them had ended."""
    try:
        return "Root Cause" not in run.torchrun_log.read_text(errors="replace")
    except OSError:
        return True


def _silent(run: RunDir, rank: int, *, has_record: bool) -> str:
    if not has_record:
        return f"rank {rank} did not start; {_last_line(run.torchrun_log)}"
    return f"rank {rank} {ENDED_SILENTLY}; {_last_line(run.rank_log(rank))}"


def _distinct(run: RunDir, causes: list[tuple[int, RankRecord]], num_processes: int) -> list[str]:
    """A line for each distinct reason."""
    groups: dict[str, list[tuple[int, RankRecord]]] = {}
    for rank, record in causes:
        groups.setdefault(_OWN.sub("", record.reason), []).append((rank, record))
    lines = []
    for group in groups.values():
        rank, record = group[0]
        ranks = [rank for rank, _ in group]
        if record.reason == ENDED_SILENTLY:
            lines.append(_silent(run, rank, has_record=True))
        elif len(ranks) == num_processes:
            lines.append(record.reason)
        else:
            log = "" if "; traceback in " in record.reason else f"; see {run.rank_log(rank)}"
            lines.append(f"{_named(ranks)}: {record.reason}{log}")
    return lines


def _lost_peers(
    failed: list[tuple[int, RankRecord]], causes: list[tuple[int, RankRecord]] | None = None
) -> list[str]:
    """One line for all ranks that then lost a peer; none if they are all that is known."""
    lost = [(rank, record) for rank, record in failed if record.lost_peer]
    if not lost or causes == []:
        return []
    return [f"{_named([rank for rank, _ in lost])} then: {lost[0][1].reason}"]


def _named(ranks: list[int]) -> str:
    """`rank 3`, `ranks 1, 2`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def _lines(lines: list[str]) -> str:
    return "\n".join(lines)


def _last_line(log: Path) -> str:
    """The last line of a log, with the log's path."""
    lines = _end_lines(log)
    if lines is None:
        return "it left no log"
    lines = [line for line in lines if line.strip()]
    return f"see {log}" + (f", which ends: {lines[-1].strip()}" if lines else "")


def log_end(log: Path) -> str:
    """The last lines of a log below its name."""
    lines = _end_lines(log)
    if lines is None:
        return "it left no log"
    return f"the end of {log}:\n" + "\n".join(lines[-LOG_LINES:])


def _end_lines(log: Path) -> list[str] | None:
    """The lines in the last `END_BYTES` of a log; None without a log that can be read."""
    try:
        with open_file(log) as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - END_BYTES))
            return stream.read(END_BYTES).decode(errors="replace").splitlines()
    except (OSError, UnreadableError):
        return None


def record_silent_end(run: RunDir, rank: int, reason: str, finished: str) -> None:
    """Record the end of a rank that could not do so itself; a recorded end stays."""
    record = read_record(run, rank)
    if record is not None and record.state is State.RUNNING:
        write_record(
            run, rank, replace(record, state=State.FAILED, reason=reason, finished=finished)
        )

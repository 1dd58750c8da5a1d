"""What a rank of a run printed, whole or as it grows.

Before the rank has a log of its own, what its job or torchrun printed stands in for it, each file under its name.
Following goes on across an attempt that was put back into the queue, whose log is moved away and begins anew, and ends
with the run.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from quantexp.errors import RunError
from quantexp.launch.ledger.standing import Standing, standing
from quantexp.launch.ledger.verdict import job_logs
from quantexp.runs.paths import RunDir

#: Seconds between two looks at a log that is followed.
POLL_S = 0.3
#: Seconds between two questions to the scheduler whether the run still lives.
ASK_S = 5.0

Write = Callable[[str], object]


def show_log(run: RunDir, rank: int, write: Write) -> None:
    """Write a rank's log, or what stands in for it.

    Raises:
        RunError: the run has no such rank, or nothing was printed yet.
    """
    _check_rank(run, rank)
    found = standing(run)
    if not _Reader(run, rank, write).more(found):
        raise RunError(_nothing(found))


def follow_log(run: RunDir, rank: int, write: Write) -> None:
    """Write a rank's log as it grows, until the run has ended.

    Raises:
        RunError: the run has no such rank, or has ended and nothing was printed.
    """
    _check_rank(run, rank)
    reader, found, asked = _Reader(run, rank, write), standing(run), time.monotonic()
    anything = reader.more(found)
    while found.alive:
        time.sleep(POLL_S)
        if found.status.submission is None or time.monotonic() - asked > ASK_S:
            found, asked = standing(run), time.monotonic()
        anything |= reader.more(found)
    if not anything:
        raise RunError(_nothing(found))


def _check_rank(run: RunDir, rank: int) -> None:
    ranks = _num_processes(run)
    if not 0 <= rank < ranks:
        known = "rank 0 alone" if ranks == 1 else f"ranks 0 to {ranks - 1}"
        raise RunError(f"--rank must be one of {run.root.name}, which has {known}, got {rank}")


def _num_processes(run: RunDir) -> int:
    """From the configuration, whatever version of quantexp wrote it."""
    try:
        return int(yaml.safe_load(run.config.read_text())["launcher"]["num_processes"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"{run.config} is not a run's configuration: {error!r}") from error


def _nothing(found: Standing) -> str:
    name = found.run.root.name
    if found.alive:
        return f"{name} has printed nothing yet ({found.where}); quantexp logs -f waits for it"
    return f"{name} has printed nothing: it is {found.state}" + (
        f" ({found.reason})" if found.reason else ""
    )


@dataclass
class _Place:
    """How far a file was read."""

    inode: int = -1
    offset: int = 0
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )


class _Reader:
    """Writes what is new in a rank's log, or in what stands in for it."""

    def __init__(self, run: RunDir, rank: int, write: Write) -> None:
        self._run, self._rank, self._write = run, rank, write
        self._places: dict[Path, _Place] = {}

    def more(self, found: Standing) -> bool:
        """Write what was added since the last look; whether anything was."""
        log = self._run.rank_log(self._rank)
        if log.exists():
            return self._more_of(log, "")
        job_id = found.job.id if found.job is not None else None
        files = [*job_logs(self._run, found.status, job_id), self._run.torchrun_log]
        return sum(self._more_of(file, f"==> {file} <==\n") for file in files) > 0

    def _more_of(self, file: Path, heading: str) -> bool:
        try:
            with file.open("rb") as stream:
                place, inode = self._places.get(file, _Place()), file.stat().st_ino
                if place.inode != inode or stream.seek(0, 2) < place.offset:
                    place = _Place(inode)  # another start's log
                stream.seek(place.offset)
                content = stream.read()
        except OSError:
            return False
        if not content:
            return False
        self._write((heading if place.offset == 0 else "") + place.decoder.decode(content))
        place.offset += len(content)
        self._places[file] = place
        return True

"""Prints the log of a rank, complete or following its growth.

Before the rank opens its log, the files that its launcher names are printed instead, each below its name.
Following continues across a requeue, which moves the log away and starts a new one, and stops when the run ends.
"""

from __future__ import annotations

import codecs
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from quantexp.errors import RunError, UnreadableError
from quantexp.launch.backend import Standing, kind_of, launcher_of
from quantexp.launch.ledger.standing import standing
from quantexp.reading.files import open_file
from quantexp.runs.paths import RunDir
from quantexp.runs.recorded_config import read_config
from quantexp.schema.launcher import LOCAL

#: Bytes that are read at once.
_PIECE = 1 << 20
#: Seconds between two reads of a followed log.
POLL_S = 0.3
#: Seconds between two queries of the scheduler about the run.
QUERY_S = 5.0

Write = Callable[[str], object]


def show_log(run: RunDir, rank: int, write: Write) -> None:
    """Write a rank's log, or the output of its job before there is one.

    Raises:
        RunError: the run has no such rank, or there is no output yet.
    """
    _check_rank(run, rank)
    current = standing(run)
    if not _Reader(run, rank, write).write_new(current):
        raise RunError(_no_output(current))


def follow_log(run: RunDir, rank: int, write: Write) -> None:
    """Write a rank's log as it grows, until the run ends.

    Raises:
        RunError: the run has no such rank, or has ended without output.
    """
    _check_rank(run, rank)
    reader, current, queried_at = _Reader(run, rank, write), standing(run), time.monotonic()
    has_output = reader.write_new(current)
    while current.alive:
        time.sleep(POLL_S)
        is_local = kind_of(current.status) == LOCAL
        if is_local or time.monotonic() - queried_at > QUERY_S:
            current, queried_at = standing(run), time.monotonic()
        has_output |= reader.write_new(current)
    if not has_output:
        raise RunError(_no_output(current))


def _check_rank(run: RunDir, rank: int) -> None:
    ranks = _num_processes(run)
    if not 0 <= rank < ranks:
        known = "rank 0 alone" if ranks == 1 else f"ranks 0 to {ranks - 1}"
        raise RunError(f"--rank must be one of {run.root.name}, which has {known}, got {rank}")


def _num_processes(run: RunDir) -> int:
    number = read_config(run).get("launcher", {}).get("num_processes")
    if number is None:
        raise RunError(
            f"{run.config} is not a run's configuration: it has no launcher.num_processes"
        )
    return int(number)


def _no_output(current: Standing) -> str:
    name = current.run.root.name
    if current.alive:
        return f"{name} has printed nothing yet ({current.where}); quantexp logs -f waits for it"
    return f"{name} has printed nothing: it is {current.state}" + (
        f" ({current.reason})" if current.reason else ""
    )


@dataclass
class _Position:
    """The read position in a file."""

    inode: int = -1
    offset: int = 0
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )


class _Reader:
    """Writes new output of a rank's log, or of its job before there is a log."""

    def __init__(self, run: RunDir, rank: int, write: Write) -> None:
        self._run, self._rank, self._write = run, rank, write
        self._positions: dict[Path, _Position] = {}

    def write_new(self, current: Standing) -> bool:
        """Write the output added since the last call; returns whether there was any.

        Raises:
            RunError: the logs are another user's.
        """
        log = self._run.rank_log(self._rank)
        try:
            is_there = log.exists()
        except PermissionError as error:
            raise RunError(
                f"{log.parent} is readable by its owner alone, who may share it by chmod"
            ) from error
        if is_there:
            return self._write_new_of(log, "")
        files = launcher_of(kind_of(current.status)).logs(current)
        return sum(self._write_new_of(file, f"==> {file} <==\n") for file in files) > 0

    def _write_new_of(self, file: Path, heading: str) -> bool:
        try:
            stream = open_file(file)
        except (OSError, UnreadableError):
            return False
        with stream:
            position, inode = (
                self._positions.get(file, _Position()),
                os.fstat(stream.fileno()).st_ino,
            )
            if position.inode != inode or stream.seek(0, 2) < position.offset:
                position = _Position(inode)  # the log of another start
            self._positions[file] = position
            stream.seek(start := position.offset)
            while content := _read(stream):
                self._write(heading * (position.offset == 0) + position.decoder.decode(content))
                position.offset += len(content)
        return position.offset > start


def _read(stream: BinaryIO) -> bytes:
    """The next bytes; none if the disk fails."""
    try:
        return stream.read(_PIECE)
    except OSError:
        return b""

"""A sweep's sheet: its runs in order, how each stands, and all that it takes to go on with it elsewhere.

`runs/sweeps/<time>.json` is written when every run folder is prepared, and again whenever a run has ended. With the
resolved configuration of every run in it, a run folder that vanished can be made again. While a process works through
it, it holds `runs/sweeps/.<time>.lock`, which the kernel takes back however that process ends: what waits in a sheet
whose lock is free waits for nobody.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from quantexp.config.load import from_plain
from quantexp.errors import ConfigError, RunError
from quantexp.launch.label import labels
from quantexp.launch.outcome import Outcome
from quantexp.runs.lock import hold
from quantexp.runs.paths import RunDir, SweepFiles
from quantexp.runs.redaction import redacted
from quantexp.runs.status import State, now, read_json
from quantexp.runs.sweep_list import cannot_write, sweep_file, write_sweep
from quantexp.schema import Experiment


class Place(Enum):
    """Where a run of a sweep is."""

    WAITING = "waiting"
    #: In one of our slots.
    RUNNING = "running"
    #: Another process has its folder.
    IN_USE = "in use"
    #: Nothing more is done about it here.
    OVER = "over"


@dataclass
class Item:
    """One run of a sweep, and what has become of it."""

    experiment: Experiment
    #: Runs of a stage start once all of the stage before have completed.
    stage: int
    label: str
    #: The resolved configuration, as the file holds it.
    config: dict[str, Any]
    #: None where it cannot be prepared.
    run: RunDir | None = None
    place: Place = Place.WAITING
    outcome: Outcome | None = None
    #: Why it could not start, or cannot now.
    reason: str = ""

    @property
    def state(self) -> State:
        """How it stands, as a run's status would say it."""
        if self.outcome is not None:
            return self.outcome.state
        if self.place is Place.OVER:
            return State.FAILED
        return State.RUNNING if self.place is Place.RUNNING else State.PENDING

    @property
    def completed(self) -> bool:
        """Whether it is over and has its result."""
        return self.place is Place.OVER and self.state is State.COMPLETED


@dataclass
class Sheet:
    """A sweep: its runs in order, and what they are started with."""

    root: Path
    items: list[Item]
    #: The command line as it was typed, and what `provenance.checkout` said.
    command: list[str]
    source: dict[str, Any]
    #: When it was submitted. What another process did about a run after that counts here too.
    started: str = field(default_factory=now)
    finished: str | None = None
    files: SweepFiles = field(init=False)

    def __post_init__(self) -> None:
        self.files = SweepFiles(sweep_file(self.root, self.started))

    def write(self) -> None:
        """Replace the file.

        Raises:
            RunError: it cannot be written.
        """
        content = {
            "started": self.started,
            "finished": self.finished,
            "host": platform.node(),
            "pid": os.getpid(),
            **redacted({"command": self.command, "source": self.source}),
            "runs": [_row(item) for item in self.items],
        }
        write_sweep(self.files.listing, content)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Be the process that works through it; the end is written however it comes.

        Raises:
            RunError: it cannot be written, or its disk has no locks.
        """
        try:
            self.files.lock.parent.mkdir(parents=True, exist_ok=True)
            lock = hold(self.files.lock)
        except OSError as error:
            raise cannot_write(self.files.lock, error) from error
        try:
            self.write()
            yield
        finally:
            self.finished = now()
            self.write()
            self.files.lock.unlink(missing_ok=True)
            os.close(lock)


def _row(item: Item) -> dict[str, Any]:
    outcome = item.outcome
    return {
        "run": item.run.root.name if item.run is not None else None,
        "state": item.state.value,
        "skipped": outcome is not None and outcome.skipped,
        "reason": outcome.reason if outcome is not None else item.reason,
        "stage": item.stage,
        "config": item.config,
    }


def read_sheet(file: Path) -> Sheet:
    """The sheet of a sweep, all of it still to be done; what is done is found out from the run folders.

    Raises:
        RunError: the file is missing, broken or of another version.
    """
    content = read_json(file)
    root = file.parent.parent
    try:
        experiments = [from_plain(row["config"]) for row in content["runs"]]
        items = [
            Item(experiment, row["stage"], label, row["config"], _run(root, row))
            for experiment, row, label in zip(
                experiments, content["runs"], labels(experiments), strict=True
            )
        ]
        sheet = Sheet(root, items, content["command"], content["source"], content["started"])
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"{file} is not a sweep of this version: {error}") from error
    sheet.files = SweepFiles(file)
    return sheet


def _run(root: Path, row: dict[str, Any]) -> RunDir | None:
    return None if row["run"] is None else RunDir(root / row["run"])

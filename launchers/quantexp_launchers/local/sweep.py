"""A sweep: its runs in order, the state of each, and everything that another process needs to continue it.

Every run folder is prepared before the first run starts. Then the list `runs/sweeps/<time>.json` is written, and again
whenever a run ends. It holds the resolved configuration of every run, from which a deleted run folder can be recreated.
The process that executes the sweep holds `runs/sweeps/.<time>.lock`, which the kernel releases when that process ends:
if the lock is free, no process will start the pending runs.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.markup import escape

from quantexp.config.load import from_plain, plain
from quantexp.errors import ConfigError, QuantexpError, RunError, RunInUseError, UnreadableError
from quantexp.launch.attempt import Opened, open_run, run_folder
from quantexp.launch.label import labels
from quantexp.launch.outcome import Outcome, outcome
from quantexp.launch.recorded import root_of, with_absolute_paths
from quantexp.runs.device import device_class
from quantexp.runs.lock import hold, locked
from quantexp.runs.paths import RunDir, SweepFiles
from quantexp.runs.provenance import Source, checkout, command_line
from quantexp.runs.redaction import redacted
from quantexp.runs.status import State, now, read_status, write_status
from quantexp.runs.sweep_list import cannot_write, make_shared, read_sweep, sweep_file, write_sweep
from quantexp.schema import Experiment


class Place(Enum):
    """The state of a run within its sweep."""

    WAITING = "waiting"
    #: In a slot of this process.
    RUNNING = "running"
    #: Another process holds its lock.
    IN_USE = "in use"
    #: This process does nothing more about it.
    DONE = "done"


@dataclass
class Item:
    """One run of a sweep and its outcome."""

    experiment: Experiment
    #: Runs of a stage start after all runs of the previous stage have completed.
    stage: int
    label: str
    #: The resolved configuration, as written to the file.
    config: dict[str, Any]
    #: None if the run could not be prepared.
    run: RunDir | None = None
    place: Place = Place.WAITING
    outcome: Outcome | None = None
    #: Why the run could not start.
    reason: str = ""

    @property
    def state(self) -> State:
        """The state of the run."""
        if self.outcome is not None:
            return self.outcome.state
        if self.place is Place.DONE:
            return State.FAILED
        return State.RUNNING if self.place is Place.RUNNING else State.PENDING

    @property
    def completed(self) -> bool:
        """Whether the run is done and completed."""
        return self.place is Place.DONE and self.state is State.COMPLETED

    def hold_back(self, reason: str) -> None:
        """Write the reason to a pending run's status; a run that has started, or that is locked, stays unchanged."""
        if self.run is None:
            return
        # Another process holds it, its folder is gone, or the disk is full.
        with contextlib.suppress(RunError, OSError), locked(self.run, patience_s=0):
            status = read_status(self.run.status)
            if status is not None and status.state is State.PENDING and status.started is None:
                status.reason = reason
                write_status(self.run.status, status)

    @contextlib.contextmanager
    def settled(self, report_bug: Callable[[str], object]) -> Iterator[None]:
        """Turn an error of this run into its place and reason; a bug in it must not stop the others."""
        try:
            yield
        except RunInUseError as error:
            self.place, self.reason = Place.IN_USE, str(error)
        except QuantexpError as error:
            self.place, self.reason = Place.DONE, str(error)
        except (Exception, SystemExit) as error:  # noqa: BLE001
            self.place, self.reason = Place.DONE, f"{type(error).__name__}: {error}"
            report_bug(traceback.format_exc())


@dataclass
class Sweep:
    """Runs in order, and the command and source that they use."""

    root: Path
    items: list[Item]
    #: The command line, and the result of `provenance.checkout`.
    command: list[str]
    source: Source
    #: The time of submission. Outcomes that other processes recorded after it count for this sweep.
    started: str = field(default_factory=now)
    finished: str | None = None
    files: SweepFiles = field(init=False)

    def __post_init__(self) -> None:
        self.files = SweepFiles(sweep_file(self.root, self.started))

    def write(self) -> None:
        """Replace the file.

        Raises:
            RunError: the file cannot be written.
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
    def opened(
        self, item: Item, say: Callable[[str], object]
    ) -> Iterator[tuple[Opened, int | None]]:
        """Open the folder of a run as `open_run`, and raise as it; `say` gets a notice with markup."""
        device = device_class(item.experiment.launcher)
        with open_run(
            item.experiment, device, self.command, source=self.source, since=self.started
        ) as (folder, lock):
            item.run = folder.run
            if folder.notice is not None:
                say(f"{escape(item.label)}: {escape(folder.notice)}")
            yield folder, lock

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the sweep's lock; writes the list at the start and, after any end, with the time of that end.

        Raises:
            RunError: the list cannot be written, or its disk has no locks.
        """
        try:
            make_shared(self.files.lock.parent)
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


def prepare(points: Sequence[tuple[Experiment, int]], console: Console) -> Sweep:
    """Prepare the runs of these experiments, each with its stage.

    Every folder that is not in use becomes pending. Completed runs, runs in a scheduler, and runs that cannot be
    prepared are done.

    Raises:
        ConfigError: the runs have different `paths.root`.
    """
    experiments = [experiment for experiment, _ in points]
    roots = {root_of(experiment) for experiment in experiments}
    if len(roots) > 1:
        raise ConfigError(
            f"paths.root is one for the whole sweep, got {', '.join(sorted(map(str, roots)))}; give it once"
        )
    items = [
        Item(experiment, stage, label, plain(with_absolute_paths(experiment)))
        for (experiment, stage), label in zip(points, labels(experiments), strict=True)
    ]
    sweep = Sweep(roots.pop(), items, command_line(), checkout())
    with console.status(f"preparing {len(items)} runs"):
        for item in items:
            with item.settled(sys.stderr.write):
                _prepare(item, sweep, lambda words: console.print(words, soft_wrap=True))
            if item.place is Place.IN_USE:
                item.run = run_folder(item.experiment, device_class(item.experiment.launcher))
    return sweep


def _prepare(item: Item, sweep: Sweep, say: Callable[[str], object]) -> None:
    with sweep.opened(item, say) as (folder, _):
        if not folder.ready:
            item.outcome = outcome(item.experiment, folder.run, folder.skipped, folder.elsewhere)
            item.place = Place.DONE


def read_list(file: Path) -> Sweep:
    """Read a sweep from its list, with all runs pending; opening the run folders later finds the completed ones.

    Raises:
        RunError: the file is missing, broken or written by another version.
    """
    root = file.parent.parent
    try:
        content = read_sweep(file)
        configs = [row["config"] or {} for row in content["runs"]]
        experiments = [from_plain(config) for config in configs]
        items = [
            Item(experiment, row["stage"], label, config, _run(root, row["run"]))
            for experiment, row, label, config in zip(
                experiments, content["runs"], labels(experiments), configs, strict=True
            )
        ]
        source = cast(Source, content["source"])
        sweep = Sweep(root, items, content["command"], source, content["started"])
    except (UnreadableError, ConfigError, KeyError, TypeError, ValueError) as error:
        reason = str(error).removeprefix(f"{file}").lstrip(":, ")
        raise RunError(f"{file} is not a sweep of this version: {reason}") from error
    sweep.files = SweepFiles(file)
    return sweep


def _run(root: Path, name: str | None) -> RunDir | None:
    return None if name is None else RunDir(root / name)

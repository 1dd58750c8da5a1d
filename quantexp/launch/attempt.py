"""Opening a run folder: identity, attempts, provenance.

A folder belongs to one identity. What lies at its top is the newest attempt; before another one starts, the earlier
is moved whole into `attempts/N/` and never touched again. A lock (flock, released by any death of its holder) keeps
two processes out of one folder.
"""

from __future__ import annotations

import contextlib
import copy
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantexp.capture.select.budget import require_affordable
from quantexp.config.load import save
from quantexp.errors import RunError, RunInUseError
from quantexp.launch.identity import folder_name, identity
from quantexp.launch.ledger.standing import live_job
from quantexp.launch.reuse import settled, skipped_or_noticed
from quantexp.model.checkpoints import named, require_room
from quantexp.runs.lock import PROBE_S, cannot_write, take_lock
from quantexp.runs.paths import RunDir
from quantexp.runs.provenance import provenance
from quantexp.runs.redaction import redacted
from quantexp.runs.snapshot import take_snapshot
from quantexp.runs.status import State, Status, now, read_status, write_json, write_status
from quantexp.schema import Experiment

#: What a run keeps free for its last status.
RESERVE_BYTES = 1 << 16
#: Seconds after which somebody who waits for a folder asks again whether a job runs in it.
PATIENCE_STEP_S = 2.0


@dataclass(frozen=True)
class Opened:
    """A run folder, and whether it needs to run at all."""

    run: RunDir
    #: The source to run it with.
    snapshot: Path
    #: Why nothing needs to run; None where a new attempt is ready.
    skipped: str | None = None
    #: Why a completed run of this identity runs again; None where that is not the case.
    notice: str | None = None
    #: Where it is waiting or running already ("job 12 is waiting"); None where a new attempt is ready.
    elsewhere: str | None = None
    #: Another process ended it meanwhile, and how it ended counts; no new attempt is ready.
    settled: bool = False

    @property
    def ready(self) -> bool:
        """Whether a new attempt may start."""
        return self.skipped is None and self.elsewhere is None and not self.settled


#: Whether what a status speaks of still waits or runs in a scheduler, in words.
Whereabouts = Callable[[Status], str | None]


def root_of(experiment: Experiment) -> Path:
    """The folder of the run folders."""
    return Path(experiment.paths.root).expanduser().absolute()


@contextlib.contextmanager
def opened(
    experiment: Experiment,
    device_class: str,
    command: list[str],
    whereabouts: Whereabouts = live_job,
    patience_s: float = PROBE_S,
    *,
    source: dict[str, Any] | None = None,
    since: str | None = None,
) -> Iterator[tuple[Opened, int | None]]:
    """The experiment's run folder, ready for a new attempt and locked, with the lock's file descriptor.

    There is no lock where a job runs in the folder: it has it.

    Args:
        experiment: what is to run.
        device_class: what it is to run on, part of its identity.
        command: what was typed, for the record.
        whereabouts: asks the scheduler about a folder that was submitted to it.
        patience_s: how long another process may hold the folder.
        source: as for `provenance`.
        since: when several processes began to share the work of a sweep; how one of them ended this run after that
            moment counts for all. None: there is only this process.

    Raises:
        RunInUseError: another process starts it or runs in it.
        RunError: the folder cannot be written, or the checkpoints are more than is free.
        DataError: data that is missing.
        CaptureError: the capture would take more than it may, or more than is free.
    """
    content = identity(experiment, device_class)
    run = _folder(experiment, content)
    try:
        run.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(run, error) from error
    lock, running = _lock_or_job(run, whereabouts, patience_s)
    if lock is None:
        yield Opened(run, take_snapshot(root_of(experiment)), elsewhere=running), None
        return
    try:
        snapshot = take_snapshot(root_of(experiment))
        elsewhere = _elsewhere(run, whereabouts)
        skipped, notice = skipped_or_noticed(experiment, run, since)
        folder = Opened(
            run, snapshot, skipped, notice, elsewhere, since is not None and settled(run, since)
        )
        if folder.ready:
            require_affordable(experiment, run.root)
            require_room(experiment, run.root)
            _prepare(experiment, run, provenance(content, command, snapshot, source))
        yield folder, lock
    finally:
        os.close(lock)


def run_folder(experiment: Experiment, device_class: str) -> RunDir:
    """Where the experiment runs; nothing is written.

    Raises:
        DataError: data that is missing.
    """
    return _folder(experiment, identity(experiment, device_class))


def _folder(experiment: Experiment, content: dict[str, Any]) -> RunDir:
    return RunDir(root_of(experiment) / folder_name(experiment, content))


def _lock_or_job(
    run: RunDir, whereabouts: Whereabouts, patience_s: float
) -> tuple[int | None, str | None]:
    """The folder's lock, or where its run is: a job that runs holds the lock to its end."""
    until = time.monotonic() + patience_s
    while True:
        try:
            return take_lock(run, min(patience_s, PATIENCE_STEP_S)), None
        except RunInUseError:
            status = read_status(run.status)
            if status is not None and status.state is State.RUNNING:
                running = _elsewhere(run, whereabouts)
                if running is not None:
                    return None, running
            if time.monotonic() > until:
                raise


def _elsewhere(run: RunDir, whereabouts: Whereabouts) -> str | None:
    try:
        status = read_status(run.status)
    except RunError:
        return None  # it is set aside
    waits = status is not None and status.state in (State.PENDING, State.RUNNING, State.PREEMPTED)
    if status is None or status.submission is None or not waits:
        return None
    return whereabouts(status)


def _prepare(experiment: Experiment, run: RunDir, started_with: dict[str, Any]) -> None:
    try:
        if not _only_prepared(run):
            set_aside(run, experiment.capture.dir)
        _write_new(experiment, run, started_with)
    except OSError as error:
        raise cannot_write(run, error) from error


def _only_prepared(run: RunDir) -> bool:
    """Whether an earlier attempt never started: nothing is worth keeping of it."""
    try:
        status = read_status(run.status)
    except RunError:
        return False
    never = (State.PENDING, State.CANCELLED)
    return status is not None and status.state in never and status.started is None


def set_aside(run: RunDir, capture_dir: str | None, keep: tuple[Path, ...] = ()) -> None:
    """Move an attempt, whatever it left in each place, into a folder of its own there; of `keep` a copy, so that they
    are never missing.
    """
    captured = RunDir(run.captured(capture_dir).absolute())
    places = [run] if captured.root == run.tensors else [run, captured]
    left = {
        place: [p for p in place.root.iterdir() if p not in (place.attempts, place.lock)]
        for place in places
        if place.root.is_dir()
    }
    numbers = [int(p.name) for place in left for p in place.attempts.glob("[0-9]*")]
    number = str(max(numbers, default=0) + 1)
    for place, paths in left.items():
        for path in paths:
            target = place.attempts / number / path.name
            target.parent.mkdir(parents=True, exist_ok=True)
            if path in keep:
                shutil.copy2(path, target)
            else:
                path.rename(target)


def _write_new(experiment: Experiment, run: RunDir, started_with: dict[str, Any]) -> None:
    run.logs.mkdir(exist_ok=True)
    run.reserve.write_bytes(bytes(RESERVE_BYTES))
    save(anywhere(experiment), run.config)
    write_json(run.provenance, redacted(started_with))
    status = Status(created=now(), iterations=experiment.training.iterations, host=platform.node())
    write_status(run.status, status)


def anywhere(experiment: Experiment) -> Experiment:
    """The same experiment wherever it is read: no path of it depends on the working directory."""
    copied = copy.deepcopy(experiment)
    for node, keys in (
        (copied.paths, ("root", "cache")),
        (copied.model, ("from_hf", "init_from")),
        (copied.dataset, ("path", "tokenizer_path")),
        (copied.capture, ("dir",)),
    ):
        for key in keys:
            if getattr(node, key) is not None:
                setattr(node, key, str(Path(getattr(node, key)).expanduser().absolute()))
    if copied.training.start_from is not None:
        name, iteration = named(copied.training.start_from)
        if (run := Path(name).expanduser()).exists():
            copied.training.start_from = f"{run.absolute()}@{iteration}"
    return copied

"""Opens a run folder for a new attempt: identity, lock, earlier attempts, provenance.

A folder belongs to one identity. Its top level holds the newest attempt. Before another attempt starts, the earlier one
is moved into `attempts/N/` and never changed again. A lock (flock, released when its holder dies) keeps two processes
out of one folder.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantexp.capture.select.budget import require_affordable
from quantexp.capture.store.by_type import unlink
from quantexp.config.load import save
from quantexp.errors import RunError, RunInUseError
from quantexp.launch.backend import OPEN, live_job
from quantexp.launch.going_on import (
    RESERVE_BYTES,
    continuation,
    differs_in_layout_alone,
    go_on,
    is_recorded,
)
from quantexp.launch.identity import folder_name, identity
from quantexp.launch.recorded import recorded, require_own_captures, root_of
from quantexp.launch.reuse import ended_for_good, skip_or_rerun_reason
from quantexp.model.checkpoints import require_room
from quantexp.quant.slots import python_sources
from quantexp.runs.fencing import claimed
from quantexp.runs.lock import PROBE_S, cannot_write, may_write, take_lock
from quantexp.runs.paths import RunDir, RunsRoot
from quantexp.runs.provenance import (
    Provenance,
    Source,
    provenance,
    read_provenance,
)
from quantexp.runs.redaction import redacted
from quantexp.runs.snapshot import check_snapshot, snapshot_name, take_snapshot
from quantexp.runs.status import State, Status, now, read_status, write_json, write_status
from quantexp.schema import Code, Experiment

#: Seconds between two queries of the scheduler while waiting for a folder's lock.
PATIENCE_STEP_S = 2.0


@dataclass(frozen=True)
class Opened:
    """A run folder, and whether a new attempt may start in it."""

    run: RunDir
    #: The source snapshot of the run.
    snapshot: Path
    #: Why the run is skipped; None if a new attempt is ready.
    skipped: str | None = None
    #: Why a completed run of this identity runs again; None if it does not.
    notice: str | None = None
    #: The job in which the run is pending or running ("job 12 is waiting"); None if a new attempt is ready.
    elsewhere: str | None = None
    #: The name of this process's claim on the folder, and of the start that may write there; if an attempt is ready.
    claim: str | None = None
    #: Another process of the same sweep has ended the run for good; no new attempt is ready.
    settled: bool = False

    @property
    def ready(self) -> bool:
        """Whether a new attempt may start."""
        return self.skipped is None and self.elsewhere is None and not self.settled


#: Describes the pending or running job of a run's status; None if it has none.
JobLookup = Callable[[RunDir, Status], str | None]


@contextlib.contextmanager
def open_run(
    experiment: Experiment,
    device_class: str,
    command: list[str],
    job_lookup: JobLookup = live_job,
    patience_s: float = PROBE_S,
    *,
    source: Source | None = None,
    since: str | None = None,
) -> Iterator[tuple[Opened, int | None]]:
    """Lock the experiment's run folder and prepare a new attempt; yields the folder and the lock's file descriptor.

    The descriptor is None while a job runs in the folder, because the job holds the lock.

    Args:
        experiment: the experiment to run.
        device_class: the device class, part of the identity.
        command: the command line, for the record.
        job_lookup: asks the launcher of an open run about its job.
        patience_s: how long to wait while another process holds the lock.
        source: as for `provenance`.
        since: when several processes began to share a sweep; if one of them ended this run for good after that time,
            this call starts no attempt. None if there is only this process.

    Raises:
        RunInUseError: another process starts or executes the run.
        RunError: the folder cannot be written, or the disk has no room for the checkpoints.
        DataError: data is missing.
        CaptureError: the capture exceeds its budget or the free disk space.
    """
    content = identity(experiment, device_class)
    run = _folder(experiment, content)
    if not run.root.exists():
        _require_room(experiment, run)  # before anything is left of a run that is refused
    try:
        run.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(run, error) from error
    if not may_write(run):
        yield _of_another_user(experiment, run, job_lookup), None
        return
    lock, running = _lock_or_job(run, job_lookup, patience_s)
    if lock is None:
        yield Opened(run, take_snapshot(root_of(experiment)), elsewhere=running), None
        return
    try:
        snapshot = take_snapshot(root_of(experiment))

        def look() -> Opened:
            elsewhere = _elsewhere(run, job_lookup)
            skipped, notice = skip_or_rerun_reason(experiment, run, since, snapshot)
            settled = since is not None and ended_for_good(run, since)
            return Opened(run, snapshot, skipped, notice, elsewhere, settled=settled)

        folder = look()
        if not folder.ready:
            yield folder, lock
            return
        with claimed(run) as claim:
            # Another machine may have ended the run meanwhile.
            folder = replace(look(), claim=claim)
            if folder.ready:
                _require_room(experiment, run)
                folder = _prepared(experiment, folder, content, command, source)
            yield folder, lock
    finally:
        os.close(lock)


def _require_room(experiment: Experiment, run: RunDir) -> None:
    require_affordable(experiment, run.root)
    require_room(experiment, run.root)


def _of_another_user(experiment: Experiment, run: RunDir, job_lookup: JobLookup) -> Opened:
    """A run in a folder that this user may only read: skipped if it is completed, or left to its job.

    Raises:
        RunError: it would have to start there.
    """
    skipped, notice = skip_or_rerun_reason(experiment, run)
    unused = RunsRoot(root_of(experiment)).snapshots / snapshot_name()  # maybe not writable either
    folder = Opened(run, unused, skipped, notice, _elsewhere(run, job_lookup))
    if folder.ready:
        why = "force=true would write it anew" if experiment.force else "it is not completed"
        raise RunError(
            f"the run folder {run.root} is another user's, who alone may write it, and {notice or why}; set paths.root "
            "to a folder of your own"
        )
    return folder


def run_folder(experiment: Experiment, device_class: str) -> RunDir:
    """The run folder of an experiment, without writing anything.

    Raises:
        DataError: data is missing.
    """
    return _folder(experiment, identity(experiment, device_class))


def _folder(experiment: Experiment, content: dict[str, Any]) -> RunDir:
    if experiment.paths.run is None:
        return RunDir(root_of(experiment) / folder_name(experiment, content))
    run = RunDir(root_of(experiment) / experiment.paths.run)
    if not differs_in_layout_alone(content, run):
        raise RunError(
            f"paths.run={experiment.paths.run} is no folder of this run in another layout; leave it out, or see "
            "quantexp resume"
        )
    return run


def _lock_or_job(
    run: RunDir, job_lookup: JobLookup, patience_s: float
) -> tuple[int | None, str | None]:
    """The descriptor of the folder's lock, or a description of the running job that holds it."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return take_lock(run, min(patience_s, PATIENCE_STEP_S)), None
        except RunInUseError:
            status = read_status(run.status)
            if status is not None and status.state is State.RUNNING:
                running = _elsewhere(run, job_lookup)
                if running is not None:
                    return None, running
            if time.monotonic() > deadline:
                raise


def _elsewhere(run: RunDir, job_lookup: JobLookup) -> str | None:
    try:
        status = read_status(run.status)
    except RunError:
        return None  # the attempt is moved aside later
    return None if status is None or status.state not in OPEN else job_lookup(run, status)


def _prepared(
    experiment: Experiment,
    folder: Opened,
    content: dict[str, Any],
    command: list[str],
    source: Source | None,
) -> Opened:
    """The folder with an attempt that is ready to start: the one in it, cut back to its checkpoint, or a new one."""
    run = folder.run
    require_own_captures(experiment, run)
    point, notice = continuation(experiment, run)
    if point is not None:
        folder = replace(folder, snapshot=_snapshot_of(experiment, folder))
    elif experiment.paths.run is not None and not is_recorded(content, run):
        why = notice or "it has no checkpoint to go on from"
        raise RunError(
            f"{run.root.name} cannot take another layout: {why}; start it anew with quantexp"
        )
    started_with = provenance(content, command, folder.snapshot, source)
    if sources := python_sources(experiment.quant):
        started_with["formats"] = sources
    try:
        if point is not None:
            point = go_on(point, experiment, run, started_with)
        else:
            if not _only_prepared(run):
                set_aside(run, experiment.capture.dir)
            write_new(experiment, run, started_with)
    except OSError as error:
        raise cannot_write(run, error) from error
    if point is not None and point.notice:
        notice = f"{run.root.name} {point.notice}"
    return replace(folder, notice="\n".join(filter(None, (folder.notice, notice))) or None)


def _snapshot_of(experiment: Experiment, folder: Opened) -> Path:
    """The source snapshot of a run that goes on.

    Raises:
        RunError: that of its first start is gone or was changed.
    """
    name = read_provenance(folder.run.provenance).get("source", {}).get("snapshot")
    if experiment.code is Code.current or name is None:
        return folder.snapshot
    snapshot = folder.snapshot.with_name(name)
    try:
        check_snapshot(snapshot)
    except RunError as error:
        words = str(error).rpartition("; ")[0]
        raise RunError(f"{words}; code=current goes on with the present source") from error
    return snapshot


def _only_prepared(run: RunDir) -> bool:
    """Whether the attempt in the folder never started, so that it need not be kept."""
    try:
        status = read_status(run.status)
    except RunError:
        return False
    not_started = (State.PENDING, State.CANCELLED)
    return status is not None and status.state in not_started and status.started is None


def set_aside(run: RunDir, capture_dir: str | None, keep: tuple[Path, ...] = ()) -> None:
    """Move an attempt into `attempts/N/` of the run folder, and of the capture folder if that is elsewhere.

    The files in `keep` are copied instead, so that they are never missing.
    """
    captured = RunDir(run.captured(capture_dir).absolute())
    folders = [run] if captured.root == run.tensors else [run, captured]
    if captured in folders:
        unlink(captured.root, captured.root.glob("*/*.pt"))
    contents = {
        folder: [
            p
            for p in folder.root.iterdir()
            if p not in (folder.attempts, folder.lock, folder.claim, folder.start)
        ]
        for folder in folders
        if folder.root.is_dir()
    }
    numbers = [number for folder in contents for number in folder.attempt_numbers()]
    number = str(max(numbers, default=0) + 1)
    for folder, paths in contents.items():
        for path in paths:
            target = folder.attempts / number / path.name
            target.parent.mkdir(parents=True, exist_ok=True)
            if path in keep:
                shutil.copy2(path, target)
            else:
                path.rename(target)


def write_new(experiment: Experiment, run: RunDir, started_with: Provenance) -> None:
    """Write the first files of an attempt into a folder whose lock this process holds.

    Raises:
        OSError: the folder cannot be written.
    """
    run.logs.mkdir(exist_ok=True, mode=0o700)
    run.kill.unlink(missing_ok=True)
    run.reserve.write_bytes(bytes(RESERVE_BYTES))
    save(recorded(experiment), run.config)
    write_json(run.provenance, redacted(started_with))
    status = Status(
        created=now(),
        iterations=experiment.training.last_iteration,
        host=platform.node(),
        launcher=experiment.launcher.kind,
    )
    write_status(run.status, status)

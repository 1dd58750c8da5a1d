"""Lets an unfinished attempt go on from its last whole checkpoint, in its own folder.

    whole(run)               the newest checkpoint whose training state is undamaged
    continuation(...)        whether an experiment goes on with what a folder holds, and from where
    cut_back(...)            removes what the attempt recorded after that checkpoint; may be repeated at any moment
    status_of(...)           the status of the new start

Metrics, captures and checkpoints up to the checkpoint stay; what follows is computed again, with the same bits.
"""

from __future__ import annotations

import json
import logging
import os
import platform
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quantexp.capture.store.kept import cut_back as cut_back_capture
from quantexp.capture.store.manifest import MANIFEST
from quantexp.config.load import read, save
from quantexp.errors import ConfigError, DataError, UnreadableError
from quantexp.launch.recorded import in_place, recorded
from quantexp.launch.reuse import covers
from quantexp.model.checkpoint_hashes import HASHES, require_intact
from quantexp.model.checkpoints import folder_of, remove, resumable, saved_iterations
from quantexp.model.layout import Layout
from quantexp.reading.json_files import lines_of, value_of
from quantexp.runs.curves import CurvesLine
from quantexp.runs.metrics import MetricsLine
from quantexp.runs.paths import RunDir
from quantexp.runs.provenance import Provenance, add_start, change_of_code, read_provenance
from quantexp.runs.status import State, Status, now, read_json, read_status, write_status
from quantexp.schema import Experiment

LOG = logging.getLogger(__name__)

#: Disk space that a run reserves for its last status.
RESERVE_BYTES = 1 << 16


@dataclass(frozen=True)
class Continuation:
    """The point from which an attempt goes on."""

    #: That of the checkpoint.
    iteration: int
    #: What the attempt recorded last.
    before: Status
    #: What is wrong with newer checkpoints.
    damaged: tuple[str, ...] = ()
    #: What is not as it was, in words.
    changed: tuple[str, ...] = ()

    @property
    def lost(self) -> int:
        """The iterations that are computed again."""
        return max(0, self.before.iteration - self.iteration)

    @property
    def is_prepared(self) -> bool:
        """Whether the attempt is cut back to this point already, and has not started since."""
        return self.before.started is None

    @property
    def notice(self) -> str:
        """The point in words; empty if it was said before."""
        if self.is_prepared and not self.changed:
            return ""
        lines = [f"goes on at iteration {self.iteration + 1} ({lost_words(self.lost)})"]
        lines += [f"not from a later checkpoint: {words}" for words in self.damaged]
        lines += [f"changed: {', '.join(self.changed)}"] if self.changed else []
        return "\n".join(lines)


def lost_words(lost: int) -> str:
    """`nothing is lost`, `12 iterations are computed again`."""
    if lost == 0:
        return "nothing is lost"
    return f"{lost:,} {'iteration is' if lost == 1 else 'iterations are'} computed again"


def is_recorded(content: dict[str, Any], run: RunDir) -> bool:
    """Whether an identity is that of a run folder, whatever the folder's name."""
    return _differences(content, run) == set()


def differs_in_layout_alone(content: dict[str, Any], run: RunDir) -> bool:
    """Whether an identity equals that of a run folder in everything but the layout."""
    differences = _differences(content, run)
    return differences is not None and differences <= {"data_parallel", "layout"}


def _differences(content: dict[str, Any], run: RunDir) -> set[str] | None:
    """The parts of an identity that are not those of a run folder; None if the folder records none."""
    try:
        recorded = dict(read_json(run.provenance)["identity"])
    except (UnreadableError, KeyError, TypeError, ValueError):
        return None
    own = json.loads(json.dumps(content))
    return {key for key in {*own, *recorded} if own.get(key) != recorded.get(key)}


def whole(run: RunDir) -> tuple[int | None, tuple[str, ...]]:
    """The newest checkpoint whose training state is undamaged, and what is wrong with newer ones."""
    damaged: list[str] = []
    for iteration in reversed(resumable(run)):
        folder = folder_of(run, iteration)
        try:
            if not (folder / HASHES).is_file():
                raise DataError(f"{folder / HASHES} is missing")
            require_intact(folder)
        except DataError as error:
            damaged.append(str(error).rpartition("; ")[0] or str(error))
            continue
        return iteration, tuple(damaged)
    return None, tuple(damaged)


def continuation(experiment: Experiment, run: RunDir) -> tuple[Continuation | None, str | None]:
    """Where the attempt in a folder goes on, or None; and, where it has checkpoints but begins again, why."""
    try:
        before = read_status(run.status)
    except UnreadableError as error:
        return None, _begins_again(str(error)) if resumable(run) else None
    if before is None or experiment.training.restart or not _is_unfinished(experiment, before):
        return None, None
    if not resumable(run):
        return None, None
    try:
        earlier = in_place(read(run.config), run)
    except ConfigError as error:
        return None, _begins_again(f"the attempt so far cannot be read ({error})")
    if not covers(earlier.capture, experiment.capture, experiment.training.last_iteration):
        return None, _begins_again("it captures what the attempt so far did not")
    if experiment.evaluation.every is not None and earlier.evaluation != experiment.evaluation:
        return None, _begins_again("it evaluates otherwise than the attempt so far")
    iteration, damaged = whole(run)
    if iteration is None:
        return None, _begins_again("; ".join(damaged))
    return Continuation(iteration, before, damaged, _changes(earlier, experiment)), None


def _begins_again(why: str) -> str:
    return f"begins again at its first iteration: {why}"


def _is_unfinished(experiment: Experiment, status: Status) -> bool:
    if status.started is None and status.goes_on_from is None:
        return False
    if status.state is not State.COMPLETED:
        return True
    stopped_early = status.iteration < status.iterations
    return stopped_early and not experiment.capture.stop_after_capture


def _changes(earlier: Experiment, experiment: Experiment) -> tuple[str, ...]:
    """The sizes of the layout that are not as in the attempt so far: `tensor 2 -> 1`."""
    old, new = asdict(Layout.of(earlier)), asdict(Layout.of(experiment))
    return tuple(f"{key} {old[key]} -> {new[key]}" for key in old if old[key] != new[key])


def cut_back(run: RunDir, capture_dir: str | None, iteration: int) -> None:
    """Remove what an attempt recorded after its checkpoint of an iteration, which is whole.

    After an interruption at any moment, the next call completes the work.

    Raises:
        OSError, UnreadableError: the folder cannot be read or written.
    """
    _cut_lines(run.metrics, MetricsLine, iteration)
    _cut_lines(run.curves, CurvesLine, iteration)
    captured = run.captured(capture_dir)
    if missing := cut_back_capture(captured, iteration):
        LOG.warning("%d captured files that %s lists are missing", missing, captured / MANIFEST)
    for later in saved_iterations(run):
        if later > iteration:
            remove(folder_of(run, later))
    for path in run.logs.glob("rank*.json"):
        path.unlink(missing_ok=True)
    run.kill.unlink(missing_ok=True)
    run.logs.mkdir(exist_ok=True, mode=0o700)
    run.reserve.write_bytes(bytes(RESERVE_BYTES))


def _cut_lines(file: Path, kind: type[MetricsLine] | type[CurvesLine], iteration: int) -> None:
    """Drop the lines of later iterations, and an incomplete last one."""
    end = 0
    for line in lines_of(file, _refuse):
        value = value_of(line, file, kind, _refuse)
        if value is None or not line.is_ended or value["iteration"] > iteration:
            break
        end = line.offset + len(line.text)
    if file.exists():
        os.truncate(file, end)


def _refuse(error: UnreadableError) -> None:
    raise error


def status_of(
    point: Continuation, experiment: Experiment, *, requeued: bool, reason: str | None = None
) -> Status:
    """The status of a start that goes on; `reason` is why the one before it ended, if its own status does not say."""
    before = point.before
    restart = {
        "time": now(),
        "reason": reason or before.reason or f"ended without recording why, {before.state.value}",
        "iteration": before.iteration,
        "goes_on_from": point.iteration,
        "lost": point.lost,
        "requeued": requeued,
        "changed": list(point.changed),
    }
    return Status(
        created=before.created,
        iteration=point.iteration,
        iterations=experiment.training.last_iteration,
        host=platform.node(),
        launcher=experiment.launcher.kind,
        goes_on_from=point.iteration,
        restarts=[*before.restarts, *([restart] if before.started is not None else [])],
        tracking=before.tracking,
    )


def go_on(
    point: Continuation, experiment: Experiment, run: RunDir, started: Provenance
) -> Continuation:
    """Cut an attempt back to its checkpoint, and record the new start; returns the point with a change of code.

    Raises:
        OSError: the folder cannot be written.
    """
    other_code = change_of_code(read_provenance(run.provenance), started)
    point = replace(point, changed=(*point.changed, *other_code))
    cut_back(run, experiment.capture.dir, point.iteration)
    save(recorded(experiment), run.config)
    add_start(run.provenance, started, point.iteration, point.changed, replaces=point.is_prepared)
    write_status(run.status, status_of(point, experiment, requeued=False))
    return point

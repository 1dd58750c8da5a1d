"""Whether a run needs to run at all: a completed one of the same identity, with all the capture asked for, does not."""

from __future__ import annotations

import json
from pathlib import Path

from quantexp import __version__
from quantexp.capture.select.schedule import captured_iterations
from quantexp.config.evaluation import was_evaluated
from quantexp.config.load import read_capture
from quantexp.errors import ConfigError, RunError
from quantexp.model.checkpoints import iterations_saved, saved_iterations
from quantexp.runs.paths import RunDir
from quantexp.runs.provenance import versions
from quantexp.runs.status import INTERRUPTED, State, read_json, read_status
from quantexp.schema import CaptureConfig, CaptureLevel, CaptureValues, Experiment

_LEVELS = (CaptureLevel.off, CaptureLevel.stats, CaptureLevel.tensors)


def settled(run: RunDir, since: str) -> bool:
    """Whether an attempt ended after `since` in a way that another one at once would not mend.

    It failed, or was cancelled on purpose; one that was only interrupted is still to be done.
    """
    try:
        status = read_status(run.status)
    except RunError:
        return False
    if status is None or (status.finished or "") <= since:
        return False
    on_purpose = status.state is State.CANCELLED and status.reason != INTERRUPTED
    return status.state is State.FAILED or on_purpose


def skipped_or_noticed(
    experiment: Experiment, run: RunDir, since: str | None = None
) -> tuple[str | None, str | None]:
    """Why nothing needs to run; or, of a folder that looks as if nothing needed to, why it runs all the same.

    What completed after `since` is not forced to run again.
    """
    try:
        skipped = _why_skipped(experiment, run, since)
        notice = None if skipped is None else _other_versions(run)
    except (RunError, KeyError, TypeError) as error:
        return None, f"an earlier attempt cannot be read ({error}): set aside, running again"
    return (None, notice) if notice is not None else (skipped, None)


def _why_skipped(experiment: Experiment, run: RunDir, since: str | None) -> str | None:
    status = read_status(run.status)
    if status is None or status.state is not State.COMPLETED:
        return None
    if experiment.force and (since is None or (status.finished or "") <= since):
        return None
    try:
        earlier = read_capture(run.config)
    except ConfigError:
        return None
    if status.iteration < status.iterations and not experiment.capture.stop_after_capture:
        return None  # it ended with its capture, as it was asked to
    if not set(iterations_saved(experiment.checkpoint, status.iteration)) <= set(
        saved_iterations(run)
    ):
        return None
    if not was_evaluated(experiment, run):
        return None
    if not covers(earlier, experiment.capture, experiment.training.iterations):
        return None
    if not _is_captured_there(run.captured(earlier.dir), experiment.capture.level):
        return None
    return f"already completed {status.finished}, with all the capture asked for; force=true runs it again"


def _other_versions(run: RunDir) -> str | None:
    """What an earlier attempt ran with that is another version now."""
    then = read_json(run.provenance)
    before = {"quantexp": then["quantexp"], **then["packages"]}
    now_ = {"quantexp": __version__, **versions()}
    changed = [
        f"{name} {before.get(name)} then, {version} now"
        for name, version in now_.items()
        if before.get(name) != version
    ]
    if not changed:
        return None
    return f"completed before with other versions ({'; '.join(changed)}): running again"


def covers(earlier: CaptureConfig, asked: CaptureConfig, iterations: int) -> bool:
    """Whether what an earlier attempt captured holds all that is asked now, in the same place."""
    if asked.level is CaptureLevel.off:
        return True
    whole = 1 << 62
    return (
        _LEVELS.index(earlier.level) >= _LEVELS.index(asked.level)
        and _takes(earlier, iterations) >= _takes(asked, iterations)
        and (earlier.collect_micro_batches or whole) >= (asked.collect_micro_batches or whole)
        and earlier.attn_weights >= asked.attn_weights
        and earlier.weight_grads >= asked.weight_grads
        and earlier.residual >= asked.residual
        and earlier.router_logits >= asked.router_logits
        and earlier.values in (asked.values, CaptureValues.both)
        and _parts(earlier) == _parts(asked)
        and asked.format in (None, earlier.format)
        and _place(earlier) == _place(asked)
        and (earlier.store is asked.store or not _holds_values(asked))
    )


def _takes(capture: CaptureConfig, iterations: int) -> set[int]:
    return set(captured_iterations(capture, iterations))


def _parts(capture: CaptureConfig) -> tuple[object, ...]:
    """What decides which part of which tensor is kept: other rules and samples are not compared further."""
    of = capture.sample_of if capture.sample_count else None
    return capture.rules, capture.sample_count, of


def _holds_values(capture: CaptureConfig) -> bool:
    return CaptureLevel.tensors in (capture.level, *(rule.level for rule in capture.rules))


def _place(capture: CaptureConfig) -> Path | None:
    return None if capture.dir is None else Path(capture.dir).expanduser().absolute()


def _is_captured_there(tensors: Path, asked: CaptureLevel) -> bool:
    """Whether what an earlier attempt captured is still on disk."""
    if asked is CaptureLevel.off:
        return True
    if asked is CaptureLevel.stats:
        return (tensors / "statistics.jsonl").is_file()
    try:
        lines = (tensors / "manifest.jsonl").read_bytes().splitlines()
        files = [json.loads(line)["file"] for line in lines]  # null: left out over the budget
        return all(file is not None and (tensors / file).is_file() for file in files)
    except (OSError, ValueError, KeyError):
        return False

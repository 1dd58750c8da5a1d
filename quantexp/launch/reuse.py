"""Decides whether a run is skipped: a completed run of the same identity that covers the requested captures is.

Not so if other code or other versions of packages made it: its numbers may be others, so it runs again, with a message.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from quantexp import __version__
from quantexp.capture.select.rules import holds_values
from quantexp.capture.select.schedule import captured_iterations
from quantexp.capture.store.manifest import MANIFEST, ManifestLine
from quantexp.errors import ConfigError, RunError, UnreadableError
from quantexp.folders import user_path
from quantexp.model.checkpoints import iterations_saved, kept, saved_iterations
from quantexp.reading.json_files import json_lines
from quantexp.reading.yaml_files import read_yaml
from quantexp.runs.code_digest import code_digest
from quantexp.runs.paths import RunDir
from quantexp.runs.provenance import UNKNOWN_CODE, codes_of, read_provenance, versions
from quantexp.runs.recorded_config import read_config
from quantexp.runs.status import INTERRUPTED, State, read_status
from quantexp.schema import CaptureConfig, CaptureLayout, CaptureLevel, CaptureValues, Experiment

_LEVELS = (CaptureLevel.off, CaptureLevel.stats, CaptureLevel.tensors)


def ended_for_good(run: RunDir, since: str) -> bool:
    """Whether an attempt failed after `since`, or was cancelled by the user.

    An interrupted attempt does not count: the run is still to be done.
    """
    try:
        status = read_status(run.status)
    except RunError:
        return False
    if status is None or (status.finished or "") <= since:
        return False
    by_user = status.state is State.CANCELLED and status.reason != INTERRUPTED
    return status.state is State.FAILED or by_user


def skip_or_rerun_reason(
    experiment: Experiment, run: RunDir, since: str | None = None, snapshot: Path | None = None
) -> tuple[str | None, str | None]:
    """Why the run is skipped, and why a completed run runs again; at most one of them is not None.

    `force=true` does not apply to a run that completed after `since`. `snapshot` has the source that would run; None
    stands for that of this process.
    """
    try:
        skipped = _why_skipped(experiment, run, since)
        notice = None if skipped is None else other_code_or_versions(run, snapshot)
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
        return None  # the earlier attempt stopped after its capture
    saved = iterations_saved(experiment.checkpoint, status.iteration)
    if not set(kept(experiment.checkpoint, saved)) <= set(saved_iterations(run)):
        return None
    if not _was_evaluated(experiment, run):
        return None
    if not covers(earlier, experiment.capture, experiment.training.last_iteration):
        return None
    if not _captures_exist(run.captured(earlier.dir), experiment.capture.level):
        return None
    return (
        f"already completed {status.finished} with all requested captures; force=true runs it again"
    )


def other_code_or_versions(run: RunDir, snapshot: Path | None = None) -> str | None:
    """What has changed of the code and of the packages since an earlier attempt, in words; None if nothing has."""
    recorded = read_provenance(run.provenance)
    code = code_digest(snapshot and snapshot / "quantexp")
    digests = dict.fromkeys(digest or UNKNOWN_CODE for digest in codes_of(recorded))
    earlier = {"quantexp": recorded["quantexp"], **recorded["packages"]}
    current = {"quantexp": __version__, **versions()}
    changed = [
        f"{name} {earlier.get(name)} then, {version} now"
        for name, version in current.items()
        if earlier.get(name) != version
    ]
    whats = [f"code ({' and '.join(digests)} then, {code} now)"] if {*digests} != {code} else []
    whats += [f"versions ({'; '.join(changed)})"] if changed else []
    return f"completed before with other {' and '.join(whats)}: running again" if whats else None


def covers(earlier: CaptureConfig, requested: CaptureConfig, iterations: int) -> bool:
    """Whether the captures of an earlier attempt include all requested ones, in the same folder."""
    if requested.level is CaptureLevel.off:
        return True
    unlimited = 1 << 62
    return (
        _LEVELS.index(earlier.level) >= _LEVELS.index(requested.level)
        and _takes(earlier, iterations) >= _takes(requested, iterations)
        and (earlier.collect_micro_batches or unlimited)
        >= (requested.collect_micro_batches or unlimited)
        and earlier.attn_weights >= requested.attn_weights
        and earlier.weight_grads >= requested.weight_grads
        and earlier.residual >= requested.residual
        and earlier.router_logits >= requested.router_logits
        and earlier.values in (requested.values, CaptureValues.both)
        and _parts(earlier) == _parts(requested)
        and requested.format in (None, earlier.format)
        and _folder(earlier) == _folder(requested)
        and (_has_files(earlier, requested) or not holds_values(requested))
    )


def _takes(capture: CaptureConfig, iterations: int) -> set[int]:
    return set(captured_iterations(capture, iterations))


def _parts(capture: CaptureConfig) -> tuple[object, ...]:
    """The options that select parts of tensors; captures with different ones never cover each other."""
    of = capture.sample_of if capture.sample_count else None
    return capture.rules, capture.sample_count, of


def _has_files(earlier: CaptureConfig, requested: CaptureConfig) -> bool:
    """Whether the files of one capture have the form and the folders that the other asks for."""
    layouts = (earlier.layout, CaptureLayout.by_run)
    return earlier.store is requested.store and requested.layout in layouts


def _folder(capture: CaptureConfig) -> Path | None:
    return None if capture.dir is None else user_path(capture.dir).absolute()


def _captures_exist(tensors: Path, requested: CaptureLevel) -> bool:
    """Whether the captures of an earlier attempt are still on disk."""
    if requested is CaptureLevel.off:
        return True
    if requested is CaptureLevel.stats:
        return (tensors / "statistics.jsonl").is_file()
    wrong: list[UnreadableError] = []
    lines = list(json_lines(tensors / MANIFEST, ManifestLine, wrong.append))
    if wrong or not (tensors / MANIFEST).is_file():
        return False
    files = [line.get("file") for line in lines]  # null: exceeded the budget
    return all(file is not None and (tensors / file).is_file() for file in files)


def _was_evaluated(experiment: Experiment, run: RunDir) -> bool:
    """Whether a completed run has evaluated the requested held-out samples.

    Raises:
        RunError: the run's configuration cannot be read.
    """
    requested = asdict(experiment.evaluation)
    if requested["every"] is None:
        return True
    return read_config(run).get("evaluation") == requested


def read_capture(file: Path) -> CaptureConfig:
    """The capture section of a run folder's config.yaml; many times faster than `read`.

    Raises:
        ConfigError: the file is not a configuration, or its capture section is not of this version.
    """
    try:
        section = read_yaml(file)["capture"]
        capture = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(CaptureConfig), section))
    except UnreadableError as error:
        raise ConfigError(str(error)) from error
    except (
        OSError,
        KeyError,
        TypeError,
        ValueError,
        OmegaConfBaseException,
    ) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    assert isinstance(capture, CaptureConfig)
    return capture

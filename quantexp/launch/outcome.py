"""The outcome of a run, and its pace (latest loss, speed and time left), read from its folder for display."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from quantexp.errors import RunError, RunInUseError
from quantexp.folders import shell_word
from quantexp.launch.progress import dossier_words, left_out_words, time_left_s
from quantexp.runs.metrics import Speed, early_end, latest
from quantexp.runs.paths import RunDir
from quantexp.runs.precision import Precision, read_precision
from quantexp.runs.provenance import read_provenance
from quantexp.runs.status import State, Status, read_status
from quantexp.schema import Experiment


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run."""

    experiment: Experiment
    run: RunDir
    state: State
    #: Why it failed or was skipped, or what failed after its training.
    reason: str = ""
    skipped: bool = False
    #: The last line of metrics.jsonl.
    metrics: dict[str, Any] | None = None
    speed: Speed = field(default_factory=Speed)
    #: The number of captured tensors, and their bytes.
    tensors: int = 0
    num_bytes: int = 0
    #: The content of precision.json; None if the run ended before its proof.
    precision: Precision | None = None
    #: `Status.tracking`.
    tracking: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: The verdict of the certificates of `quantexp verify` on the numerics of the run.
    verified: str | None = None
    #: Steps that were left out, and dossiers that were written, in words.
    left_out: str = ""
    dossiers: str = ""


def stopping_words(grace_s: float) -> str:
    """The message after the first Ctrl-C."""
    return (
        f"stopping: the run saves what it has, {grace_s:.0f} s at most; Ctrl-C again stops at once"
    )


def in_use_elsewhere(run: RunDir, where: str) -> RunInUseError:
    """The error for a run that is pending or running in a scheduler."""
    return RunInUseError(
        f"{run.root} is in use: {where}; wait for it, or quantexp cancel {shell_word(str(run.root))}"
    )


def outcome(
    experiment: Experiment, run: RunDir, skipped: str | None = None, elsewhere: str | None = None
) -> Outcome:
    """Read the outcome from a run folder; `skipped` and `elsewhere` are as in `Opened`.

    Raises:
        RunError: the folder has no status.json.
    """
    status, metrics = read_status(run.status), latest(run)
    if status is None:
        raise RunError(
            f"{run.root} has no status.json: it is not a run folder, or was never started"
        )
    return Outcome(
        experiment,
        run,
        status.state,
        skipped or elsewhere or status.reason,
        skipped is not None,
        metrics.line,
        metrics.speed,
        status.capture.get("tensors", 0),
        status.capture.get("num_bytes", 0),
        read_precision(run.precision) if run.precision.exists() else None,
        status.tracking,
        _verified(run),
        left_out_words(status) or metrics.without_a_step,
        dossier_words(status),
    )


def _verified(run: RunDir) -> str | None:
    """The verdict of `quantexp verify` in provenance.json; None if there is none."""
    if not run.provenance.exists():
        return None
    verified = read_provenance(run.provenance).get("verified") or {}
    return verified.get("words")


@dataclass(frozen=True)
class Pace:
    """The last iteration's loss and the run's speed; None if there is no value, or if it is not finite."""

    loss: float | None = None
    tokens_per_s: float | None = None
    #: Seconds until the last iteration ends, at the median step time.
    time_left_s: float | None = None
    #: The words for metrics.jsonl without the last iterations; empty if it has them.
    early_end: str = ""
    #: The words for latest steps that were all left out in fp16; empty if one was taken.
    without_a_step: str = ""


def pace(run: RunDir, status: Status) -> Pace:
    """The pace of a run from its latest iterations; empty if metrics.jsonl has none."""
    has_ended = status.iteration >= status.iterations
    metrics = latest(run, ("tokens_per_s",) if has_ended else ("tokens_per_s", "step_time_s"))
    if metrics.line is None:
        return Pace(early_end=early_end(0, status))
    return Pace(
        _number(metrics.line["loss"]),
        metrics.speed.tokens_per_s,
        time_left_s(status, metrics.speed),
        early_end(metrics.line["iteration"], status),
        metrics.without_a_step,
    )


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None  # type: ignore[arg-type]

"""How a run ended, read from its folder, for those who show it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quantexp.errors import RunError, RunInUseError
from quantexp.runs.metrics import Speed, recent_metrics, speed_of
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, read_json, read_status
from quantexp.schema import Experiment


@dataclass(frozen=True)
class Outcome:
    """How a run ended, from its folder."""

    experiment: Experiment
    run: RunDir
    state: State
    #: Why it failed, or was skipped.
    reason: str = ""
    skipped: bool = False
    #: The last line of metrics.jsonl.
    metrics: dict[str, Any] | None = None
    speed: Speed = field(default_factory=Speed)
    #: Tensors captured, and their bytes.
    tensors: int = 0
    num_bytes: int = 0
    #: precision.json, where the proof got that far.
    precision: dict[str, Any] | None = None
    #: What status.json says of each tracker.
    tracking: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: What the certificates of `quantexp verify` say of the numerics that ran.
    verified: str | None = None


def stopping_words(grace_s: float) -> str:
    """What to say when an end was asked for."""
    return f"stopping: what was captured is written, {grace_s:.0f} s at most; Ctrl-C again ends at once"


def in_use_elsewhere(run: RunDir, where: str) -> RunInUseError:
    """The error for a run that waits or runs in a scheduler."""
    return RunInUseError(
        f"{run.root} is in use: {where}; wait for it, or quantexp cancel {run.root}"
    )


def outcome(
    experiment: Experiment, run: RunDir, skipped: str | None = None, elsewhere: str | None = None
) -> Outcome:
    """What a run folder says; `skipped` and `elsewhere` are as in `Opened`."""
    status, metrics = read_status(run.status), recent_metrics(run)
    if status is None:
        raise RunError(f"{run.root} has no status.json: it is no run folder, or was never started")
    return Outcome(
        experiment,
        run,
        status.state,
        skipped or elsewhere or status.reason,
        skipped is not None,
        metrics[-1] if metrics else None,
        speed_of(metrics),
        status.capture.get("tensors", 0),
        status.capture.get("num_bytes", 0),
        read_json(run.precision) if run.precision.exists() else None,
        status.tracking,
        _verified(run),
    )


def _verified(run: RunDir) -> str | None:
    """What provenance.json says of the verification of what ran; None where it does not."""
    if not run.provenance.exists():
        return None
    known = read_json(run.provenance).get("verified")
    return None if known is None else str(known["words"])

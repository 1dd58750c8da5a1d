"""One side of a comparison: the content of a run folder. Missing files give empty values."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from quantexp.analysis.tensors.run_record import RunNames, names_of
from quantexp.errors import UnreadableError
from quantexp.quant.label import is_unquantised
from quantexp.runs.metrics import LossCurve, Speed, loss_curve, read_metrics, speed_of
from quantexp.runs.paths import RunDir
from quantexp.runs.precision import read_precision
from quantexp.runs.provenance import UNKNOWN_CODE, codes_of, read_provenance
from quantexp.runs.recorded_config import read_config
from quantexp.runs.status import State, Status, read_status

BASELINE = "bf16"
NOT_FINITE, PROOF_FAILED = "not finite", "proof failed"
_UNPROVED = "it was not proved in full, because operands contained NaN or Inf"
_Content = TypeVar("_Content")


@dataclass(frozen=True)
class Side:
    """A run, as far as its folder can be read."""

    run: RunDir
    names: RunNames
    config: Mapping[str, Any]
    losses: LossCurve
    speed: Speed
    #: What verdicts are about: the losses, or another measure of `read_side`.
    measured: LossCurve = field(default_factory=LossCurve)
    measure: str = "loss"
    status: Status | None = None
    provenance: Mapping[str, Any] | None = None
    precision: Mapping[str, Any] | None = None
    #: Messages about files that exist but cannot be read.
    trouble: tuple[str, ...] = ()
    #: The iterations whose step was left out, each with what was not finite.
    left_out: Mapping[int, str] = field(default_factory=dict)

    @property
    def scheme(self) -> str:
        """The scheme's name, or the folder's name if it is unknown."""
        return self.names.scheme or self.names.run

    @property
    def state(self) -> str:
        """The state in status.json; `unreadable` if a file of the run is damaged."""
        if self.trouble:
            return "unreadable"
        return "unknown" if self.status is None else self.status.state.value

    @property
    def last_loss(self) -> str:
        """The loss of the last iteration as text; `not finite` if it is not."""
        finite, nonfinite = self.losses.iterations, self.losses.nonfinite
        if nonfinite and (not finite or nonfinite[-1] > finite[-1]):
            return NOT_FINITE
        return f"{self.losses.losses[-1]:.4f}" if finite else "-"

    @property
    def proof_failures(self) -> list[str]:
        """What was not as declared or could not be proved; empty for a run that is proved, or not proved yet."""
        precision = self.precision or {}
        entries = precision.get("entries") or ()
        wrong = [str(e.get("reason")) for e in entries if e.get("status") == "mismatch"]
        unproved = [_UNPROVED] if precision.get("proved") is False else []
        return list(precision.get("failures") or wrong or unproved)

    @property
    def is_void(self) -> bool:
        """Whether the run never counts as a seed, also beside a run that ended as it did."""
        return self.broke_off in (NOT_FINITE, PROOF_FAILED, State.FAILED.value)

    @property
    def broke_off(self) -> str | None:
        """A failed proof, a last loss that is not finite, `failed`, or the state before the last iteration."""
        status = self.status
        if self.proof_failures:
            return PROOF_FAILED
        if self.last_loss == NOT_FINITE:
            return NOT_FINITE
        if status is None or status.state is State.COMPLETED:
            return None
        is_whole = status.iteration >= status.iterations and status.state is not State.FAILED
        return None if is_whole else status.state.value

    @property
    def codes(self) -> tuple[str, ...]:
        """The digests of the code that made the run, several if it went on with other code.

        A run of an earlier version, which recorded none, has the snapshot of its source.
        """
        provenance = self.provenance or {}
        codes = tuple(dict.fromkeys(digest or UNKNOWN_CODE for digest in codes_of(provenance)))
        snapshot = (provenance.get("source") or {}).get("snapshot")
        return (f"snapshot {snapshot}",) if codes == (UNKNOWN_CODE,) and snapshot else codes

    @property
    def identity(self) -> Mapping[str, Any] | None:
        """The run's identity; None if provenance.json does not have it."""
        content = (self.provenance or {}).get("identity")
        return content if isinstance(content, dict) else None

    @property
    def seed(self) -> int | None:
        """The seed of initial weights and data order."""
        training = self.config.get("training")
        seed = training.get("seed") if isinstance(training, dict) else None
        return seed if isinstance(seed, int) else None

    @property
    def chaos(self) -> int:
        """The number that perturbed the initial weights; 0 if nothing did."""
        training = self.config.get("training")
        chaos = training.get("chaos") if isinstance(training, dict) else None
        return chaos if isinstance(chaos, int) else 0

    @property
    def maps(self) -> dict[int, list[Mapping[str, Any]]]:
        """The declared precision map by the iterations at which it changes; empty if it is unknown."""
        declared = (self.identity or {}).get("scheme")
        if isinstance(declared, list) and declared:
            return {int(iteration): list(entries) for iteration, entries in declared}
        entries = (self.precision or {}).get("entries")
        return {1: list(entries)} if isinstance(entries, list) else {}

    @property
    def is_baseline(self) -> bool:
        """Whether the run quantises nothing and begins with its own initial weights."""
        return self.quantises_nothing and not self.chaos

    @property
    def is_perturbed(self) -> bool:
        """Whether the run quantises nothing and differs from a baseline by chance alone."""
        return self.quantises_nothing and self.chaos > 0

    @property
    def quantises_nothing(self) -> bool:
        """According to the map, or to the name if there is no map."""
        maps = self.maps
        if maps:
            return all(e.get("format") == BASELINE for entries in maps.values() for e in entries)
        return is_unquantised(self.names.scheme or "")


def read_side(
    run: RunDir, measure: str = "loss", lines: Sequence[Mapping[str, Any]] | None = None
) -> Side:
    """Read a run folder; `trouble` names damaged files, each with what is wrong.

    `measure` is the key of metrics.jsonl that verdicts are about. `lines` stand for all lines of metrics.jsonl, which
    is then not read.
    """
    trouble: list[str] = []

    def read(reader: Callable[[], _Content]) -> _Content | None:
        try:
            return reader()
        except UnreadableError as error:
            trouble.append(str(error))
            return None

    def read_file(reader: Callable[[Path], _Content], file: Path) -> _Content | None:
        return read(lambda: reader(file)) if os.path.lexists(file) else None

    config = read(lambda: read_config(run)) or {}
    status = read(lambda: read_status(run.status))  # before the lines, which are written first
    metrics = lines if lines is not None else read(lambda: read_metrics(run)) or []
    return Side(
        run,
        names_of(run, config),
        config,
        loss_curve(metrics),
        speed_of(metrics),
        loss_curve(metrics, measure),
        measure,
        status,
        read_file(read_provenance, run.provenance),
        read_file(read_precision, run.precision),
        tuple(trouble),
        {line["iteration"]: str(line.get("nonfinite")) for line in metrics if line.get("skipped")},
    )

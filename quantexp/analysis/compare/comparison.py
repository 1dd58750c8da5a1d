"""Compares runs with their baselines: the rows of a comparison, its warnings, and its JSON.

The baseline of a run is a bf16 run of the same model and data (`quantexp.analysis.compare.baseline`). A run that has
none has no gap, and a warning says why; what differs is then told from the first run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from quantexp.analysis.compare.baseline import baseline_of, how_to_make_one
from quantexp.analysis.compare.gap import Gap, gap_to
from quantexp.analysis.compare.labels import NOT_COMPARED, labels_of
from quantexp.analysis.compare.leaves import Difference, differing
from quantexp.analysis.compare.matched import Mismatch, code_words, in_words, last_iteration
from quantexp.analysis.compare.precision import PrecisionChange, precision_changes
from quantexp.analysis.compare.side import Side
from quantexp.errors import RunError
from quantexp.processes.machine import ranges
from quantexp.runs.find import Missing
from quantexp.runs.metrics import LossCurve, early_end

#: In nats: two equal gaps differ by less, because a subtraction rounds; and two gaps of losses in float32 that are
#: all smaller may be equal by chance, or because the scheme changes nothing.
_ROUNDING, _COMMON = 1e-9, 1e-5


@dataclass(frozen=True)
class Row:
    """One run and its baseline."""

    #: The run's label: its scheme, and the options that distinguish it from the others.
    label: str
    side: Side
    #: The place among the rows of the run it is held against: its baseline, its own for a baseline, and the first
    #: run's where it has none.
    baseline: int
    #: Why there is no baseline; None if there is one.
    lacks: str | None
    mismatches: tuple[Mismatch, ...]
    gap: Gap | None
    config: tuple[Difference, ...]
    precision: tuple[PrecisionChange, ...]
    #: The label of an earlier row that has the same numbers under another seed, or under the same identity, so that
    #: both are one run.
    same_as: str | None = None

    @property
    def matched(self) -> bool:
        """Whether the gap is due to the scheme alone, apart from noise."""
        return self.lacks is None and not self.mismatches

    @property
    def is_baseline(self) -> bool:
        """Whether the run is a bf16 run and can be a baseline."""
        return self.side.is_baseline

    @property
    def is_perturbed(self) -> bool:
        """Whether the run is a bf16 run from perturbed initial weights, whose gap is chance."""
        return self.side.is_perturbed


@dataclass(frozen=True)
class Comparison:
    """A comparison of runs."""

    rows: tuple[Row, ...]
    #: Warnings about runs that are missing, not matched, not finished or not proved.
    warnings: tuple[str, ...]


def compare(
    sides: Sequence[Side], missing: Sequence[Missing] = (), *, is_compared: bool = True
) -> Comparison:
    """Compare runs with their baselines, in the order given.

    Where a run is only shown, not compared (`is_compared` is false), it may lack a baseline without a warning.

    Raises:
        RunError: there is no run.
    """
    if not sides:
        raise RunError("there is no run to compare; give runs, a sweep's list or a folder of runs")
    labels = labels_of(sides)
    rows = _with_repeats([_row(labels, sides, i) for i in range(len(sides))])
    gone = [f"{_missing(one)}: {one.reason}" for one in missing]
    return Comparison(rows, (*gone, *_warnings(rows, is_compared)))


def _row(labels: Sequence[str], sides: Sequence[Side], i: int) -> Row:
    side = sides[i]
    pair = (i, []) if side.is_baseline else baseline_of(side, sides)
    lacks, (place, mismatches) = (pair, (0, [])) if isinstance(pair, str) else (None, pair)
    baseline = sides[place]
    return Row(
        labels[i],
        side,
        place,
        lacks,
        tuple(mismatches),
        None if lacks else gap_to(side.losses, baseline.losses),
        tuple(_config(side, baseline)),
        tuple(
            precision_changes(
                side.maps, baseline.maps, side.names.precision, baseline.names.precision
            )
        ),
    )


def _with_repeats(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows, those that repeat an earlier one, or one not perturbed, with its label."""
    order = sorted(range(len(rows)), key=lambda i: rows[i].is_perturbed)
    same_as: dict[int, str | None] = {}
    for i in order:
        earlier = (rows[j] for j in same_as if _is_same_run(rows[i], rows[j]))
        same_as[i] = next((row.label for row in earlier), None)
    return tuple(replace(row, same_as=same_as[i]) for i, row in enumerate(rows))


def _is_same_run(row: Row, other: Row) -> bool:
    """Whether two seeds of a scheme have equal losses or equal gaps, or two folders one identity and equal losses."""
    here, there = row.side, other.side
    if here.scheme != there.scheme:
        return False
    if (here.seed, here.chaos) == (there.seed, there.chaos):
        is_one = here.identity is not None and here.identity == there.identity
        return is_one and here.codes == there.codes and _is_same_curve(here.losses, there.losses)
    if _is_same_curve(here.losses, there.losses):
        return True
    if row.gap is None or other.gap is None or max(map(abs, row.gap.gaps)) < _COMMON:
        return False
    gaps, theirs = (LossCurve(gap.iterations, gap.gaps) for gap in (row.gap, other.gap))
    return _is_same_curve(gaps, theirs, _ROUNDING)


def _is_same_curve(here: LossCurve, there: LossCurve, tolerance: float = 0.0) -> bool:
    """Whether two curves are equal in all iterations that both have, at least one."""
    pairs: Iterator[tuple[float, float]]
    if here.iterations == there.iterations:
        pairs = zip(here.losses, there.losses, strict=True)
    else:
        theirs = dict(zip(there.iterations, there.losses, strict=True))
        mine = zip(here.iterations, here.losses, strict=True)
        pairs = iter([(loss, theirs[i]) for i, loss in mine if i in theirs])
    first = next(pairs, None)
    if first is None or abs(first[0] - first[1]) > tolerance:
        return False
    return all(abs(one - other) <= tolerance for one, other in pairs)


def _config(side: Side, baseline: Side) -> list[Difference]:
    return [
        difference
        for difference in differing(side.config, baseline.config)
        if difference.key.partition(".")[0] not in NOT_COMPARED
    ]


def _missing(one: Missing) -> str:
    quant = (one.config or {}).get("quant")
    scheme = quant.get("name") if isinstance(quant, dict) else None
    return str(scheme or one.name)


def _warnings(rows: Sequence[Row], is_compared: bool) -> list[str]:
    warnings = _without_baseline(rows) if is_compared else []
    for row in rows:
        warnings += [f"{row.label}: {words}" for words in row.side.trouble]
        if row.side.state != "completed":
            reason = row.side.status.reason if row.side.status else ""
            at = f" at iteration {last_iteration(row.side)}"
            warnings.append(f"{row.label} is {row.side.state}{at}{': ' if reason else ''}{reason}")
        if words := early_end(last_iteration(row.side), row.side.status):
            warnings.append(f"{row.label}: {words}")
        if missing := _missing_between(row.side.losses):
            warnings.append(
                f"{row.label}: metrics.jsonl has no loss of iterations {ranges(missing)}"
            )
        if repeated := sorted({*row.side.losses.repeated, *row.side.measured.repeated}):
            warnings.append(
                f"{row.label}: metrics.jsonl has iterations more than once, of which the last line counts: "
                f"{ranges(repeated)}"
            )
        if row.same_as is not None:
            warnings.append(
                f"{row.label} has the numbers of {row.same_as}: they are the same run, which counts once"
            )
        if failures := row.side.proof_failures:
            more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
            warnings.append(
                f"{row.label} failed its proof, so it counts as no seed: {failures[0]}{more}"
            )
        elif not (row.side.precision or {}).get("proved"):
            warnings.append(f"{row.label} has no proof that its precision map was in force")
        if row.side.measure != "loss" and not row.side.measured.iterations:
            warnings.append(f"{row.label} has recorded no {row.side.measure}")
        for measure, curve in {
            "loss": row.side.losses,
            row.side.measure: row.side.measured,
        }.items():
            if curve.nonfinite:
                warnings.append(
                    f"{row.label}: iterations whose {measure} was not finite are left out: {ranges(curve.nonfinite)}"
                )
    return [*warnings, *_different_code(rows), *_unmatched(rows)]


def _missing_between(curve: LossCurve) -> list[int]:
    """The iterations between the first and the last that have no value, finite or not."""
    iterations = {*curve.iterations, *curve.nonfinite}
    if not iterations:
        return []
    return [i for i in range(min(iterations), max(iterations)) if i not in iterations]


def _different_code(rows: Sequence[Row]) -> list[str]:
    """One warning if several codes made the runs."""
    codes = dict.fromkeys(code_words(row.side) for row in rows)
    if len(codes) < 2:
        return []
    return [
        "these runs were made by different code, which can change numbers; their labels have it: "
        + ", ".join(codes)
    ]


def _without_baseline(rows: Sequence[Row]) -> list[str]:
    """Each reason for a missing baseline once, with its runs and the command that creates one."""
    lacking: dict[str, list[Row]] = {}
    for row in rows:
        if row.lacks is not None:
            reason = f"{row.lacks}; {how_to_make_one(row.side)}"
            lacking.setdefault(reason, []).append(row)
    return [
        f"{', '.join(row.label for row in lacking[reason])}: no baseline, so no gap: {reason}"
        for reason in lacking
    ]


def _unmatched(rows: Sequence[Row]) -> list[str]:
    """Each kind of mismatch once, with its runs."""
    names: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.mismatches:
            key = (rows[row.baseline].label, in_words(row.mismatches))
            names.setdefault(key, []).append(row.label)
    return [
        f"{', '.join(labels)} and {baseline} are not a matched pair, so the gap is not the scheme's alone: {why}"
        for (baseline, why), labels in names.items()
    ]


def record(comparison: Comparison) -> dict[str, Any]:
    """What `--json` has of a comparison."""
    rows = comparison.rows
    return {
        "warnings": list(comparison.warnings),
        "runs": [_row_record(row, rows[row.baseline]) for row in rows],
    }


def _last_loss(side: Side) -> float | None:
    """The last iteration's loss; None if it is not finite or missing."""
    iterations = side.losses.iterations
    at_the_end = iterations and iterations[-1] == last_iteration(side)
    return side.losses.losses[-1] if at_the_end else None


def _row_record(row: Row, baseline: Row) -> dict[str, Any]:
    side, gap = row.side, row.gap
    return {
        "label": row.label,
        "run": side.run.root.name,
        "path": str(side.run.root),
        "model": side.names.model,
        "model_label": side.names.model_label,
        "dataset": side.names.dataset,
        "scheme": side.names.scheme,
        "seed": side.seed,
        "code": list(side.codes),
        "state": side.state,
        "iteration": last_iteration(side),
        "loss": _last_loss(side),
        "proved": (side.precision or {}).get("proved"),
        "is_baseline": row.is_baseline,
        "baseline": None if row.lacks else baseline.side.run.root.name,
        "no_baseline": row.lacks,
        "matched": row.matched,
        "mismatches": [asdict(mismatch) for mismatch in row.mismatches],
        "gap": None
        if gap is None
        else {
            "iteration": gap.iteration,
            "last": gap.last,
            "late": gap.late,
            "num_late": gap.num_late,
        },
        "speed": asdict(side.speed),
        "config": [difference._asdict() for difference in row.config],
        "precision": [asdict(change) for change in row.precision],
        "losses": asdict(side.losses),
    }

"""The plan of a design: what is missing, its time and bytes, and the smallest gap that the whole design detects.

time     of a branch, the mean of those that have run here; before, from the speed of the runs, without quantisation
bytes    of a branch's folder, likewise; before, the run's configuration and proof
gap      from the spread over seeds of the units that have run; not known before two seeds have
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich.console import Console

from quantexp.extras.resolve.design import Branch, Design
from quantexp.extras.resolve.outcome import Measure, outcome_of
from quantexp.extras.resolve.power import smallest_gap
from quantexp.extras.resolve.results import Line
from quantexp.extras.resolve.table import UNIT, in_units
from quantexp.launch.duration import about
from quantexp.model.sizes import flops_per_iteration
from quantexp.runs.metrics import read_metrics
from quantexp.runs.paths import RunDir
from quantexp.terminal.facts import Facts
from quantexp.terminal.fitted_table import Column, fitted_table
from quantexp.terminal.units import human_bytes

_COLUMNS = (
    Column("scheme"),
    Column("steps", is_number=True),
    Column("detects", is_number=True),
    Column("under the scheme", is_number=True),
)


@dataclass(frozen=True)
class _Price:
    """Of one branch."""

    seconds: float | None
    bytes: float | None
    is_recorded: bool


def plan_of(
    design: Design, missing: Sequence[Branch], results: Mapping[str, Line], margin: float
) -> dict[str, Any]:
    """The plan, as `--json` prints it."""
    price = _price(design, results)
    seconds, size = price.seconds, price.bytes
    parallel = min(design.launcher.max_parallel or 1, len(design.bases))
    return {
        "runs": [str(base.run.root) for base in design.bases],
        "seeds": [base.seed for base in design.bases],
        "checkpoints": list(design.checkpoints),
        "arms": [arm.name for arm in design.arms],
        "steps": list(design.steps),
        "warm_up": design.warm_up,
        "held_out_tokens": design.tokens,
        "held_out_sequences": design.sequences_in_all,
        "branches": len(design.branches),
        "missing": len(missing),
        "cpu_s": None if seconds is None else seconds * len(missing),
        "processes": parallel,
        "is_recorded": price.is_recorded,
        "bytes": None if size is None else round(size * len(missing)),
        "smallest_gaps": _gaps(design, results, margin),
    }


def _price(design: Design, results: Mapping[str, Line]) -> _Price:
    done = [branch for branch in design.branches if design.has(branch, results)]
    if done:
        seconds = fmean(results[branch.name]["cpu_s"] for branch in done)
        return _Price(seconds, fmean(_bytes(branch.run) for branch in done), is_recorded=True)
    base = design.bases[0]
    times = [line.get("step_time_s") for line in read_metrics(base.run)]
    known = sorted(time for time in times if time is not None)
    size = sum(f.stat().st_size for f in (base.run.config, base.run.precision) if f.is_file())
    if not known:
        return _Price(None, size, is_recorded=False)
    training = base.experiment.training
    trained = flops_per_iteration(
        base.experiment.model, training.seq_length, training.global_batch_size
    )
    evaluated = flops_per_iteration(base.experiment.model, training.seq_length, design.sequences)
    steps = design.warm_up + design.steps[-1] + 2 * len(design.steps) * evaluated / 3 / trained
    return _Price(known[len(known) // 2] * steps, size, is_recorded=False)


def _bytes(run: RunDir) -> int:
    return sum(file.stat().st_size for file in run.root.rglob("*") if file.is_file())


def _gaps(design: Design, results: Mapping[str, Line], margin: float) -> list[dict[str, Any]]:
    """For each scheme and horizon the gap that all seeds of the design detect; None where it is not known."""
    outcome = outcome_of(design, results, margin)
    number = len(design.bases)
    pairs = zip(*(outcome.schemes[measure] for measure in Measure), strict=True)
    return [
        {
            "scheme": working.scheme,
            "steps": working.steps,
            **{
                measure.value: None
                if each.deviation is None or number < 2
                else smallest_gap(each.deviation, number)
                for measure, each in zip(Measure, (working, scheme), strict=True)
            },
            "seeds_recorded": len(working.gaps),
        }
        for working, scheme in pairs
    ]


def print_plan(plan: Mapping[str, Any], console: Console) -> None:
    """Print the plan of a dry run."""
    facts = Facts(console)
    seeds, checkpoints = len(plan["seeds"]), len(plan["checkpoints"])
    facts.add_row("units", f"{seeds} seeds x {checkpoints} checkpoints ({_listed(plan)})")
    facts.add_row("branches", f"{plan['branches']:,}, of which {plan['missing']:,} are missing")
    facts.add_row("arms", ", ".join(plan["arms"]))
    after = f", after a warm-up of {plan['warm_up']}" if plan["warm_up"] else ""
    facts.add_row("steps", ", ".join(map(str, plan["steps"])) + after)
    text = f"{plan['held_out_tokens']:,} tokens for each unit"
    facts.add_row("held-out text", f"{text}, {plan['held_out_sequences']:,} sequences in all")
    facts.add_row("time", time_words(plan))
    facts.add_row("disk", "not known" if plan["bytes"] is None else human_bytes(plan["bytes"]))
    facts.print()
    rows = [
        [each["scheme"], str(each["steps"]), *(_gap(each[m.value]) for m in Measure)]
        for each in plan["smallest_gaps"]
    ]
    title = "the smallest gap that the design detects"
    console.print(fitted_table(_COLUMNS, rows, console.width, title).table)
    known = plan["smallest_gaps"][0]["seeds_recorded"]
    note = f"in units of {UNIT:g} nats a token, power 0.8, two-sided 5%, one comparison"
    console.print(f"{note}; spread of {known} seeds that have run", style="dim italic")


def _listed(plan: Mapping[str, Any]) -> str:
    return ", ".join(map(str, plan["checkpoints"]))


def _gap(nats: float | None) -> str:
    return "not known" if nats is None else in_units(nats).lstrip("+")


def time_words(plan: Mapping[str, Any]) -> str:
    """How long the processes of a plan take."""
    if plan["cpu_s"] is None:
        return "not known: the runs recorded no speed"
    at_once = plan["processes"]
    words = about(math.ceil(plan["cpu_s"] / at_once))
    beside = f" in {at_once} processes" if at_once > 1 else ""
    source = "as recorded here" if plan["is_recorded"] else "at least, at the speed of the runs"
    return f"{words}{beside}, {source}"

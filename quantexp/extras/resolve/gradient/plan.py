"""The plan of a comparison of gradients: passes, time, memory, and the smallest ratio of errors that it detects.

time     of a pass, the mean of those that have run here; before, that of a step of the runs, without quantisation
memory   the gradients in fp32 of all batches of a checkpoint, and the sums of an arm, besides those of a training
ratio    from the spread over seeds of the units that have run; not known before two seeds have
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.console import Console

from quantexp.extras.resolve.design import Branch
from quantexp.extras.resolve.gradient.design import GradientDesign
from quantexp.extras.resolve.gradient.outcome import Measure, outcome_of
from quantexp.extras.resolve.gradient.results import RAW, Line
from quantexp.extras.resolve.plan import time_words
from quantexp.extras.resolve.power import smallest_gap
from quantexp.model.sizes import num_parameters
from quantexp.runs.metrics import read_metrics
from quantexp.terminal.facts import Facts
from quantexp.terminal.fitted_table import Column, fitted_table
from quantexp.terminal.units import human_bytes

#: Bytes of a parameter: a gradient of a batch in float32, and two sums and a weight in float64 and float32.
_BYTES_A_BATCH, _BYTES_OF_SUMS = 4, 28


def plan_of(
    design: GradientDesign, missing: Sequence[Branch], results: Mapping[str, Line], margin: float
) -> dict[str, Any]:
    """The plan, as `--json` prints it."""
    units = {(branch.unit.base.seed, branch.unit.checkpoint) for branch in missing}
    passes = sum(map(design.num_passes, missing)) + len(units) * design.batches
    done = [branch for branch in design.branches if design.has(branch, results)]
    seconds: float | None = None
    if done:
        own = {(branch.unit.base.seed, branch.unit.checkpoint) for branch in done}
        number = sum(map(design.num_passes, done)) + len(own) * design.batches
        seconds = sum(results[branch.name]["cpu_s"] for branch in done) / number
    else:
        times = [line.get("step_time_s") for line in read_metrics(design.bases[0].run)]
        known = [time for time in times if time is not None]
        seconds = median(known) if known else None
    size = num_parameters(design.bases[0].experiment.model)
    return {
        "runs": [str(base.run.root) for base in design.bases],
        "seeds": [base.seed for base in design.bases],
        "checkpoints": list(design.checkpoints),
        "arms": [arm.name for arm in design.arms],
        "batches": design.batches,
        "draws": design.draws,
        "by": list(design.by),
        "tokens": design.tokens,
        "passes": passes,
        "missing": len(missing),
        "cpu_s": None if seconds is None else seconds * passes,
        "processes": min(design.launcher.max_parallel or 1, len(design.bases)),
        "is_recorded": bool(done),
        "memory_bytes": size * (design.batches * _BYTES_A_BATCH + _BYTES_OF_SUMS),
        "smallest_ratios": _ratios(design, results, margin),
    }


def _ratios(
    design: GradientDesign, results: Mapping[str, Line], margin: float
) -> dict[str, float | None]:
    """By scheme, the ratio of raw errors to that of the baseline that all seeds detect; None where it is not known."""
    verdicts = outcome_of(design, results, margin).verdicts.get(RAW, {}).get(Measure.ERROR, ())
    known = {
        each.scheme: math.exp(smallest_gap(each.deviation, len(design.bases)))
        for each in verdicts
        if each.deviation is not None
    }
    return {arm.name: known.get(arm.name) for arm in design.arms[1:]}


def print_plan(plan: Mapping[str, Any], console: Console) -> None:
    """Print the plan of a dry run."""
    facts = Facts(console)
    seeds, checkpoints = len(plan["seeds"]), plan["checkpoints"]
    listed = ", ".join(map(str, checkpoints))
    facts.add_row("units", f"{seeds} seeds x {len(checkpoints)} checkpoints ({listed})")
    facts.add_row("arms", f"{', '.join(plan['arms'])}; {plan['missing']:,} are missing in all")
    facts.add_row("alone", ", ".join(plan["by"]) or "none")
    facts.add_row("batches", f"{plan['batches']} for each unit, {plan['tokens']:,} tokens")
    facts.add_row("draws", str(plan["draws"]))
    facts.add_row("passes", f"{plan['passes']:,}")
    facts.add_row("time", time_words(plan))
    memory = human_bytes(plan["memory_bytes"])
    facts.add_row("memory", f"{memory} for each process, besides that of a training")
    facts.print()
    columns = (Column("scheme"), Column("detects", is_number=True))
    rows = [
        [name, "not known" if ratio is None else f"x{ratio:.3g}"]
        for name, ratio in plan["smallest_ratios"].items()
    ]
    title = "the smallest ratio of errors that the design detects"
    console.print(fitted_table(columns, rows, console.width, title).table)
    console.print("raw; power 0.8, two-sided 5%, one comparison", style="dim italic")

"""The tables of `quantexp branch` and its `--json`: a line for each scheme and horizon."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from quantexp.analysis.compare.noise import FEWEST_ALONE
from quantexp.extras.resolve.judging import Judgement, Verdict
from quantexp.extras.resolve.outcome import Measure, Outcome
from quantexp.terminal.fitted_table import Column, Shrink, fitted_table

#: The unit of the tables, in nats.
UNIT = 1e-4
_COLUMNS = (
    Column("scheme", shrink=Shrink.CUT_START),
    Column("steps", is_number=True),
    Column("difference", is_number=True),
    Column("95% interval", is_number=True),
    Column("detects", worth=2, is_number=True),
    Column("verdict", shrink=Shrink.WRAP, min_width=18),
)
TITLES = {
    Measure.WORKING: "with nothing quantised",
    Measure.SCHEME: "under the scheme",
}
COLOURS = {Verdict.ABOVE: "red", Verdict.BELOW: "cyan", Verdict.EQUIVALENT: "green"}


def print_outcome(outcome: Outcome, console: Console) -> None:
    """Print a table for each measure, one for the controls, and what the columns mean."""
    design = outcome.design
    for measure, title in TITLES.items():
        _print(outcome.schemes[measure], f"held-out loss {title}, to {design.against}", console)
    if outcome.controls:
        _print(outcome.controls, f"controls, {TITLES[Measure.WORKING]}", console)
    for line in _notes(outcome):
        console.print(line, style="dim italic", markup=False)


def _print(judgements: Sequence[Judgement], title: str, console: Console) -> None:
    rows = [_cells(each) for each in judgements]
    console.print(fitted_table(_COLUMNS, rows, console.width, title).table)
    console.print()


def _cells(each: Judgement) -> list[str]:
    low_high = "-" if each.interval is None else " to ".join(map(in_units, each.interval))
    gap = each.smallest_gap
    colour = COLOURS.get(each.verdict)
    words = escape(verdict_words(each))
    return [
        escape(each.scheme),
        str(each.steps),
        "-" if each.mean is None else in_units(each.mean),
        low_high,
        "-" if gap is None else in_units(gap).lstrip("+"),
        words if colour is None else f"[{colour}]{words}[/]",
    ]


def in_units(nats: float) -> str:
    """`+2.5` for 0.00025 nats."""
    value = nats / UNIT
    return f"{value:+.0f}" if abs(value) >= 100 else f"{value:+.2f}"


def verdict_words(each: Judgement) -> str:
    """The verdict with its reason, and what would tell."""
    more = each.more_seeds
    seeds = "" if more is None else f"{more} more seed{'s' * (more > 1)}"
    if each.verdict is Verdict.CANNOT_BE_TOLD and more is None and not each.note:
        seeds = "over 100 seeds"
    reason = "; ".join(filter(None, (each.note, seeds)))
    return f"{each.verdict.value} ({reason})" if reason else each.verdict.value


def _notes(outcome: Outcome) -> list[str]:
    design = outcome.design
    units = min(each.num_units for each in outcome.schemes[Measure.WORKING])
    branches = len(design.branches)
    return [
        f"in units of {UNIT:g} nats a token; {len(design.bases)} seeds x {len(design.checkpoints)} checkpoints, "
        f"{units} units whole; {design.tokens:,} held-out tokens each",
        f"interval over seeds; above and below hold for all of a table together (Holm), from {FEWEST_ALONE} seeds on",
        f"equivalent: less than {outcome.margin / UNIT:g} either way (--margin), by two one-sided tests",
        "detects: the gap that this spread detects with power 0.8 at two-sided 5%, one comparison",
        f"{outcome.cpu_s / 60:.1f} CPU minutes for {branches} branches",
    ]


def record(outcome: Outcome) -> dict[str, Any]:
    """The output of `--json`; nats a token."""
    design = outcome.design
    return {
        "against": design.against,
        "seeds": [base.seed for base in design.bases],
        "checkpoints": list(design.checkpoints),
        "steps": list(design.steps),
        "held_out_tokens": design.tokens,
        "margin": outcome.margin,
        "cpu_s": outcome.cpu_s,
        **{each.value: list(map(plain, outcome.schemes[each])) for each in Measure},
        "controls": list(map(plain, outcome.controls)),
    }


def plain(each: Judgement) -> dict[str, Any]:
    """A judgement in `--json`."""
    return {
        "scheme": each.scheme,
        "steps": each.steps,
        "units": each.num_units,
        "gaps": {str(seed): gap for seed, gap in each.gaps.items()} if each.is_finite else None,
        "difference": each.mean,
        "interval": each.interval,
        "deviation": each.deviation,
        "smallest_gap": each.smallest_gap,
        "p": each.p_value,
        "p_holm": each.p_holm,
        "p_equivalent": each.p_equivalent,
        "p_equivalent_holm": each.p_equivalent_holm,
        "verdict": each.verdict.value,
        "note": each.note,
        "more_seeds": each.more_seeds,
    }

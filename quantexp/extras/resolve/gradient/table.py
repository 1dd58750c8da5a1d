"""The tables of `quantexp gradient` and its `--json`: errors of each scheme and its parts, then verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from quantexp.analysis.compare.noise import FEWEST_ALONE
from quantexp.extras.resolve.gradient.outcome import JUDGED, Measure, Number, Outcome, Row
from quantexp.extras.resolve.gradient.results import ADAM, RAW, WHOLE
from quantexp.extras.resolve.judging import Judgement
from quantexp.extras.resolve.table import COLOURS, plain, verdict_words
from quantexp.terminal.fitted_table import Column, Shrink, fitted_table

TITLES = {RAW: "raw", ADAM: "divided by Adam's root v"}
_ERRORS = (
    Column("quantised", shrink=Shrink.CUT_START),
    Column("error", is_number=True),
    Column("95% interval", is_number=True, worth=6),
    Column("cosine", is_number=True, worth=3),
    Column("squared bias", is_number=True),
    Column("95% interval", is_number=True, worth=5),
    Column("variance", is_number=True, worth=4),
    Column("of draws", is_number=True, worth=2),
)
_VERDICTS = (
    Column("scheme", shrink=Shrink.CUT_START),
    Column("measure"),
    Column("difference", is_number=True),
    Column("95% interval", is_number=True),
    Column("detects", worth=2, is_number=True),
    Column("verdict", shrink=Shrink.WRAP, min_width=18),
)


def print_outcome(outcome: Outcome, console: Console) -> None:
    """Print for each scaling the errors and the verdicts, then what the columns mean."""
    for scaling, rows in outcome.rows.items():
        title = f"gradient against fp32's, {TITLES[scaling]}"
        cells = [_error_cells(row) for row in rows]
        console.print(fitted_table(_ERRORS, cells, console.width, title).table)
        console.print()
    for scaling, measures in outcome.verdicts.items():
        each = zip(*(measures[measure] for measure in JUDGED), strict=True)
        cells = [
            _verdict_cells(one, measure)
            for scheme in each
            for measure, one in zip(JUDGED, scheme, strict=True)
        ]
        title = f"to {outcome.design.against}, {TITLES[scaling]}"
        console.print(fitted_table(_VERDICTS, cells, console.width, title).table)
        console.print()
    for line in _notes(outcome):
        console.print(line, style="dim italic", markup=False)


def _error_cells(row: Row) -> list[str]:
    numbers = row.numbers[0]
    name = escape(row.scheme) if row.part == WHOLE else f"  {escape(row.part)}"
    error, bias = numbers[Measure.ERROR], numbers[Measure.BIAS]
    cosine = numbers[Measure.COSINE].mean
    return [
        name,
        _digits(error.mean),
        _between(error.interval),
        "-" if cosine is None else f"{cosine:.5f}",
        _digits(bias.mean),
        _between(bias.interval),
        _digits(numbers[Measure.VARIANCE].mean),
        _digits(numbers[Measure.DRAWS].mean),
    ]


def _digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _between(bounds: tuple[float, float] | None) -> str:
    return "-" if bounds is None else " to ".join(map(_digits, bounds))


def _verdict_cells(each: Judgement, measure: Measure) -> list[str]:
    def shown(value: float | None) -> str:
        if value is None:
            return "-"
        return f"x{math.exp(value):.3g}" if measure is Measure.ERROR else f"{value:+.2g}"

    words, colour = escape(verdict_words(each)), COLOURS.get(each.verdict)
    return [
        escape(each.scheme),
        measure.value,
        shown(each.mean),
        "-" if each.interval is None else " to ".join(map(shown, each.interval)),
        shown(each.smallest_gap).lstrip("+"),
        words if colour is None else f"[{colour}]{words}[/]",
    ]


def _notes(outcome: Outcome) -> list[str]:
    design = outcome.design
    units = min((j.num_units for m in outcome.verdicts.values() for j in m[JUDGED[0]]), default=0)
    signal = ", ".join(
        f"{_digits(number.mean)} {TITLES[scaling]}" for scaling, number in outcome.signal.items()
    )
    return [
        "error: |g - r| / |r|, g under the scheme and r in fp32; its square in a unit is squared bias + variance",
        f"{len(design.bases)} seeds x {len(design.checkpoints)} checkpoints, {units} units whole; {design.batches} "
        f"batches each, {design.tokens:,} tokens",
        f"share of r that all batches have in common (squared): {signal or '-'}",
        "difference: the ratio of errors; of bias and variance in parts of the squared error of "
        f"{design.against}",
        f"above and below hold for all schemes of a measure together (Holm), from {FEWEST_ALONE} seeds on",
        f"equivalent: less than {outcome.margin:g} either way (--margin), by two one-sided tests",
        f"{outcome.cpu_s / 60:.1f} CPU minutes for {len(design.branches)} arms",
    ]


def record(outcome: Outcome) -> dict[str, Any]:
    """The output of `--json`."""
    design = outcome.design
    return {
        "against": design.against,
        "seeds": [base.seed for base in design.bases],
        "checkpoints": list(design.checkpoints),
        "batches": design.batches,
        "draws": design.draws,
        "by": list(design.by),
        "tokens": design.tokens,
        "margin": outcome.margin,
        "cpu_s": outcome.cpu_s,
        "groups": list(outcome.groups),
        "signal": {scaling: _number(x) for scaling, x in outcome.signal.items()},
        "errors": {
            scaling: [_row(row, outcome.groups) for row in rows]
            for scaling, rows in outcome.rows.items()
        },
        "verdicts": {
            scaling: {m.value: [_judged(each) for each in own] for m, own in measures.items()}
            for scaling, measures in outcome.verdicts.items()
        },
    }


def _row(row: Row, groups: Sequence[str]) -> dict[str, Any]:
    whole, *others = row.numbers
    return {
        "scheme": row.scheme,
        "part": row.part or None,
        **_numbers(whole),
        "groups": {name: _numbers(own) for name, own in zip(groups, others, strict=True)},
    }


def _numbers(numbers: Mapping[Measure, Number]) -> dict[str, Any]:
    return {measure.value: _number(each) for measure, each in numbers.items()}


def _number(number: Number) -> dict[str, Any]:
    by_seed = {str(s): v if math.isfinite(v) else None for s, v in number.by_seed.items()}
    return {"mean": number.mean, "interval": number.interval, "by_seed": by_seed}


def _judged(each: Judgement) -> dict[str, Any]:
    return {key: value for key, value in plain(each).items() if key != "steps"}

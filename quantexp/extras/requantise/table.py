"""Prints the table of slots and formats."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from quantexp.extras.requantise.candidates import Candidate
from quantexp.extras.requantise.recommend import Choice, in_order
from quantexp.extras.requantise.tally import Tally, Worst, best_of_formats
from quantexp.formats import Format, Hadamard, get_format
from quantexp.quant.label import HIGH
from quantexp.quant.scheme import SCHEME_FORMATS
from quantexp.terminal.console import plain
from quantexp.terminal.fitted_table import Column, Shrink, fitted_table

#: Marks an SQNR that needs a Hadamard transform.
_MARKS = {Hadamard.NONE: "", Hadamard.DETERMINISTIC: " H", Hadamard.RANDOM: " R"}
LEGEND = (
    "Each cell is the worst of the slot's tensors under the format's best options: SQNR in dB (H with a deterministic, "
    "R with a random Hadamard transform), below it % of the non-zero elements that became zero / % saturated."
)


def print_table(
    tally: Tally, choices: Sequence[Choice], formats: Sequence[Format], console: Console
) -> None:
    """A row for each module and slot, a column for each format that there is room for, and what is recommended."""
    ranked = _by_worth(choices, formats)
    columns = [
        Column("module"),
        Column("slot"),
        *(Column(_heading(fmt), worth=ranked.index(fmt), is_number=True) for fmt in formats),
        Column("recommended", shrink=Shrink.WRAP),
    ]
    chosen = {(one.module, one.slot): one for one in choices}
    rows: list[list[str | Text]] = []
    for place in in_order(choices, tally.places()):
        best = best_of_formats(tally.work.candidates, tally.worst[place])
        cells = [_cell(*best[fmt]) for fmt in formats]
        choice = chosen[place.module, place.slot]
        rows.append(
            [plain(place.module), str(place.slot), *cells, plain(recommended_words(choice))]
        )
    fitted = fitted_table(columns, rows, console.width)
    console.print(fitted.table)
    left_out = [fmt.name for fmt in formats if _heading(fmt) in fitted.left_out]
    if left_out:
        console.print(f"No room in {console.width} columns for {', '.join(left_out)}.")
    console.print(LEGEND)


def _by_worth(choices: Sequence[Choice], formats: Sequence[Format]) -> list[Format]:
    """Formats from the least worth: those recommended more often are worth more, then those of the ten schemes."""
    chosen = Counter(one.candidate.format for one in choices if one.candidate is not None)
    of_schemes = [get_format(name) for name in SCHEME_FORMATS]
    return sorted(formats, key=lambda fmt: (chosen[fmt], fmt in of_schemes, -formats.index(fmt)))


def _heading(fmt: Format) -> str:
    return fmt.name.replace("_", "\n")


def recommended_words(choice: Choice) -> str:
    """`mxfp6_e2m3 rceil even`, or that the slot stays in high precision, and why."""
    if choice.candidate is not None:
        return choice.candidate.name
    return HIGH if choice.captured else f"{HIGH} (not captured)"


def _cell(candidate: Candidate, worst: Worst) -> str:
    if math.isnan(worst.sqnr_db):
        return "-"
    mark = _MARKS[candidate.hadamard]
    return f"{worst.sqnr_db:.1f}{mark}\n{_percent(worst.underflow_share)}/{_percent(worst.saturated_share)}"


def _percent(share: float) -> str:
    """Two significant digits, so that a non-zero value never looks like zero."""
    value = 100 * share
    if math.isnan(value):
        return "-"
    if value == 0:
        return "0"
    return "<.01" if value < 0.01 else f"{value:.2g}"

"""The table of slots and formats, for a person."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from quantexp.analysis.requantise.best import best_of_formats
from quantexp.analysis.requantise.candidates import Candidate
from quantexp.analysis.requantise.recommend import Choice, in_order
from quantexp.analysis.requantise.tally import Tally, Worst
from quantexp.formats import Format, Hadamard
from quantexp.quant.label import HIGH

#: After an SQNR that takes a Hadamard transform.
_MARKS = {Hadamard.NONE: "", Hadamard.DETERMINISTIC: " H", Hadamard.RANDOM: " R"}
LEGEND = (
    "Each cell is the worst of the slot's tensors under the format's best options: SQNR in dB (H with a deterministic, "
    "R with a random Hadamard transform), below it % of the non-zero elements that became zero / % saturated."
)


def print_table(
    tally: Tally, choices: Sequence[Choice], formats: Sequence[Format], console: Console
) -> None:
    """A row for each module and slot, a column for each format, and what is recommended."""
    table = Table(show_lines=True)
    table.add_column("module")
    table.add_column("slot", no_wrap=True)
    for fmt in formats:
        table.add_column(fmt.name.replace("_", "\n"), justify="right", no_wrap=True)
    table.add_column("recommended")
    chosen = {(one.module, one.label): one for one in choices}
    for place in in_order(choices, tally.places()):
        best = best_of_formats(tally.work.candidates, tally.worst[place])
        cells = [_cell(*best[fmt]) for fmt in formats]
        choice = chosen[place.module, place.slot.label]
        table.add_row(escape(place.module), place.slot.label, *cells, recommended_words(choice))
    console.print(table)
    console.print(LEGEND, soft_wrap=True)


def recommended_words(choice: Choice) -> str:
    """`mxfp6_e2m3 rceil even`, or that it stays high, and why."""
    if choice.candidate is not None:
        return choice.candidate.name
    return HIGH if choice.captured else f"{HIGH} (not captured)"


def _cell(candidate: Candidate, worst: Worst) -> str:
    if math.isnan(worst.sqnr_db):
        return "-"
    mark = _MARKS[candidate.hadamard]
    return f"{worst.sqnr_db:.1f}{mark}\n{_percent(worst.underflow_share)}/{_percent(worst.saturated_share)}"


def _percent(share: float) -> str:
    """Two significant digits; what is not zero does not look so."""
    value = 100 * share
    if value == 0 or math.isnan(value):
        return "0"
    return "<.01" if value < 0.01 else f"{value:.2g}"

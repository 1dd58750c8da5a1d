"""Prints a comparison in a terminal; a narrow terminal drops columns by their worth."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from quantexp.analysis.compare.comparison import Comparison, Row
from quantexp.analysis.compare.gap import milestones
from quantexp.analysis.compare.lines import Line, lines_of
from quantexp.analysis.compare.matched import last_iteration
from quantexp.analysis.compare.verdicts import Verdict, Verdicts
from quantexp.model.decoder import OUTPUT
from quantexp.runs.precision import proof_word
from quantexp.terminal.console import plain
from quantexp.terminal.fitted_table import Column, Shrink, fitted_table, wrapped

_COLUMNS = (
    Column("scheme", shrink=Shrink.CUT_START),
    Column("loss", is_number=True),
    Column("gap", is_number=True),
    Column("late gap", worth=6, is_number=True),
    Column("memory", worth=1, is_number=True),
    Column("iterations", worth=3, is_number=True),
    Column("proof", worth=5),
    Column("state"),
)
#: The width of an iteration's gap, in characters.
_GAP_WIDTH = 10
_PROOF = {"proved": "proved", "failed": "[red]failed[/]"}


_VERDICTS = (
    Column("scheme", shrink=Shrink.CUT_START),
    Column("seeds", worth=3, is_number=True),
    Column("gap", is_number=True),
    Column("95% interval", worth=4),
    Column("relative", worth=1, is_number=True),
    Column("p", worth=2, is_number=True),
    Column("verdict"),
)


def print_comparison(comparison: Comparison, verdicts: Verdicts, console: Console) -> None:
    """Print warnings, the table of results, verdicts, the gap at intermediate iterations, and the differences."""
    for warning in comparison.warnings:
        for part in wrapped(
            Text.assemble(("warning", "yellow"), " ", plain(warning)), console.width
        ):
            console.print(part, soft_wrap=True)
    shown = _results(comparison, console)
    for line in _footer(comparison, verdicts, shown):
        console.print(line, style="dim italic", markup=False)
    _print_verdicts(verdicts, console)
    lines = lines_of(comparison)
    _print_ways(lines, console)
    _print_differences(comparison, lines, console)


def _results(comparison: Comparison, console: Console) -> set[str]:
    """The headings of the shown columns."""
    rows = [_cells(row) for row in comparison.rows]
    title = f"{len(rows)} run{'s' * (len(rows) != 1)}"
    table = fitted_table(_COLUMNS, rows, console.width, title).table
    console.print(table)
    return {str(column.header) for column in table.columns}


def _footer(comparison: Comparison, verdicts: Verdicts, shown: set[str]) -> list[str]:
    """Explanations of the shown columns, in lines of at most 80 characters."""
    late = sorted({row.gap.num_late for row in comparison.rows if row.gap})
    number = " to ".join(map(str, dict.fromkeys((late[0], late[-1])))) if late else ""
    over = f" ({number} iteration{'s' * (late[-1] > 1)})" if late else ""
    lines = [
        verdicts.noise,
        "gap: loss above bf16 in the last iteration that both have",
        f"late gap: its mean over the last tenth{over}" if "late gap" in shown else "",
    ]
    return [line for line in lines if line]


def _cells(row: Row) -> list[str | Text]:
    side = row.side
    mark = "" if row.matched else " [yellow]![/]"
    memory = side.speed.memory_gb
    return [
        escape(row.label) + mark,
        side.last_loss,
        *_gaps(row),
        "-" if memory is None else f"{memory:.1f} GB",
        f"{last_iteration(side)}",
        _PROOF.get(proof_word(side.precision) or "", "-"),
        escape(side.state),
    ]


def _gaps(row: Row) -> list[str]:
    if row.is_baseline:
        return ["baseline", ""]
    return [f"{row.gap.last:+.4f}", f"{row.gap.late:+.4f}"] if row.gap else ["-", "-"]


def _print_verdicts(verdicts: Verdicts, console: Console) -> None:
    """The end of the gap of each scheme, if one has several seeds."""
    if not verdicts.has_seeds:
        return
    title = f"gap to {verdicts.against}: mean {verdicts.measure} of {verdicts.window}"
    cells = [_verdict_cells(verdict) for verdict in verdicts.schemes]
    for scheme in verdicts.unjudged:
        cells.append([plain(scheme.label), "0", *["-"] * 4, plain(scheme.short_words)])
    table = fitted_table(_VERDICTS, cells, console.width, title).table
    console.print()
    console.print(table)
    notes = [(verdict.label, verdict.note) for verdict in verdicts.schemes]
    for label, note in [*notes, *((scheme.label, scheme.note) for scheme in verdicts.unjudged)]:
        if note:
            console.print(plain(f"{label}: {note}"))
    shown = {str(column.header) for column in table.columns}
    for line in _floor_lines(verdicts, with_p="p" in shown):
        console.print(line, style="dim italic", markup=False)


def _floor_lines(verdicts: Verdicts, *, with_p: bool) -> list[str]:
    """What chance alone does to the measure."""
    known = [each for each in verdicts.floors if each.chaos is not None or each.seed is not None]
    lines = ["two runs of bf16 differ by more than this in one of 20 cases:"] if known else []
    for floors in known:
        of = f"{floors.label}: " if len(known) > 1 else ""
        if floors.chaos is not None:
            runs = f"{floors.num_chaos} run{'s' * (floors.num_chaos > 1)}"
            lines.append(f"  {of}{floors.chaos:.4f} by last bits of the initial weights ({runs})")
        if floors.seed is not None:
            lines.append(f"  {of}{floors.seed:.4f} by the seed ({floors.num_seeds} bf16 runs)")
    number = sum(verdict.p_holm is not None for verdict in verdicts.schemes)
    if with_p and number:
        many = f", corrected for {number} schemes (Holm)" if number > 1 else ""
        lines.append(f"p: of no gap at all, by Student's t over seeds{many}")
    return lines


def _verdict_cells(verdict: Verdict) -> list[str | Text]:
    low, high = verdict.interval or (None, None)
    return [
        plain(verdict.label),
        str(len(verdict.seeds)),
        f"{verdict.mean:+.4f}",
        "-" if low is None else f"{low:+.4f} to {high:+.4f}",
        "-" if verdict.relative is None else f"{verdict.relative:+.2%}",
        "-" if verdict.p_holm is None else f"{verdict.p_holm:.2g}",
        plain(verdict.short_words),
    ]


def _print_ways(schemes: Sequence[Line], console: Console) -> None:
    """The gap of each scheme at some intermediate iterations, the mean over its seeds."""
    lines = [line for line in schemes if line.gaps.mean and not line.is_perturbed]
    names = max((len(line.label) for line in lines), default=0)
    count = min(10, (console.width - min(names, 30) - 6) // _GAP_WIDTH)
    longest = max((line.gaps.iterations for line in lines), key=len, default=())
    shown = milestones(longest, count)
    if len(shown) < 2:
        return
    columns = [Column("scheme", shrink=Shrink.CUT_START)]
    columns += [Column(str(iteration), is_number=True) for iteration in shown]
    cells: list[list[str | Text]] = []
    for line in lines:
        at = dict(zip(line.gaps.iterations, line.gaps.mean, strict=True))
        gaps = [f"{at[i]:+.4f}" if i in at else "-" for i in shown]
        cells.append([escape(line.label), *gaps])
    title = "loss gap to bf16 on the way, by iteration"
    console.print()
    console.print(fitted_table(columns, cells, console.width, title).table)


def _print_differences(comparison: Comparison, schemes: Sequence[Line], console: Console) -> None:
    """A table if it fits; otherwise the two values below their key."""
    lacking = any(row.lacks for row in comparison.rows)
    stead = f", or from {comparison.rows[0].label} where there is none" if lacking else ""
    columns = [Column("scheme", shrink=Shrink.WRAP)]
    columns += [Column(name, worth=1, shrink=Shrink.WRAP) for name in ("what", "baseline", "here")]
    lines = _differences_by_label(comparison, schemes)
    rows: list[list[str | Text]] = [
        [plain(label if i == 0 else ""), *map(plain, cells)]
        for label, each in lines.items()
        for i, cells in enumerate(each)
    ]
    if not rows:
        return
    title = f"what differs from the baseline{stead}"
    fitted = fitted_table(columns, rows, console.width, title)
    console.print()
    if not fitted.left_out:
        console.print(fitted.table)
        return
    console.print(plain(title, "italic"))
    for label, each in lines.items():
        if each:
            console.print(plain(label, "bold"))
        for what, baseline, here in each:
            console.print(Padding(plain(what), (0, 0, 0, 2)))
            console.print(Padding(plain(f"{baseline} -> {here}"), (0, 0, 0, 4)))


def _differences_by_label(
    comparison: Comparison, schemes: Sequence[Line]
) -> dict[str, list[tuple[str, str, str]]]:
    """The differences of each scheme once, or of each of its runs if they are not the same."""
    by_label = {}
    for line in schemes:
        rows = [comparison.rows[i] for i in line.rows]
        each = [_differences(row) for row in rows]
        if each.count(each[0]) == len(each):
            by_label[line.label] = each[0]
        else:
            by_label |= {row.label: one for row, one in zip(rows, each, strict=True)}
    return by_label


def _differences(row: Row) -> list[tuple[str, str, str]]:
    lines = [(d.key, _shown(d.baseline), _shown(d.here)) for d in row.config]
    for change in row.precision:
        since = "" if change.iteration == 1 else f", from iteration {change.iteration}"
        of_layers = "" if change.layers == OUTPUT else f"layers {change.layers}: "
        where = of_layers + ", ".join(change.modules)
        slots = ", ".join(change.slots)
        what = f"{change.site}: {slots} ({where}{since})" if where else f"precision map{since}"
        lines.append((what, change.baseline, change.here))
    return lines


def _shown(value: object) -> str:
    return "-" if value is None else str(value)

"""A comparison as a person reads it in a terminal; what does not fit its width is folded, never cut."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from quantexp.analysis.compare.comparison import Comparison, Row
from quantexp.analysis.compare.gap import milestones
from quantexp.analysis.compare.matched import last_iteration

#: Columns from which on everything has its place in one table.
WIDE = 110
#: Characters that an iteration's gap takes.
_GAP_WIDTH = 10
_PROOF: dict[object, str] = {True: "proved", False: "[red]failed[/]"}


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Warnings, the table of results, the gap on the way, and what differs."""
    for warning in comparison.warnings:
        console.print(f"[yellow]warning[/] {escape(warning)}", soft_wrap=False)
    console.print(_results(comparison, console.width >= WIDE))
    _print_ways(comparison, console)
    _print_differences(comparison, console)


def _results(comparison: Comparison, wide: bool) -> Table:
    table = Table(title=f"{len(comparison.rows)} runs", title_justify="left")
    table.add_column("scheme", overflow="fold")
    for heading in ("loss", "gap", "late gap", "speed"):
        table.add_column(heading, justify="right", no_wrap=True)
    if wide:
        table.add_column("tokens/s", justify="right", no_wrap=True)
        table.add_column("memory", justify="right", no_wrap=True)
        table.add_column("iterations", justify="right", no_wrap=True)
        table.add_column("proof", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for row in comparison.rows:
        table.add_row(*_cells(row, comparison, wide))
    late = {row.gap.num_late for row in comparison.rows if row.gap}
    over = "mean over the last tenth"
    if late:
        over += f" ({max(late)} iteration{'s' * (max(late) > 1)})"
    table.caption = (
        f"{comparison.noise}\n"
        f"gap: loss above bf16 in the last iteration both have; late gap: {over}\n"
        "speed: of the emulation, to bf16's"
    )
    table.caption_justify = "left"
    return table


def _cells(row: Row, comparison: Comparison, wide: bool) -> list[str]:
    side, baseline = row.side, comparison.rows[row.baseline]
    speed, other = side.speed.tokens_per_s, baseline.side.speed.tokens_per_s
    mark = "" if row.matched else " [yellow]![/]"
    cells = [
        escape(row.label) + mark,
        side.last_loss,
        *_gaps(row, baseline),
        f"x{speed / other:.2f}" if speed and other else "-",
    ]
    if wide:
        memory = side.speed.memory_gb
        cells += [
            f"{speed:,.0f}" if speed else "-",
            "-" if memory is None else f"{memory:.1f} GB",
            f"{last_iteration(side)}",
            _PROOF.get((side.precision or {}).get("proved"), "-"),
        ]
    return [*cells, escape(side.state)]


def _gaps(row: Row, baseline: Row) -> list[str]:
    if row is baseline:
        return ["baseline", ""]
    return [f"{row.gap.last:+.4f}", f"{row.gap.late:+.4f}"] if row.gap else ["-", "-"]


def _print_ways(comparison: Comparison, console: Console) -> None:
    """The gap at some iterations on the way: the curves, as far as characters show them."""
    rows = [r for r in comparison.rows if comparison.rows[r.baseline] is not r and r.gap]
    names = max((len(row.label) for row in rows), default=0)
    count = min(10, (console.width - min(names, 30) - 6) // _GAP_WIDTH)
    longest = max((row.gap.iterations for row in rows if row.gap), key=len, default=())
    shown = milestones(longest, count)
    if len(shown) < 2:
        return
    table = Table(title="gap to bf16 on the way, by iteration", title_justify="left")
    table.add_column("scheme", overflow="fold")
    for iteration in shown:
        table.add_column(str(iteration), justify="right", no_wrap=True)
    for row in rows:
        assert row.gap is not None
        at = dict(zip(row.gap.iterations, row.gap.gaps, strict=True))
        cells = [f"{at[i]:+.4f}" if i in at else "-" for i in shown]
        table.add_row(escape(row.label), *cells)
    console.print(table)


def _print_differences(comparison: Comparison, console: Console) -> None:
    table = Table(title="what differs from the baseline", title_justify="left")
    table.add_column("scheme", overflow="fold")
    table.add_column("what", overflow="fold")
    table.add_column("baseline", overflow="fold")
    table.add_column("here", overflow="fold")
    for row in comparison.rows:
        lines = list(_differences(row))
        for i, cells in enumerate(lines):
            last = i == len(lines) - 1
            name = row.label if i == 0 else ""
            table.add_row(*(escape(cell) for cell in (name, *cells)), end_section=last)
    if table.rows:
        console.print(table)


def _differences(row: Row) -> list[tuple[str, str, str]]:
    lines = [(d.key, _shown(d.baseline), _shown(d.here)) for d in row.config]
    for change in row.precision:
        since = "" if change.iteration == 1 else f", from iteration {change.iteration}"
        where = f"layers {change.layers}: {', '.join(change.modules)}" if change.modules else ""
        slots = ", ".join(change.slots)
        what = f"{change.site}: {slots} ({where}{since})" if where else f"precision map{since}"
        lines.append((what, change.baseline, change.here))
    return lines


def _shown(value: object) -> str:
    return "-" if value is None else str(value)

"""Prints the plan of a sweep: first the reasons why runs cannot start, then a row for each run, and their sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from quantexp.capture.select.budget import free_where
from quantexp.cli.plan_record import Plan
from quantexp.cli.plan_text import precision_table, tflop, why_no_time
from quantexp.launch.duration import about, in_words
from quantexp.launch.label import labels
from quantexp.launch.machine_rates import rate_in_words
from quantexp.launch.recorded import root_of
from quantexp.launch.refusal import by_reason, too_large_together
from quantexp.schema import Experiment
from quantexp.terminal.units import human_bytes


def show_sweep(
    experiments: Sequence[Experiment], plans: Sequence[Plan], console: Console, *, maps: bool
) -> None:
    """Print the plans of a sweep's experiments; with `maps` the precision map of each scheme first."""
    names = labels(experiments)
    blockers = [plan.blockers for plan in plans]
    _print_reasons("[bold red]will not start:[/]", names, blockers, console)
    if (together := too_large_together(experiments)) is not None:
        console.print(f"[bold red]will not start:[/] {escape(together)}", soft_wrap=True)
    for line in plans[0].from_environment:
        console.print(line, soft_wrap=True, markup=False)
    if maps:
        _print_maps(names, plans, console)
    console.print(_table(names, plans))
    _print_total(experiments, plans, console)
    earlier = [[plan.earlier] if plan.earlier else [] for plan in plans]
    _print_reasons("[yellow]earlier attempt:[/]", names, earlier, console)


def exit_code(
    experiments: Sequence[Experiment], plans: Sequence[Plan], complain: Callable[[str], None]
) -> int:
    """0, or 1 with a message about the number of runs that cannot start, each or together."""
    number = sum(bool(plan.blockers) for plan in plans)
    if not number and too_large_together(experiments) is not None:
        number = len(plans)
    if number:
        which = f"{number} of {len(plans)} runs" if len(plans) > 1 else "the run"
        whose = "its plan says" if number == 1 else "their plans say"
        complain(f"{which} will not start, as {whose}")
    return int(number > 0)


def _table(names: Sequence[str], plans: Sequence[Plan]) -> Table:
    table = Table(title=_runs(plans), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("run", overflow="fold")
    for heading in ("memory", "captured", "work", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name, plan in zip(names, plans, strict=True):
        table.add_row(
            escape(name),
            f"{plan.memory_gb_per_gpu * plan.num_processes:,.1f} GB",
            human_bytes(plan.capture_bytes),
            tflop(plan.tflop),
            "?" if plan.time_s is None else in_words(plan.time_s),
            _mark(plan),
        )
    return table


def _runs(plans: Sequence[Plan]) -> str:
    return f"{len(plans)} run{'s' * (len(plans) != 1)}"


def _mark(plan: Plan) -> str:
    if plan.missing is not None:
        return "[red]cannot start[/]"
    if plan.to_fit is None:
        return "[green]fits[/]"
    return "[red]too large[/]" if plan.blockers else "[yellow]too large, starts[/]"


def _print_total(
    experiments: Sequence[Experiment], plans: Sequence[Plan], console: Console
) -> None:
    folder, free = free_where(experiments[0], root_of(experiments[0]))
    console.print(
        f"[bold]in all[/]  {_runs(plans)}, {tflop(sum(plan.tflop for plan in plans))}, {_total_time(plans)}",
        soft_wrap=True,
    )
    console.print(
        f"[bold]capture[/] {human_bytes(sum(p.capture_bytes for p in plans))} of values in "
        f"{sum(p.capture_tensors for p in plans):,} tensors, statistics of "
        f"{sum(p.capture_statistics for p in plans):,}; "
        f"{human_bytes(free)} are free in {escape(str(folder))}",
        soft_wrap=True,
    )


def _total_time(plans: Sequence[Plan]) -> str:
    """The time of all runs in sequence, if it is known for each; and the measured rates."""
    seconds = [plan.time_s for plan in plans if plan.time_s is not None]
    if elsewhere := sum(plan.script is not None for plan in plans):
        some = f"{elsewhere} of them {'does' if elsewhere == 1 else 'do'}"
        who = "they do" if elsewhere == len(plans) else some
        return f"the time is not known: {who} not run on this machine"
    if len(seconds) < len(plans):
        plan = next(plan for plan in plans if plan.time_s is None)
        return f"the time is not known: {why_no_time(plan)}"
    rates = dict.fromkeys((plan.product_gflop_per_s or 0.0, plan.precision) for plan in plans)
    measured = ", ".join(f"{rate_in_words(rate)} in {precision}" for rate, precision in rates)
    return f"{about(sum(seconds))} of training on this machine (measured: {measured} products)"


def _print_reasons(
    what: str, names: Sequence[str], of_each: Sequence[Sequence[str]], console: Console
) -> None:
    """Print each reason once, below its runs."""
    pairs = zip(names, of_each, strict=True)
    reasons = ((name, reason) for name, each in pairs for reason in each)
    for reason, those in by_reason(reasons).items():
        which = f"all {len(names)} runs" if 1 < len(those) == len(names) else "; ".join(those)
        console.print(f"{what} {escape(which)}\n  {escape(reason)}", soft_wrap=True)


def _print_maps(names: Sequence[str], plans: Sequence[Plan], console: Console) -> None:
    """Print the precision maps, equal ones once."""
    by_map: dict[str, list[int]] = {}
    for index, plan in enumerate(plans):
        by_map.setdefault(
            repr((plan.precision_map, plan.map_changes_at, plan.conditions)), []
        ).append(index)
    for indices in by_map.values():
        console.print(f"[bold]{escape('; '.join(names[i] for i in indices))}[/]", soft_wrap=True)
        console.print(precision_table(plans[indices[0]], console.width))

"""What the runs of a sweep capture together, beside what the disk has."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from quantexp.capture.budget import free_where, price
from quantexp.progress import human_bytes
from quantexp.record import root_of
from quantexp.schema import Experiment


def print_total(experiments: Sequence[Experiment], console: Console) -> None:
    """A line for a person, below the plans of a sweep."""
    prices = [price(experiment) for experiment in experiments]
    folder, free = free_where(experiments[0], root_of(experiments[0]))
    console.print(
        f"[bold]in all[/]  {len(prices)} runs capture {human_bytes(sum(p.num_bytes for p in prices))} of values in "
        f"{sum(p.tensors for p in prices):,} tensors, statistics of {sum(p.statistics for p in prices):,}; "
        f"{human_bytes(free)} are free in {escape(str(folder))}",
        soft_wrap=True,
    )

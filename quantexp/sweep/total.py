"""What the runs of a sweep capture together, beside what the disk has."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from quantexp.capture.budget import free_where
from quantexp.plan import Plan
from quantexp.progress import human_bytes
from quantexp.record import root_of
from quantexp.schema import Experiment


def print_total(experiments: Sequence[Experiment], plans: Sequence[Plan], console: Console) -> None:
    """A line for a person, below the plans of a sweep's experiments."""
    folder, free = free_where(experiments[0], root_of(experiments[0]))
    console.print(
        f"[bold]in all[/]  {len(plans)} runs capture {human_bytes(sum(p.capture_bytes for p in plans))} of values in "
        f"{sum(p.capture_tensors for p in plans):,} tensors, statistics of "
        f"{sum(p.capture_statistics for p in plans):,}; "
        f"{human_bytes(free)} are free in {escape(str(folder))}",
        soft_wrap=True,
    )

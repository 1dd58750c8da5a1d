"""The process that worker processes are copied from: it imports what they need once. Needs no torch itself."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running

#: What every worker needs, and what those need that draw.
_COUNTS = ["quantexp.analysis.draw.work"]
_DRAWS = ["quantexp.analysis.draw.distribution", "quantexp.analysis.draw.heatmap"]


def context(*, draws: bool = True) -> ForkServerContext:
    """What workers are started with; whether they draw matters before the server runs alone."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload([*_COUNTS, *(_DRAWS if draws else [])])
    return found


def start_server(*, draws: bool = True) -> None:
    """Have it import while this process imports, too; without this it begins with the first worker."""
    context(draws=draws)
    ensure_running()

"""The fork server of the worker processes, which imports their modules once. Needs no torch itself."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running

#: Modules for every worker, and additional modules for workers that draw.
_COUNTS = ["quantexp.analysis.draw.work"]
_DRAWS = ["quantexp.analysis.draw.distribution", "quantexp.analysis.draw.heatmap"]


def context(*, draws: bool = True) -> ForkServerContext:
    """The multiprocessing context of the workers; `draws` only matters before the server starts."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload([*_COUNTS, *(_DRAWS if draws else [])])
    return found


def start_server(*, draws: bool = True) -> None:
    """Start the server, so that it imports in parallel with this process; otherwise the first worker starts it."""
    context(draws=draws)
    ensure_running()

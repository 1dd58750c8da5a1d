"""The process that worker processes are copied from: it imports what they need once. Needs no torch itself."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running

#: What every worker needs.
_PRELOAD = ["quantexp.analysis.draw.work"]


def context() -> ForkServerContext:
    """What workers are started with."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(_PRELOAD)
    return found


def start_server() -> None:
    """Have it import while this process imports, too; without this it begins with the first worker."""
    context()
    ensure_running()

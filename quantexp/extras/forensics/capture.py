"""`quantexp capture RUN`: ask a running run for a dossier."""

from __future__ import annotations

import argparse
import time

from quantexp.cli.arguments import ledger_scope, parser_of
from quantexp.cli.output import print_line
from quantexp.errors import RunError
from quantexp.folders import short_path
from quantexp.launch.ledger.standing import standing
from quantexp.runs.dossiers import folder_of, read_dossiers, request_dossier
from quantexp.runs.find import find_run
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, Status, read_status

#: Seconds between two looks at the run.
_LOOK_S = 0.2


def run(arguments: argparse.Namespace) -> int:
    """Execute the verb: wait until the dossier is complete, and print its folder; returns 0.

    Raises:
        RunError: the run does not run, or ended before it took the request.
    """
    root, named = ledger_scope(arguments)
    if named is None:
        parser_of("capture").error("capture takes a run: its folder, or a part of its name")
    run_dir = find_run(named, root)
    status = _training(run_dir)
    before = {dossier.iteration for dossier in read_dossiers(run_dir)}
    request_dossier(run_dir)
    if arguments.no_wait:
        print_line(f"requested: the dossier follows iteration {status.current_iteration}")
        return 0
    print_line(_wait(run_dir, before))
    return 0


def _training(run: RunDir) -> Status:
    current = standing(run)
    status = current.status
    if status is None or status.state is not State.RUNNING or not current.alive:
        state = "missing" if current.state is None else current.state.value
        raise RunError(f"{run.root.name} is {state}: only a running run can write a dossier")
    return status


def _wait(run: RunDir, before: set[int]) -> str:
    """Wait until the run has written the dossier that follows the request; its folder, in words."""
    while True:
        for dossier in read_dossiers(run):
            if dossier.iteration in before or run.capture_request.exists():
                continue
            status = read_status(run.status)
            is_over = status is None or status.state is not State.RUNNING
            folder = short_path(folder_of(run, dossier.iteration))
            if dossier.whole_iteration is not None:
                return f"{folder}: {dossier.tensors} tensors of iteration {dossier.whole_iteration}"
            if is_over:
                return f"{folder}: no iteration followed, so it has no values"
        _training(run)
        time.sleep(_LOOK_S)

"""`quantexp captures DIR [key=pattern ...]`: list, check or export captured tensors."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rich.console import Console

from quantexp.cli.arguments import name_folder
from quantexp.cli.output import complain, print_json, print_line
from quantexp.errors import QuantexpError
from quantexp.folders import user_path
from quantexp.runs.find import is_run
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, read_status
from quantexp.terminal.console import output_console

if TYPE_CHECKING:
    from quantexp.capture.check.folder import Checked
    from quantexp.capture.reader import Capture


def run(arguments: argparse.Namespace) -> int:
    """Execute the verb; returns 0, or 1 if `--check` finds damage.

    Raises:
        CaptureError: nothing captured there, a selection that cannot be, or a file that cannot be read or written.
    """
    from quantexp.capture import inspect

    name_folder(arguments)
    if arguments.check:
        checked = check(arguments.folder, inspect.patterns_of(arguments.words))
        show_check(checked, as_json=arguments.json)
        if checked.problems or (arguments.json and arguments.export is None):
            return 1 if checked.problems else 0
    capture = inspect.selected(arguments.folder, arguments.words)
    if arguments.export is not None:
        count = inspect.export(capture, arguments.export, arguments.to)
        print_line(f"{count} files in {arguments.export}")
    elif arguments.json:
        print_json(record(capture, each=arguments.list))
    else:
        show(capture, output_console(), each=arguments.list)
    return 0


def check(folder: str, patterns: dict[str, object]) -> Checked:
    """Check a capture folder with what its run says of it: whether it still writes there, and its processes.

    Raises:
        CaptureError: there is nothing to check.
    """
    from quantexp.capture.check.folder import check as check_folder
    from quantexp.config.load import read
    from quantexp.launch.ledger.standing import standing

    path = user_path(folder).absolute()
    runs = [run for run in (RunDir(path), RunDir(path.parent)) if is_run(run)]
    if not runs:
        return check_folder(folder, patterns)
    state, is_live, num_ranks = None, False, None
    try:
        status = read_status(runs[0].status)
        state = None if status is None else status.state
        is_live = state is State.RUNNING and standing(runs[0]).alive
        num_ranks = read(runs[0].config).launcher.num_processes
    except QuantexpError as error:  # the tensors can be checked all the same
        complain(error.message, error.listed)
    return check_folder(
        folder,
        patterns,
        is_live=is_live,
        is_complete=state is State.COMPLETED,
        num_ranks=num_ranks,
    )


def show_check(checked: Checked, *, as_json: bool) -> None:
    """Print the problems and the summary."""
    if as_json:
        print_json(record_check(checked))
        return
    if checked.problems:
        for problem in checked.problems:
            print_line(str(problem))
        complain(checked.summary())
    else:
        print_line(checked.summary())


def record_check(checked: Checked) -> dict[str, Any]:
    """The output of `captures --check --json`."""
    return {
        "tensors": checked.num_tensors,
        "intact": checked.num_intact,
        "without_hash": checked.num_without_hash,
        "lines": checked.num_lines,
        "files": checked.num_files,
        "notes": list(checked.notes),
        "problems": [
            {"file": each.file, "line": each.line, "what": each.what} for each in checked.problems
        ],
    }


def record(capture: Capture, *, each: bool) -> Any:
    """The output of `captures --json`: counts, or a row for each tensor."""
    from quantexp.capture.report import summary

    return capture.rows() if each else summary(capture)


def show(capture: Capture, console: Console, *, each: bool) -> None:
    """Print counts, or a row for each tensor."""
    from quantexp.capture.table import print_list, print_summary

    (print_list if each else print_summary)(capture, console)

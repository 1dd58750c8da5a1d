"""`quantexp captures DIR [key=pattern ...]`: list, check or export captured tensors."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rich.console import Console

from quantexp.cli.arguments import name_folder
from quantexp.cli.output import complain, print_json, print_line
from quantexp.terminal.console import output_console

if TYPE_CHECKING:
    from quantexp.capture.reader import Capture


def run(arguments: argparse.Namespace) -> int:
    """Execute the verb; returns 0, or 1 if `--check` finds damage.

    Raises:
        CaptureError: nothing captured there, a selection that cannot be, or a file that cannot be read or written.
    """
    from quantexp.capture import inspect

    name_folder(arguments)
    capture = inspect.selected(arguments.folder, arguments.words)
    if arguments.check:
        checked = inspect.checked(capture)
        for line in checked.damaged:
            complain(line)
        if checked.damaged:
            complain(checked.summary())
            return 1
        if not arguments.json:
            print_line(checked.summary())
    if arguments.export is not None:
        count = inspect.export(capture, arguments.export, arguments.to)
        print_line(f"{count} files in {arguments.export}")
    elif arguments.json:
        print_json(record(capture, each=arguments.list))
    else:
        show(capture, output_console(), each=arguments.list)
    return 0


def record(capture: Capture, *, each: bool) -> Any:
    """The output of `captures --json`: counts, or a row for each tensor."""
    from quantexp.capture.report import summary

    return capture.rows() if each else summary(capture)


def show(capture: Capture, console: Console, *, each: bool) -> None:
    """Print counts, or a row for each tensor."""
    from quantexp.capture.table import print_list, print_summary

    (print_list if each else print_summary)(capture, console)

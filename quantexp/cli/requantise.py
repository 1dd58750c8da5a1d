"""`quantexp requantise DIR`: scores a capture under every format, and recommends a scheme."""

from __future__ import annotations

import argparse

from quantexp.analysis.requantise.arguments import request_of
from quantexp.cli.arguments import name_folder
from quantexp.cli.output import complain, print_json
from quantexp.terminal.console import error_console, output_console


def run(arguments: argparse.Namespace) -> int:
    """Score, recommend, write and print; returns 0, or 1 if a file was unusable.

    Raises:
        CaptureError: nothing to score, or a folder that cannot be written.
        ConfigError: an unknown format or a number out of range.
    """
    from quantexp.analysis.requantise.verb import requantise

    name_folder(arguments)
    outcome = requantise(request_of(arguments), error_console(), complain)
    if arguments.json:
        print_json(outcome.content)
    else:
        outcome.print(output_console())
    if problems := len(outcome.tally.problems):
        complain(f"{problems} files could not be used, they are named above")
    return 1 if problems else 0

"""The command's output: results on standard output, for a person or as JSON, and complaints on standard error."""

from __future__ import annotations

import json
import sys


def complain(message: str) -> None:
    """Write one line to standard error."""
    sys.stderr.write(f"quantexp: {message}\n")


def print_line(text: str) -> None:
    """Print a line as it is, however long."""
    from quantexp.terminal.console import output_console  # not needed for help

    output_console().print(text, soft_wrap=True, markup=False)


def print_json(content: object) -> None:
    """Print what `--json` promises."""
    sys.stdout.write(json.dumps(content, indent=1) + "\n")

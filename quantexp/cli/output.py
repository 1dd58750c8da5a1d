"""The command's output: results on standard output, as text or JSON, and messages on standard error."""

from __future__ import annotations

import json
import sys

from quantexp.terminal.messages import complain as complain


def print_line(text: str) -> None:
    """Print a line without wrapping it."""
    from quantexp.terminal.console import output_console  # not needed for help

    output_console().print(text, soft_wrap=True, markup=False)


def print_json(content: object) -> None:
    """Print the output of `--json`: ASCII without control characters, with the true values."""
    sys.stdout.write(json.dumps(content, indent=1).replace("\x7f", "\\u007f") + "\n")

"""Messages on standard error."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from quantexp.terminal.shorten import one_short_line


def complain(message: str, listed: Sequence[str] = ()) -> None:
    """Write one line of a bounded length to standard error, and below it a line for each item of a list."""
    lines = [
        f"quantexp: {one_short_line(message)}",
        *(f"  {one_short_line(item)}" for item in listed),
    ]
    sys.stderr.write("".join(f"{line}\n" for line in lines))

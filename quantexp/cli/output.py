"""The command's output: results on standard output, messages on standard error; and the folder of `out=`."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path

from quantexp.errors import RunError
from quantexp.folders import writing_into
from quantexp.terminal.console import complain as complain


def print_line(text: str) -> None:
    """Print a line without wrapping it."""
    from quantexp.terminal.console import output_console  # not needed for help

    output_console().print(text, soft_wrap=True, markup=False)


def print_json(content: object) -> None:
    """Print the output of `--json`: ASCII without control characters, with the true values."""
    sys.stdout.write(json.dumps(content, indent=1).replace("\x7f", "\\u007f") + "\n")


def require_folder(folder: Path) -> None:
    """Check that figures can be written into a folder, which may not exist yet.

    Raises:
        RunError: it is a file, is below one, or may not be written.
    """
    path = folder.absolute()
    existing = next(each for each in (path, *path.parents) if os.path.lexists(each))
    with writing_into(folder, RunError, "out=FOLDER"):
        if not existing.is_dir():
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(existing, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))

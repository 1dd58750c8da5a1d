"""An exception that no verb expects: its traceback goes into a file, and the command prints one line.

The file is private to the user and lies in `$XDG_CACHE_HOME/quantexp/tracebacks`, or in the temporary folder if that
cannot be written. It holds the versions and the traceback; secrets of the environment are replaced by their names.
"""

from __future__ import annotations

import errno
import os
import platform
import tempfile
import traceback
from datetime import UTC, datetime
from pathlib import Path

from quantexp import __version__
from quantexp.folders import cache_dir
from quantexp.runs.redaction import redacted, redacted_text

#: Characters of an exception's own words in the message.
_SHOWN = 300


def reported(error: Exception) -> str:
    """Write the traceback into a file of its own; the message that names the exception and the file."""
    name = type(error).__name__
    text = redacted_text(f"{name}: {error}" if str(error) else name)[: len(name) + 2 + _SHOWN]
    if (file := _written(error)) is None:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"unexpected {text} ({frame.filename}, line {frame.lineno}; its traceback cannot be written)"
    return f"unexpected {text}; the traceback is in {file}"


def refused_name(error: Exception) -> str | None:
    """The message for a word that is not a valid file name; None for another error."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENAMETOOLONG, errno.ELOOP):
        return None
    return f"{error.filename} is not a valid file name: {error.strerror}"


def _written(error: Exception) -> Path | None:
    """The new file with the traceback; None if no folder can be written."""
    versions = f"quantexp {__version__}, Python {platform.python_version()}, {platform.platform()}"
    report = redacted(f"{versions}\n\n{''.join(traceback.format_exception(error))}")
    prefix = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-"
    for folder in (_private_folder, tempfile.gettempdir):
        try:
            descriptor, name = tempfile.mkstemp(".txt", prefix, folder())
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as stream:
                stream.write(report)
        except OSError:
            continue
        return Path(name)
    return None


def _private_folder() -> Path:
    folder = cache_dir(None) / "tracebacks"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder

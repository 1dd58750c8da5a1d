"""The errors that a user can meet.

A message names the problem, the value, the allowed values and a remedy. The command line prints a `QuantexpError` as
one line and exits with 1; any other exception is a bug, and its traceback goes into a file.
"""

from __future__ import annotations

from collections.abc import Sequence


class QuantexpError(Exception):
    """An error that the user can fix: the command prints it and exits with 1.

    The message is one line; `listed` are names or reasons that follow it, each on an indented line.
    """

    def __init__(self, message: str = "", listed: Sequence[str] = ()) -> None:
        super().__init__("\n  ".join([message, *listed]))
        self.message, self.listed = message, tuple(listed)


class ConfigError(QuantexpError):
    """The configuration is not that of an experiment."""


class FormatError(QuantexpError, ValueError):
    """A format in Python cannot be found or imported, or does not return what it must."""


class DataError(QuantexpError):
    """A dataset, tokenizer or file of weights is missing, damaged or does not fit the model."""


class CaptureError(QuantexpError):
    """Captured tensors cannot be written or read."""


class EngagementError(QuantexpError):
    """The run did not execute its declared precision map."""


class VerifyError(QuantexpError):
    """A verification cannot run, or its certificate cannot be saved."""


class TooLargeError(QuantexpError):
    """A run needs more memory than it may have."""


class RunError(QuantexpError):
    """A run folder is unusable, or a run failed."""


class UnreadableError(RunError):
    """A file is damaged, or is not what it must be: `FILE, line N: what is wrong`."""


class RunInUseError(RunError):
    """Another process holds the run folder."""

"""The errors that a user can meet.

A message names the problem, the value, the allowed values and a remedy. The command line prints a `QuantexpError` as
one line and exits with 1; any other exception is a bug and keeps its traceback.
"""


class QuantexpError(Exception):
    """An error that the user can fix: the command prints it as one line and exits with 1."""


class ConfigError(QuantexpError):
    """The configuration is not that of an experiment."""


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


class RunInUseError(RunError):
    """Another process holds the run folder."""

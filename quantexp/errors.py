"""The errors a user can meet, one tree.

Every message says what is wrong, what was given, what is allowed and what to do. The command line prints
a `QuantexpError` as one clean line and exits 1; anything else is a bug and keeps its traceback.
"""


class QuantexpError(Exception):
    """What the user can mend: printed as one line, exit code 1."""


class ConfigError(QuantexpError):
    """A configuration that does not describe an experiment."""


class DataError(QuantexpError):
    """A dataset or tokenizer that is missing, unreadable or does not fit the model."""


class CaptureError(QuantexpError):
    """Tensors that cannot be written or read."""


class EngagementError(QuantexpError):
    """What ran is not what was declared."""


class VerifyError(QuantexpError):
    """A verification that cannot be done as asked, or whose certificate cannot be kept."""


class TooLargeError(QuantexpError):
    """A run that needs more memory than it may have."""


class RunError(QuantexpError):
    """A run folder that cannot be used, or a run that failed."""


class RunInUseError(RunError):
    """A run folder that another process starts or runs in."""

"""A time limit for reading captures."""

from __future__ import annotations

import time


class Deadline:
    """A deadline; None means no limit."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def passed(self) -> bool:
        """Whether the deadline has passed."""
        return self._end is not None and time.monotonic() > self._end

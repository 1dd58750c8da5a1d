"""Time that may be spent."""

from __future__ import annotations

import time


class Deadline:
    """An end to what may be looked at; None is no end."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def passed(self) -> bool:
        """Whether it is over."""
        return self._end is not None and time.monotonic() > self._end

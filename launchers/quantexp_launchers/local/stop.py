"""Counts Ctrl-C, SIGTERM and SIGHUP instead of raising exceptions, so that each running run gets its grace period.

The first signal requests a stop; every further one ends the grace period of the remaining runs. A signal that was
ignored when the process started (nohup, a shell's background jobs) stays ignored.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

#: The signals that request a stop.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """The number of stop requests."""

    def __init__(self) -> None:
        self.count = 0

    @property
    def requested(self) -> bool:
        """Whether a stop was requested."""
        return self.count > 0

    def request(self, signum: int = 0, frame: FrameType | None = None) -> None:
        """Request a stop; also the signal handler."""
        self.count += 1

    def watch(self) -> Callable[[], None]:
        """A function that raises KeyboardInterrupt once for each stop request."""
        num_raised = 0

        def raise_if_requested() -> None:
            nonlocal num_raised
            if self.count > num_raised:
                num_raised += 1
                raise KeyboardInterrupt

        return raise_if_requested


@contextlib.contextmanager
def count_stop_requests() -> Iterator[Stop]:
    """Count the signals that arrive inside this context; main thread only."""
    stop = Stop()
    before = {
        number: signal.signal(number, stop.request)
        for number in SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

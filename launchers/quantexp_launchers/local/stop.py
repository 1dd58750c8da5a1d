"""Ctrl-C, SIGTERM and SIGHUP, counted instead of raised, so that every run that goes on can be ended in its own time.

The first asks for an end; every further one gives what has not yet ended no more time. A signal that was ignored when
the process started (nohup, a shell's background jobs) stays ignored.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

#: What asks for an end.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """How often an end was asked for."""

    def __init__(self) -> None:
        self.count = 0

    @property
    def requested(self) -> bool:
        """Whether an end was asked for at all."""
        return self.count > 0

    def ask(self, signum: int = 0, frame: FrameType | None = None) -> None:
        """Ask for an end, or once more."""
        self.count += 1

    def watch(self) -> Callable[[], None]:
        """A function that raises KeyboardInterrupt once for each time that an end was asked for."""
        seen = 0

        def look() -> None:
            nonlocal seen
            if self.count > seen:
                seen += 1
                raise KeyboardInterrupt

        return look


@contextlib.contextmanager
def stopping() -> Iterator[Stop]:
    """What counts the signals that arrive while this lasts; main thread only."""
    stop = Stop()
    before = {
        number: signal.signal(number, stop.ask)
        for number in SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

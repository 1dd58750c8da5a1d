"""Ends a process that is asked to end while its main thread is in one long operation.

Python calls a signal's handler between two instructions of the main thread. A matrix product, an exchange with other
ranks and the reading of a large file are one instruction each, and may last for minutes. The signal itself is written
to a pipe at once (`signal.set_wakeup_fd`). A thread reads it there, gives the handler `PATIENCE_S`, and then ends the
process itself. It can do nothing while the operation holds Python's lock, which torch's do not.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection

#: Seconds that the main thread has to take a signal.
PATIENCE_S = 3.0


def leave_if_stuck(
    signals: Collection[int], is_taken: Callable[[], bool], leave: Callable[[], object]
) -> None:
    """From now on, call `leave` in another thread where the main thread does not take one of these signals in time.

    Args:
        signals: that ask for an end, and have handlers of Python.
        is_taken: whether a handler has run.
        leave: ends the process.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def watch() -> None:
        while os.read(read_end, 1)[0] not in signals:
            pass
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            if is_taken():
                return
            time.sleep(PATIENCE_S / 30)
        leave()

    threading.Thread(target=watch, name="signals", daemon=True).start()

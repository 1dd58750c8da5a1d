"""Ends a process on a signal even if its main thread is inside a long operation.

Python calls a signal handler between two instructions of the main thread. A matrix product, a collective or the read of
a large file is one instruction, and may last for minutes. Python writes the signal to a pipe immediately
(`signal.set_wakeup_fd`). A thread reads the pipe, waits `PATIENCE_S` for the handler, and then ends the process. It
cannot run while the operation holds the GIL, which torch operations do not.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection

#: Seconds that the main thread has to handle a signal.
PATIENCE_S = 3.0


def leave_if_stuck(
    signals: Collection[int], is_taken: Callable[[], bool], leave: Callable[[], object]
) -> None:
    """From now on, call `leave` in another thread if the main thread does not handle one of these signals in time.

    Args:
        signals: signals with Python handlers.
        is_taken: returns whether a handler has run.
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

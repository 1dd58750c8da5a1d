"""A store whose background thread is paused."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from quantexp.capture.store.folder import CaptureStore


def stalled(store: CaptureStore) -> threading.Event:
    """Make the store's background thread wait for the returned event before each batch."""
    gate, work = threading.Event(), store.queue._work

    def wait(batch: Sequence[Any]) -> None:
        assert gate.wait(60)
        work(batch)

    store.queue._work = wait
    return gate

"""Signals are counted while runs go on, and each raises once at a run's next poll."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from quantexp_launchers.local.stop import SIGNALS, Stop, count_stop_requests


@pytest.fixture
def _none_ignored() -> Iterator[None]:
    """Under nohup this process ignores SIGHUP."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_none_ignored")
def test_every_signal_is_counted_and_handlers_come_back() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with count_stop_requests() as stop:
        assert not stop.requested
        for number in SIGNALS:
            signal.raise_signal(number)
        assert stop.count == 3
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with count_stop_requests() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, before)


def test_each_watch_raises_once_for_each_request() -> None:
    stop = Stop()
    one, other = stop.watch(), stop.watch()
    one()
    stop.request()
    for watch in (one, other):
        with pytest.raises(KeyboardInterrupt):
            watch()
        watch()
    stop.request()
    with pytest.raises(KeyboardInterrupt):
        one()

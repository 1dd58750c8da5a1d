"""Last lines that count the tests skipped for want of something that the machine lacks, and say how to get it.

The reason of such a skip is of the form `not run: WHAT (HOW)`, and the line reads `not run: 3 tests WHAT (HOW)`. This
is no conftest.py of a folder, which the main process of pytest-xdist does not read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

PREFIX = "not run: "


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Wraps pytest's own summary, so that these lines come after the long list of skipped tests."""
    yield
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = (report.longrepr[2].partition(PREFIX) for report in skipped)
    for what, number in Counter(reason for _, prefix, reason in reasons if prefix).items():
        terminalreporter.write_line(f"{PREFIX}{number} tests {what}", yellow=True)

"""Slow tests in the order of their worth, and none begun after a deadline.

`slow_tests` in pyproject.toml lists files and folders of tests, the most valuable first. Slow and exhaustive tests run
in that order; those that the list does not name come last. A test that has not begun at $QUANTEXP_SLOW_TESTS_UNTIL
(seconds since the epoch) is left out: it counts as neither passed nor skipped, and the last lines of the output say how
many tests of which files were left out. Without the variable every test runs.

Each process of pytest-xdist compares the same deadline with the same clock, so they need not agree on anything else.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from _pytest.outcomes import Skipped

DEADLINE = "QUANTEXP_SLOW_TESTS_UNTIL"
LEFT_OUT = "left out"
MARKS = ("slow", "exhaustive")


class LeftOut(Skipped):
    """The deadline came before the test began."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("slow_tests", "files and folders of slow tests, the most valuable first", "paths")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SlowTests(config), "order and deadline of slow tests")


def is_slow(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(mark) for mark in MARKS)


class SlowTests:
    def __init__(self, config: pytest.Config) -> None:
        self.order = config.getini("slow_tests")
        try:
            self.deadline = float(os.environ.get(DEADLINE, "inf"))
        except ValueError as error:
            message = f"{DEADLINE} must be seconds since the epoch, got {os.environ[DEADLINE]}"
            raise pytest.UsageError(message) from error
        #: Slow tests of this process, or as the controller of pytest-xdist of all processes.
        self.num_tests = 0
        self.left_out: Counter[str] = Counter()

    def worth(self, item: pytest.Item) -> int:
        """Position in the list: 0 is the most valuable."""
        above = {item.path, *item.path.parents}
        return next((i for i, path in enumerate(self.order) if path in above), len(self.order))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self.worth(item) if is_slow(item) else -1)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if is_slow(item) and time.time() >= self.deadline:
            raise LeftOut(f"{DEADLINE} had passed")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report = yield
        if call.excinfo is not None and isinstance(call.excinfo.value, LeftOut):
            report.left_out = True
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        return (LEFT_OUT, "-", "LEFT OUT") if hasattr(report, "left_out") else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "setup":
            self.num_tests += 1
            if hasattr(report, "left_out"):
                self.left_out[report.nodeid.partition("::")[0]] += 1

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
        """After pytest's own summary, so that the line is among the last."""
        yield
        if self.left_out:
            files = ", ".join(f"{file} {number}" for file, number in self.left_out.items())
            line = f"left out for time: {self.left_out.total()} tests of {self.num_tests} ({files})"
            terminalreporter.write_line(line, yellow=True)

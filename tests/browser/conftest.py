"""Fixtures for tests in a real Chromium: `look` opens a file and notes whatever it asks for or complains about.

Chromium is the one on the PATH, or what QUANTEXP_CHROMIUM names. Where it or Playwright is missing the tests are
skipped, and with QUANTEXP_REQUIRE_BROWSER=1 they fail.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NOT_THERE = "no Chromium that Playwright can drive; install it with tests/browser/setup.sh"
HERE = Path(__file__).parent
_NAMES = ("chromium", "chromium-browser", "google-chrome")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("browser")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Around pytest's own summary, so that this line comes after the long list of what was skipped."""
    yield
    skipped = terminalreporter.stats.get("skipped", [])
    left_out = sum(NOT_THERE in str(report.longrepr) for report in skipped)
    if left_out:
        line = (
            f"not run: {left_out} tests in a real browser (install one with tests/browser/setup.sh)"
        )
        terminalreporter.write_line(line, yellow=True)


def _chromium() -> str | None:
    given = os.environ.get("QUANTEXP_CHROMIUM")
    found = [given] if given else [path for name in _NAMES if (path := shutil.which(name))]
    return found[0] if found and importlib.util.find_spec("playwright") else None


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests."""
    path = _chromium()
    if path is None:
        if os.environ.get("QUANTEXP_REQUIRE_BROWSER") == "1":
            pytest.fail(NOT_THERE, pytrace=False)
        pytest.skip(NOT_THERE)
    from playwright.sync_api import sync_playwright

    # Its sandbox does not start for root; what is opened here are our own files.
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=options)
        yield started
        started.close()


@dataclass
class Seen:
    """A page, and what happened while it was open."""

    page: Page
    #: Other addresses than the file that it asked for.
    asked: list[str] = field(default_factory=list)
    #: Warnings and errors of the console, and errors that no script caught.
    complaints: list[str] = field(default_factory=list)


Look = Callable[..., Seen]


@pytest.fixture
def look_at_all(browser: Browser) -> Iterator[Look]:
    """Open a file in a window of a width (CSS pixels), light or dark, with or without scripts."""
    contexts = []

    def look(file: Path, width: int = 1280, scheme: Any = "light", *, scripts: bool = True) -> Seen:
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,
            java_script_enabled=scripts,
        )
        contexts.append(context)
        seen = Seen(context.new_page())
        page, address = seen.page, file.as_uri()
        page.on("request", lambda r: seen.asked.append(r.url) if r.url != address else None)
        page.on("pageerror", lambda error: seen.complaints.append(str(error)))
        page.on(
            "console",
            lambda m: seen.complaints.append(m.text) if m.type in ("error", "warning") else None,
        )
        context.route(
            lambda url: not url.startswith(("file:", "data:")), lambda route: route.abort()
        )
        page.goto(address)
        return seen

    yield look
    for context in contexts:
        context.close()


@pytest.fixture
def look(look_at_all: Look) -> Iterator[Look]:
    """The same, for pages that must ask for nothing and complain about nothing."""
    opened: list[Seen] = []

    def look(*args: Any, **options: Any) -> Seen:
        opened.append(look_at_all(*args, **options))
        return opened[-1]

    yield look
    for seen in opened:
        assert not [url for url in seen.asked if not url.startswith("data:")]
        assert seen.complaints == []

"""Fixtures for tests in a real Chromium: `look` opens a file and records its requests and complaints.

Chromium is the one on the PATH, or the one that QUANTEXP_CHROMIUM names. If it or Playwright is missing, the tests are
skipped; with QUANTEXP_REQUIRE_BROWSER=1 they fail.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from quantexp.analysis.report.write import write_report
from quantexp.config.compose import compose
from quantexp.runs.paths import RunDir

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

#: The schemes of `runs`.
SCHEMES = ("bf16", "FA_linear_mxfp8")
#: The width of a page in CSS pixels.
WIDE = "Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)"
NOT_THERE = "not run: in a real browser (install one with tests/browser/setup.sh)"
HERE = Path(__file__).parent
_NAMES = ("chromium", "chromium-browser", "google-chrome")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("browser")


def _chromium() -> str | None:
    chosen = os.environ.get("QUANTEXP_CHROMIUM")
    paths = [chosen] if chosen else [path for name in _NAMES if (path := shutil.which(name))]
    return paths[0] if paths and importlib.util.find_spec("playwright") else None


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests of this folder: until Playwright ends, no other event loop can run in its thread."""
    path = _chromium()
    if path is None:
        if os.environ.get("QUANTEXP_REQUIRE_BROWSER") == "1":
            pytest.fail(NOT_THERE, pytrace=False)
        pytest.skip(NOT_THERE)
    from playwright.sync_api import sync_playwright

    # Its sandbox does not start for root; the tests open only files of their own.
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=options)
        yield started
        started.close()


@dataclass
class Visit:
    """An open page, with its requests and complaints."""

    page: Page
    #: The requested addresses, without the file itself.
    requests: list[str] = field(default_factory=list)
    #: Warnings and errors of the console, and uncaught errors of scripts.
    complaints: list[str] = field(default_factory=list)


Look = Callable[..., Visit]


@pytest.fixture
def look_at_all(browser: Browser) -> Iterator[Look]:
    """Open a file in a window of a width (CSS pixels), light or dark, with or without scripts."""
    contexts = []

    def look(
        file: Path, width: int = 1280, scheme: Any = "light", *, scripts: bool = True
    ) -> Visit:
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,
            java_script_enabled=scripts,
        )
        contexts.append(context)
        visit = Visit(context.new_page())
        page, address = visit.page, file.as_uri()
        page.on("request", lambda r: visit.requests.append(r.url) if r.url != address else None)
        page.on("pageerror", lambda error: visit.complaints.append(str(error)))
        page.on(
            "console",
            lambda m: visit.complaints.append(m.text) if m.type in ("error", "warning") else None,
        )
        context.route(
            lambda url: not url.startswith(("file:", "data:")), lambda route: route.abort()
        )
        page.goto(address)
        return visit

    yield look
    for context in contexts:
        context.close()


@pytest.fixture
def look(look_at_all: Look) -> Iterator[Look]:
    """The same, for pages that must have no requests and no complaints."""
    opened: list[Visit] = []

    def look(*args: Any, **options: Any) -> Visit:
        opened.append(look_at_all(*args, **options))
        return opened[-1]

    yield look
    for visit in opened:
        assert not [url for url in visit.requests if not url.startswith("data:")]
        assert visit.complaints == []


@pytest.fixture(scope="package")
def runs(
    browser: object, tiny_words: Sequence[str], tmp_path_factory: pytest.TempPathFactory
) -> list[RunDir]:
    """A run of each scheme with the tensors of two iterations; runs only if there is a browser."""
    from quantexp.launch.attempt import open_run
    from quantexp.training.worker import Worker

    root = tmp_path_factory.mktemp("browser") / "runs"
    words = [*tiny_words, f"paths.root={root}", "capture.iterations=[1,2]", "capture.format=mxfp8"]
    folders = []
    for scheme in SCHEMES:
        experiment = compose([*words, f"quant={scheme}"])
        with open_run(experiment, "cpu", ["test"]) as (folder, _):
            assert Worker(folder.run, experiment).run() == 0
        folders.append(folder.run)
    return folders


@pytest.fixture(scope="package")
def sweep(runs: list[RunDir]) -> Path:
    """The page of both runs."""
    return write_report([run.root for run in runs], runs[0].root.parent)

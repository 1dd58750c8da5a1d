"""Fixtures for tests against a real SLURM: `cluster` (both kinds in turn), `accounting` and `plain`.

They point SLURM's commands at the cluster, for the test and the tested code alike, and leave it without jobs. Without
a running cluster the test is skipped; with QUANTEXP_REQUIRE_SLURM=1 it fails.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from .cluster import KINDS, Cluster, find

NOT_RUNNING = "no SLURM test cluster is running; start it with tests/slurm/setup.sh"
HERE = Path(__file__).parent

_find_once = cache(find)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("slurm")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Wraps pytest's own summary, so that this line comes after the long list of skipped tests."""
    yield
    skipped = terminalreporter.stats.get("skipped", [])
    left_out = sum(NOT_RUNNING in str(report.longrepr) for report in skipped)
    if left_out:
        line = (
            f"not run: {left_out} tests against a real SLURM (start one with tests/slurm/setup.sh)"
        )
        terminalreporter.write_line(line, yellow=True)


def _use(kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    running = _find_once(kind)
    if running is None:
        if os.environ.get("QUANTEXP_REQUIRE_SLURM") == "1":
            pytest.fail(NOT_RUNNING, pytrace=False)
        pytest.skip(NOT_RUNNING)
    for name in os.environ:
        if name.startswith(("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "SACCT_", "SCANCEL_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_CONF", str(running.slurm_conf))
    yield running
    running.restore()


@pytest.fixture(params=KINDS)
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Each kind of cluster in turn."""
    yield from _use(request.param, monkeypatch)


@pytest.fixture
def accounting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster where sacct works."""
    yield from _use("accounting", monkeypatch)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster without accounting, which soon forgets jobs that ended."""
    yield from _use("plain", monkeypatch)

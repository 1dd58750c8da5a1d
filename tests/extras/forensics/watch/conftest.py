"""Folders of runs to watch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from quantexp.extras.forensics.watch.folder import FolderWatch
from quantexp.runs.find import scope
from quantexp.runs.paths import RunDir
from quantexp.runs.status import Status, read_status
from tests.analysis.compare.runs import Runs


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    """An empty folder of runs."""
    return Runs(tmp_path / "runs")


def ledger(runs: Sequence[RunDir]) -> list[dict[str, Any]]:
    """What the ledger would say: the content of status.json."""
    rows = []
    for run in runs:
        status = read_status(run.status) or Status()  # the run may have gone meanwhile
        alive = status.state.value in ("running", "pending")
        rows.append({"state": status.state.value, "alive": alive, "iterations": status.iterations})
    return rows


@pytest.fixture
def watched(runs: Runs) -> Callable[[], FolderWatch]:
    """Watch the folder; the ledger is asked at each refresh."""

    def watch() -> FolderWatch:
        return FolderWatch(lambda: scope(None, runs.root), ledger, runs.root)

    return watch


@pytest.fixture(autouse=True)
def _ledger_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantexp.extras.forensics.watch.folder.LEDGER_S", 0.0)

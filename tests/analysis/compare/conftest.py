"""Run folders to compare."""

from __future__ import annotations

from pathlib import Path

import pytest

from .runs import Runs


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    """An empty folder of runs."""
    return Runs(tmp_path / "runs")

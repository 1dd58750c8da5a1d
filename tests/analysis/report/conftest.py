"""Run folders to report on, with statistics of captured tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.analysis.compare.runs import Runs


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    """An empty folder of runs."""
    return Runs(tmp_path / "runs")

"""Runs that are killed at random moments, again and again, end as undisturbed ones do (`benchmarks/kills.py`)."""

from __future__ import annotations

from pathlib import Path

import kills
import pytest


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", ["mxfp4", "tp2"])
def test_ten_kills_change_nothing(case: str, cache: Path, tmp_path: Path) -> None:
    words = [*kills.CASES[case], f"paths.cache={cache}"]
    undisturbed = kills.run(words, tmp_path / "undisturbed")
    killed = kills.kill_and_go_on(words, tmp_path / "killed", undisturbed, kills=10, seed=1)
    assert killed.kills.total() == 10
    assert killed.ended
    assert killed.differ == set()

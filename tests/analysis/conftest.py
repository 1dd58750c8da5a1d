"""Run folders with synthetic captures."""

from __future__ import annotations

from pathlib import Path

import pytest

from .captures import Capture


@pytest.fixture
def capture(tmp_path: Path) -> Capture:
    """An empty capture in a run folder of its own."""
    return Capture(tmp_path / "llama32-1b_wikipedia_FA_linear_mxfp8-1a2b3c4d")

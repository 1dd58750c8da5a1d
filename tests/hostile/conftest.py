"""What attacks share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quantexp.config.load import save
from quantexp.schema import Experiment


@pytest.fixture
def config(tiny: Callable[..., Experiment], tmp_path: Path) -> str:
    """The configuration of a run, for folders that no launcher prepared."""
    file = tmp_path / "config.yaml"
    save(tiny("capture=off"), file)
    return file.read_text()

"""A folder of own schemes and sweeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from .composed import EXPERIMENT, OWN, SWEEP


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A config-dir with the scheme `own` and two experiments; its path needs every kind of quoting."""
    folder = tmp_path / "it's, a \\ folder"
    for group, name, text in (
        ("quant", "own", OWN),
        ("experiment", "short", EXPERIMENT),
        ("experiment", "swept", SWEEP),
    ):
        (folder / group).mkdir(parents=True, exist_ok=True)
        (folder / group / f"{name}.yaml").write_text(text)
    return folder

"""A secret of the environment is in no file of a run, nor in the command's output, with every tracker on."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from quantexp.runs.paths import RunDir

from .conftest import SECRETS


def files(folder: Path) -> list[Path]:
    """All files, including the targets of links."""
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.slow
@pytest.mark.parametrize("variable", SECRETS)
def test_secret_is_in_no_file(real: RunDir, variable: str) -> None:
    folder = real.root.parent.parent
    looked_at = files(folder)
    names = {path.name for path in looked_at}
    assert {"provenance.json", "config.yaml", "rank0.log", "libraries0.log", "mlflow.db"} <= names
    assert {path.suffix for path in looked_at} >= {".wandb", ".log", ".json", ".jsonl"}
    value = SECRETS[variable].encode()
    for path in looked_at:
        content = path.read_bytes()
        assert value not in content, path
        assert base64.b64encode(value) not in content, path

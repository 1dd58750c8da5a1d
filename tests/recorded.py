"""What tests read from a run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, Status, read_status


def json_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def status_of(run: RunDir) -> Status:
    status = read_status(run.status)
    assert status is not None
    return status


def failure(run: RunDir) -> str:
    """The reason of a run that failed."""
    status = status_of(run)
    assert status.state is State.FAILED
    return status.reason

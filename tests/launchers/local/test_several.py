"""Several simultaneous submitters of one sweep, as processes: every run runs once, and all of them report its end."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from quantexp.runs.status import State, read_json, read_status

SCRIPT = Path(__file__).with_name("several.py")
Several = Callable[..., list[int]]


@pytest.fixture
def several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Several:
    """Starts the submitters and returns their exit codes."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def submit(*words: int, seconds: float = 0.05) -> list[int]:
        monkeypatch.setenv("STAND_IN_SECONDS", str(seconds))
        process = subprocess.run(
            [sys.executable, str(SCRIPT), str(tmp_path / "runs"), *map(str, words)],
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert process.returncode == 0, process.stderr
        return [int(word) for word in process.stdout.split()]

    return submit


def attempts(root: Path) -> Counter[str]:
    """How often each run was started, earlier attempts included."""
    return Counter(mark.relative_to(root).parts[0] for mark in root.glob("llama*/**/started-by-*"))


def states(root: Path) -> list[State]:
    statuses = [read_status(file) for file in root.glob("llama*/status.json")]
    return [status.state for status in statuses if status is not None]


@pytest.mark.slow
def test_eight_submitters_run_each_of_twenty_runs_exactly_once(
    several: Several, tmp_path: Path
) -> None:
    assert several(8, 20) == [0] * 8
    root = tmp_path / "runs"
    assert sorted(attempts(root).values()) == [1] * 20
    assert states(root) == [State.COMPLETED] * 20
    lists = [read_json(file) for file in (root / "sweeps").glob("*.json")]
    assert len(lists) == 8
    for sweep in lists:
        assert [row["state"] for row in sweep["runs"]] == ["completed"] * 20
    ran = [row["run"] for sweep in lists for row in sweep["runs"] if not row["skipped"]]
    assert len(ran) == len(set(ran)) == 20
    for i in range(8):
        table = (tmp_path / f"output{i}").read_text().partition("20 runs")[2]
        assert len(re.findall(r"  (completed|skipped) *$", table, re.MULTILINE)) == 20


@pytest.mark.slow
def test_run_of_a_killed_submitter_is_taken_over(several: Several, tmp_path: Path) -> None:
    codes = several(3, 6, 0, seconds=1.0)
    assert codes == [-9, 0, 0]
    root = tmp_path / "runs"
    assert states(root) == [State.COMPLETED] * 6
    started = attempts(root)
    assert sorted(started.values()) == [1] * 5 + [2], "the run that was killed, once more"
    (taken_over,) = (run for run, count in started.items() if count == 2)
    earlier = read_status(root / taken_over / "attempts" / "1" / "status.json")
    assert earlier is not None
    assert (earlier.state, earlier.reason) == (State.CANCELLED, "interrupted")

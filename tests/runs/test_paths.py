"""The paths of all files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from quantexp.folders import cache_dir, conf_dir
from quantexp.runs.paths import RunDir, RunsRoot
from quantexp.runs.sweep_list import make_shared


def test_run_folder_has_the_contracts_names() -> None:
    run = RunDir(Path("/r"))
    named = {
        "config.yaml": run.config,
        "provenance.json": run.provenance,
        "status.json": run.status,
        "metrics.jsonl": run.metrics,
        "precision.json": run.precision,
        "tensors": run.tensors,
        "figures": run.figures,
        "logs": run.logs,
        "logs/rank3.log": run.rank_log(3),
        "attempts": run.attempts,
        ".lock": run.lock,
    }
    assert {name: Path("/r") / name for name in named} == named


def test_attempts_are_counted_from_one(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.attempt == 1
    for number in ("1", "2", "10"):
        (run.attempts / number).mkdir(parents=True)
    assert run.attempt == 11


def test_tensors_are_in_the_run_folder_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    run = RunDir(Path("/r/m_d_s-1"))
    assert run.captured(None) == Path("/r/m_d_s-1/tensors")
    assert run.captured("/big") == Path("/big/m_d_s-1")
    assert run.captured("~/big") == Path("/home/me/big/m_d_s-1")


def test_cache_is_the_configured_or_the_user_s_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir("~/c") == Path("/home/me/c")
    assert cache_dir(None) == Path("/home/me/.cache/quantexp")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir(None) == Path("/x/quantexp")


def test_relative_cache_is_below_the_working_directory(in_tmp: Path) -> None:
    assert cache_dir("c") == in_tmp / "c"


def test_shipped_configuration_exists() -> None:
    assert (conf_dir() / "config.yaml").is_file()


def test_private_folders_of_a_further_user_have_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = RunsRoot(tmp_path)
    assert (shared.snapshots.name, shared.submissions.name) == ("snapshots", "submissions")
    shared.snapshots.mkdir()
    assert shared.snapshots.name == "snapshots"
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    assert (shared.snapshots.name, shared.submissions.name) == ("snapshots-4321", "submissions")


@pytest.mark.parametrize(
    ("root", "umask", "shared"),
    [(0o1777, 0o22, 0o1777), (0o2775, 0o22, 0o2775), (0o755, 0o22, 0o755), (0o2770, 0o77, 0o2770)],
)
def test_list_of_sweeps_is_shared_as_its_folder_is(
    tmp_path: Path, root: int, umask: int, shared: int
) -> None:
    tmp_path.chmod(root)
    before = os.umask(umask)
    try:
        make_shared(tmp_path / "sweeps")
        make_shared(tmp_path / "sweeps")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "sweeps").stat().st_mode) == shared

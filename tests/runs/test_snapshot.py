"""Snapshots of the source: complete, shared, checked for changes, and imported by Python."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quantexp.errors import RunError
from quantexp.runs.snapshot import check_snapshot, environment, require_snapshot, take_snapshot

ROOT = Path(__file__).parents[2]
take_uncached = take_snapshot.__wrapped__


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    folder: Path = take_uncached(tmp_path / "runs")
    return folder


def test_snapshot_is_laid_out_as_a_wheel_is(snapshot: Path) -> None:
    assert snapshot.parent.name == "snapshots"
    for file in (
        "quantexp/training/worker.py",
        "quantexp/conf/config.yaml",
        "quantexp_launchers/slurm/job.py",
    ):
        assert (snapshot / file).is_file()
    assert not list(snapshot.rglob("__pycache__"))


def test_every_file_of_the_checkout_is_in_it(snapshot: Path) -> None:
    packages = {
        "quantexp/": ROOT / "quantexp",
        "quantexp_launchers/": ROOT / "launchers/quantexp_launchers",
        "quantexp/conf/": ROOT / "conf",
    }
    expected = {
        f"{name}{file}"
        for name, folder in packages.items()
        for file in subprocess.run(
            ["git", "ls-files"], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.splitlines()
    }
    assert expected
    assert {file for file in expected if not (snapshot / file).is_file()} == set()


def test_other_users_cannot_read_or_change_it(snapshot: Path) -> None:
    assert stat.S_IMODE(snapshot.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE((snapshot / "quantexp" / "training" / "worker.py").stat().st_mode) == 0o400


def test_same_source_is_stored_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(take_uncached, [tmp_path / "runs"] * 8))
    (folder,) = folders
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_untouched_snapshot_passes_and_running_it_leaves_nothing(snapshot: Path) -> None:
    check_snapshot(snapshot)
    variables = {**os.environ, **environment(snapshot)}
    subprocess.run([sys.executable, "-c", "import quantexp.errors"], env=variables, check=True)
    check_snapshot(snapshot)


def test_changed_snapshot_is_moved_aside_and_taken_again(
    snapshot: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = snapshot / "quantexp" / "errors.py"
    file.chmod(0o600)
    file.write_text("changed\n")
    assert take_uncached(tmp_path / "runs") == snapshot
    check_snapshot(snapshot)
    (aside,) = snapshot.parent.glob(".changed-*")
    assert (aside / "quantexp" / "errors.py").read_text() == "changed\n"
    (record,) = caplog.records
    assert "was changed (a file has other content, is missing, or was added): it is now" in (
        record.getMessage()
    )


def test_changed_snapshot_is_refused(snapshot: Path) -> None:
    file = snapshot / "quantexp" / "training" / "worker.py"
    file.chmod(0o600)
    file.write_text("print('something else')\n")
    with pytest.raises(RunError, match=r"was changed in .* \(a file has .*; submit the run again"):
        check_snapshot(snapshot)


def test_vanished_snapshot_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"submitted with is gone from .*; submit the run again"):
        check_snapshot(tmp_path / "0123456789abcdef")


def test_snapshot_that_cannot_be_written_is_a_clean_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    words = r"the source cannot be copied: .* cannot be written \(Not a directory\); set paths\.root to another folder"
    with pytest.raises(RunError, match=words):
        take_uncached(tmp_path / "runs")


def test_snapshot_on_a_full_disk_says_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfile", full)
    words = r"the source cannot be copied: .* \(No space left on device: .* are free\); free some space on the disk of"
    with pytest.raises(RunError, match=words):
        take_uncached(tmp_path / "runs")
    assert not list((tmp_path / "runs" / "snapshots").iterdir())


def test_python_imports_the_snapshot_even_inside_a_checkout(snapshot: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "quantexp").mkdir(parents=True)
    (checkout / "quantexp" / "__init__.py").write_text("raise SystemExit('the working directory')")
    program = (
        "import quantexp, quantexp_launchers.local.processes as local; "
        "print(quantexp.__file__, local.__file__, sep='\\n')"
    )
    process = subprocess.run(
        [sys.executable, "-c", program],
        cwd=checkout,
        env={**os.environ, **environment(snapshot)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert process.stdout.split() == [
        str(snapshot / "quantexp" / "__init__.py"),
        str(snapshot / "quantexp_launchers" / "local" / "processes.py"),
    ]


def test_own_python_path_stays_behind_the_snapshot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    assert environment(tmp_path)["PYTHONPATH"] == f"{tmp_path}{os.pathsep}/mine"


def test_rank_refuses_a_snapshot_that_was_changed(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantexp.__file__", str(snapshot / "quantexp" / "__init__.py"))
    file = tmp_path / "provenance.json"
    file.write_text(f'{{"source": {{"snapshot": "{snapshot.name}"}}}}')
    require_snapshot(file)
    (snapshot / "torch").symlink_to(tmp_path)
    with pytest.raises(
        RunError, match=r"was changed in .* \(torch is a link, or no regular file\)"
    ):
        require_snapshot(file)


def test_worker_of_another_source_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "provenance.json"
    file.write_text('{"source": {"snapshot": "0123456789abcdef"}}')
    with pytest.raises(
        RunError, match=r"source snapshot 0123456789abcdef, and quantexp was imported"
    ):
        require_snapshot(file)

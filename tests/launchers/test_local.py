"""A worker process in the foreground: its log, its exit code, its end."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from hydra_plugins.quantexp_launcher import local
from hydra_plugins.quantexp_launcher.local import run_worker


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for `python -m quantexp.worker`: RUN_DIR/worker.py is what it runs."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$3/worker.py" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    return tmp_path / "worker.py"


def test_worker_is_given_the_folder_alone_and_its_words_are_logged(
    worker: Path, tmp_path: Path
) -> None:
    worker.write_text("import sys\nprint(sys.argv[1:])\nsys.exit(7)\n")
    polls: list[int] = []
    code = run_worker(tmp_path, tmp_path / "log", lambda: polls.append(1))
    assert code == 7
    expected = ["-m", "quantexp.worker", str(tmp_path), "--with-parent"]
    assert (tmp_path / "log").read_text() == f"{expected}\n"
    assert polls, "the display is brought up to date at least once at the end"


def test_log_is_continued(worker: Path, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("before\n")
    worker.write_text("import sys\nprint('after', file=sys.stderr)\n")
    assert run_worker(tmp_path, tmp_path / "log", lambda: None) == 0
    assert (tmp_path / "log").read_text() == "before\nafter\n"


def test_killed_worker_has_its_signals_code(worker: Path, tmp_path: Path) -> None:
    worker.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    assert run_worker(tmp_path, tmp_path / "log", lambda: None) == -signal.SIGKILL


def test_file_descriptors_asked_for_stay_open(worker: Path, tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    worker.write_text(f"import os\nos.write({write_end}, b'x')\n")
    assert run_worker(tmp_path, tmp_path / "log", lambda: None, keep_open=(write_end,)) == 0
    assert os.read(read_end, 1) == b"x"
    os.close(read_end)
    os.close(write_end)


WAITING = """\
import os, pathlib, signal, sys, time
here = pathlib.Path(sys.argv[3])
signal.signal(signal.SIGTERM, {handler})
(here / "part").write_text(str(os.getpid()))
(here / "part").rename(here / "pid")
time.sleep(60)
"""


def interrupting(tmp_path: Path) -> None:
    if (tmp_path / "pid").exists():
        raise KeyboardInterrupt


def test_interrupted_worker_may_end_itself(worker: Path, tmp_path: Path) -> None:
    handler = "lambda *_: ((here / 'ended').touch(), sys.exit(130))"
    worker.write_text(WAITING.format(handler=handler))
    with pytest.raises(KeyboardInterrupt):
        run_worker(tmp_path, tmp_path / "log", lambda: interrupting(tmp_path))
    assert (tmp_path / "ended").exists()


def test_worker_that_does_not_end_is_killed(
    worker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "GRACE_S", 0.2)
    worker.write_text(WAITING.format(handler="signal.SIG_IGN"))
    with pytest.raises(KeyboardInterrupt):
        run_worker(tmp_path, tmp_path / "log", lambda: interrupting(tmp_path))
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)

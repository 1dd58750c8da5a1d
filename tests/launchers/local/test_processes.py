"""Workers in the foreground: their logs, exit codes and ends, and that none stays behind."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from quantexp_launchers.local import processes
from quantexp_launchers.local.processes import command, run_workers

from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, Status, now, write_status
from quantexp.schema import LauncherConfig

ALONE = LauncherConfig()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.logs.mkdir()
    return run


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for `python -m quantexp.training.worker`: it runs RUN_DIR/worker.py."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$3/worker.py" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    return tmp_path / "worker.py"


def test_worker_gets_the_folder_alone_and_its_output_is_logged(worker: Path, run: RunDir) -> None:
    worker.write_text("import sys\nprint(sys.argv[1:])\nsys.exit(7)\n")
    polls: list[int] = []
    code = run_workers(run, ALONE, lambda: polls.append(1), {})
    assert code == 7
    expected = ["-m", "quantexp.training.worker", str(run.root), "--with-parent"]
    assert run.rank_log(0).read_text() == f"{expected}\n"
    assert polls, "the display is brought up to date at least once at the end"


def test_log_is_continued(worker: Path, run: RunDir) -> None:
    run.rank_log(0).write_text("before\n")
    worker.write_text("import sys\nprint('after', file=sys.stderr)\n")
    assert run_workers(run, ALONE, lambda: None, {}) == 0
    assert run.rank_log(0).read_text() == "before\nafter\n"


def test_killed_worker_has_its_signals_code(worker: Path, run: RunDir) -> None:
    worker.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    assert run_workers(run, ALONE, lambda: None, {}) == -signal.SIGKILL


def test_requested_file_descriptors_stay_open(worker: Path, run: RunDir) -> None:
    read_end, write_end = os.pipe()
    worker.write_text(f"import os\nos.write({write_end}, b'x')\n")
    assert run_workers(run, ALONE, lambda: None, {}, keep_open=(write_end,)) == 0
    assert os.read(read_end, 1) == b"x"
    os.close(read_end)
    os.close(write_end)


WAITING = """\
import os, pathlib, signal, sys, time
here = pathlib.Path(sys.argv[3])
signal.signal(signal.SIGTERM, {handler})
(here / "part").write_text(str(os.getpid()))
(here / "part").rename(here / "pid")
time.sleep(600)
"""


def interrupting(tmp_path: Path) -> None:
    if (tmp_path / "pid").exists():
        raise KeyboardInterrupt


def interrupting_once(tmp_path: Path) -> None:
    if (tmp_path / "pid").exists() and not (tmp_path / "interrupted").exists():
        (tmp_path / "interrupted").touch()
        raise KeyboardInterrupt


def test_interrupted_worker_may_end_itself(worker: Path, run: RunDir) -> None:
    handler = "lambda *_: (time.sleep(0.5), (here / 'ended').touch(), sys.exit(130))"
    worker.write_text(WAITING.format(handler=handler))
    with pytest.raises(KeyboardInterrupt):
        run_workers(run, ALONE, lambda: interrupting_once(run.root), {})
    assert (run.root / "ended").exists()


def test_interrupt_is_reported_once_with_the_seconds_of_grace(worker: Path, run: RunDir) -> None:
    worker.write_text(WAITING.format(handler="lambda *_: sys.exit(130)"))
    grace_s: list[float] = []
    with pytest.raises(KeyboardInterrupt):
        run_workers(run, ALONE, lambda: interrupting_once(run.root), {}, on_stop=grace_s.append)
    assert grace_s == [processes.GRACE_S]


@pytest.mark.parametrize("interrupts", [True, False])
def test_end_of_the_ranks_is_reported_only_after_an_interrupt(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, interrupts: bool
) -> None:
    monkeypatch.setattr(
        processes, "command", lambda *_: [sys.executable, "-c", "import time; time.sleep(60)"]
    )
    grace_s: list[float] = []
    write_status(run.status, Status(State.COMPLETED, finished=now()))

    def on_poll() -> None:
        if interrupts and not grace_s:
            raise KeyboardInterrupt

    overdue = LauncherConfig(num_processes=2, timeout_min=10.0 if interrupts else 0.001)
    with contextlib.suppress(KeyboardInterrupt):
        assert run_workers(run, overdue, on_poll, {}, on_stop=grace_s.append) == 1
    assert grace_s == ([processes.GRACE_S] if interrupts else [])


def test_second_interrupt_gives_a_worker_no_more_time(
    worker: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GRACE_S", 200.0)
    worker.write_text(WAITING.format(handler="signal.SIG_IGN"))
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_workers(run, ALONE, lambda: interrupting(run.root), {})
    assert time.monotonic() - start < processes.GRACE_S
    assert not psutil.pid_exists(int((run.root / "pid").read_text()))


def test_worker_that_does_not_end_is_killed(
    worker: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GRACE_S", 0.2)
    worker.write_text(WAITING.format(handler="signal.SIG_IGN"))
    with pytest.raises(KeyboardInterrupt):
        run_workers(run, ALONE, lambda: interrupting_once(run.root), {})
    with pytest.raises(ProcessLookupError):
        os.kill(int((run.root / "pid").read_text()), 0)


def test_several_processes_are_started_by_torchrun_and_meet_through_a_file(tmp_path: Path) -> None:
    words = command(tmp_path, 3)
    assert words[:4] == [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3"]
    assert f"--rdzv-endpoint={tmp_path / '.rendezvous'}" in words
    assert words[-3:] == ["-m", "quantexp.training.worker", str(tmp_path)]


LEAVES_A_CHILD = """\
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path({pid!r}).write_text(str(child.pid))
print(os.environ["OMP_NUM_THREADS"], os.environ["GLOO_SOCKET_IFNAME"], flush=True)
time.sleep({seconds})
sys.exit(5)
"""


@pytest.mark.parametrize("seconds", [1, 600])
def test_no_rank_outlives_torchrun_whether_it_fails_or_is_stopped(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    pid = run.root / "pid"
    script = LEAVES_A_CHILD.format(pid=str(pid), seconds=seconds)
    monkeypatch.setattr(processes, "command", lambda *_: [sys.executable, "-c", script])
    monkeypatch.setenv("OMP_NUM_THREADS", "7")

    def on_poll() -> None:
        if seconds == 600 and run.torchrun_log.read_text():
            write_status(run.status, Status(State.COMPLETED, finished=now()))

    code = run_workers(run, LauncherConfig(num_processes=2, timeout_min=0.001), on_poll, {})
    assert code == (5 if seconds == 1 else 1), "a signal of its own is not a cause"
    assert run.torchrun_log.read_text() == "7 lo\n"
    assert not psutil.pid_exists(int(pid.read_text()))


@pytest.mark.parametrize(("num_threads", "threads"), [(3, "3"), (None, "1")])
def test_ranks_share_the_cores_unless_num_threads_is_set(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, num_threads: int | None, threads: str
) -> None:
    script = "import os; print(os.environ['OMP_NUM_THREADS'])"
    monkeypatch.setattr(processes, "command", lambda *_: [sys.executable, "-c", script])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    launcher = LauncherConfig(num_processes=2, num_threads=num_threads)
    assert run_workers(run, launcher, lambda: None, {}) == 0
    assert run.torchrun_log.read_text() == f"{threads}\n"

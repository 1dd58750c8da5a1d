"""`quantexp capture RUN` on the command line."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from quantexp.cli.main import main
from quantexp.extras.forensics import capture
from quantexp.runs.dossiers import Dossier, Trigger, folder_of, take_request, write_dossier
from quantexp.runs.lock import take_lock
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, now, read_status, write_status

Captured = pytest.CaptureFixture[str]
MakeRun = Callable[..., RunDir]


@pytest.fixture
def run(in_tmp: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run that this process executes."""
    monkeypatch.setattr(capture, "_LOOK_S", 0.01)
    run = make_run("m_d_bf16-1", State.RUNNING, current_iteration=3, pid=os.getpid())
    take_lock(run)
    return run


def written(run: RunDir, whole: int | None) -> None:
    """What the run does when it has the request."""
    while not take_request(run):
        time.sleep(0.01)
    folder_of(run, 3).mkdir(parents=True)
    write_dossier(run, Dossier(3, now(), Trigger.REQUEST, "requested from outside"))
    if whole is None:
        status = read_status(run.status)
        assert status is not None
        status.state = State.COMPLETED
        write_status(run.status, status)
        return
    dossier = Dossier(
        3, now(), Trigger.REQUEST, "asked", whole_iteration=whole, tensors=56, num_bytes=1
    )
    write_dossier(run, dossier)


@pytest.mark.parametrize(
    ("whole", "words"),
    [(4, "56 tensors of iteration 4"), (None, "no iteration followed, so it has no values")],
)
def test_command_waits_for_the_values(
    run: RunDir, capsys: Captured, whole: int | None, words: str
) -> None:
    thread = threading.Thread(target=written, args=(run, whole))
    thread.start()
    assert main(["capture", "bf16-1"]) == 0
    thread.join()
    assert capsys.readouterr().out == f"runs/m_d_bf16-1/dossiers/iteration_00000003: {words}\n"


def test_command_need_not_wait(run: RunDir, capsys: Captured) -> None:
    assert main(["capture", "--no-wait", "bf16-1"]) == 0
    assert capsys.readouterr().out == "requested: the dossier follows iteration 3\n"
    assert take_request(run)
    assert not take_request(run)


@pytest.mark.parametrize("state", [State.COMPLETED, State.FAILED])
def test_run_that_does_not_run_is_refused(
    in_tmp: Path, make_run: MakeRun, capsys: Captured, state: State
) -> None:
    run = make_run("m_d_bf16-1", state)
    assert main(["capture", "bf16-1"]) == 1
    assert capsys.readouterr().err == (
        f"quantexp: m_d_bf16-1 is {state.value}: only a running run can write a dossier\n"
    )
    assert not run.capture_request.exists()


def test_a_run_must_be_named(in_tmp: Path, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["capture"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == (
        "quantexp: capture takes a run: its folder, or a part of its name; see quantexp help capture\n"
    )

"""`quantexp status`, `logs` and `cancel` on the command line."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from quantexp.cli import ledger
from quantexp.cli.main import main
from quantexp.runs.fencing import Claim
from quantexp.runs.lock import take_lock
from quantexp.runs.paths import RunDir, RunsRoot
from quantexp.runs.status import State, read_status, write_json, write_status
from tests.launchers.slurm.conftest import SUBMISSION, FakeSlurm, MakeRun, queue_line

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ledger, "WATCH_S", 0.05)


def misuse(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_status_shows_every_run_of_the_folder_of_runs(capsys: Captured, make_run: MakeRun) -> None:
    make_run("m_d_bf16-1", State.COMPLETED, iteration=8)
    make_run("m_d_FA_mxfp8-2", State.FAILED, iteration=2, reason="loss nan")
    assert main(["status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["m_d_FA_mxfp8-2", "failed", "2/8", "4.7500", "128", "loss", "nan"]
    assert lines[2].split() == ["m_d_bf16-1", "completed", "8/8", "4.0000", "128"]
    assert lines[3] == "2 runs: 1 completed, 1 failed"


def test_status_says_what_went_wrong_in_a_run_that_went_on(
    capsys: Captured, make_run: MakeRun
) -> None:
    nonfinite = "iteration 5: 3 NaN in L0-fc1 output"
    make_run("m_d_bf16-1", State.COMPLETED, skipped=2, nonfinite=nonfinite, dossiers=[5])
    make_run("m_d_bf16-2", State.COMPLETED, dossiers=[3, 9, 12, 40])
    assert main(["status"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"2 steps left out, the last in {nonfinite}; 1 dossier after iteration 5" in out
    assert "4 dossiers, the last after iteration 9, 12, 40" in out
    assert main(["status", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)[0]
    assert (row["skipped"], row["nonfinite"], row["dossiers"]) == (2, nonfinite, [5])


def test_status_takes_the_folder_of_runs_as_list_does(
    capsys: Captured, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run("m_d_bf16-1", State.COMPLETED)
    monkeypatch.chdir("/")
    assert main(["status", f"paths.root={tmp_path / 'runs'}"]) == 0
    assert "1 run: 1 completed" in capsys.readouterr().out
    assert main(["status", f"paths.root={tmp_path / 'runs'}", "m_d_bf16-1", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["run"], row["state"]) == ("m_d_bf16-1", "completed")


def test_status_records_an_end_that_the_run_did_not_record(
    capsys: Captured, make_run: MakeRun
) -> None:
    run = make_run("m_d_bf16-1", State.RUNNING, host=platform.node(), pid=2**22 + 1)
    assert main(["status"]) == 0
    assert "died without recording why" in capsys.readouterr().out
    status = read_status(run.status)
    assert status is not None
    assert status.state is State.PREEMPTED


def test_status_of_a_sweep_counts_missing_runs(
    capsys: Captured, make_run: MakeRun, tmp_path: Path
) -> None:
    make_run("m_d_bf16-1", State.COMPLETED)
    sweeps = RunsRoot(tmp_path / "runs").sweeps
    sweeps.mkdir()
    write_json(sweeps / "a.json", {"runs": [{"run": "m_d_bf16-1"}, {"run": "m_d_gone-2"}]})
    assert main(["status", "runs/sweeps/a.json"]) == 0
    assert "2 runs: 1 completed, 1 missing" in capsys.readouterr().out


def test_status_without_runs_is_one_line(capsys: Captured, tmp_path: Path) -> None:
    assert main(["status"]) == 0
    assert capsys.readouterr().out == f"no runs in {tmp_path / 'runs'}\n"
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert main(["status", "--watch"]) == 0


def test_status_of_a_folder_that_is_gone_is_one_line(capsys: Captured) -> None:
    assert main(["status", "runs/gone"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("quantexp: there is no run, sweep or folder runs/gone, and no run in ")
    assert err.count("\n") == 1


def test_watching_ends_when_all_runs_have_ended(capsys: Captured, make_run: MakeRun) -> None:
    run = make_run("m_d_bf16-1", State.RUNNING, host=platform.node(), pid=os.getpid())
    lock = take_lock(run)

    def ends() -> None:
        time.sleep(0.3)
        status = read_status(run.status)
        assert status is not None
        status.state = State.COMPLETED
        write_status(run.status, status)

    thread = threading.Thread(target=ends)
    thread.start()
    assert main(["status", "--watch"]) == 0
    thread.join()
    os.close(lock)
    assert "1 run: 1 completed" in capsys.readouterr().out


def test_watching_can_be_interrupted(
    capsys: Captured, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("m_d_bf16-1", State.RUNNING, host=platform.node(), pid=os.getpid())
    lock = take_lock(run)

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ledger.time, "sleep", interrupted)  # type: ignore[attr-defined]
    assert main(["status", "--watch"]) == 130
    os.close(lock)
    assert capsys.readouterr().err == "quantexp: interrupted\n"


def test_logs_shows_a_run_by_a_part_of_its_name(capsys: Captured, make_run: MakeRun) -> None:
    make_run("m_d_FA_mxfp8-2", State.COMPLETED).rank_log(0).write_text("hello\n")
    make_run("m_d_bf16-1", State.COMPLETED)
    assert main(["logs", "mxfp8"]) == 0
    assert capsys.readouterr().out == "hello\n"
    assert main(["logs", "-f", "mxfp8"]) == 0
    assert capsys.readouterr().out == "hello\n"
    assert main(["logs", "mxfp8", "--rank", "3"]) == 1
    assert "which has rank 0 alone, got 3" in capsys.readouterr().err
    assert main(["logs", "m_d"]) == 1
    assert "RUN must be a part of one run's name, got 'm_d'" in capsys.readouterr().err


def test_cancel_lists_cancelled_runs_and_failures(
    capsys: Captured, slurm: FakeSlurm, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.answer("squeue", queue_line("7_4", "PENDING", reason="Resources"))
    make_run("m_d_bf16-1", State.PENDING, submission=SUBMISSION, task=4, job_id="7_4")
    monkeypatch.setattr("quantexp.launch.ledger.cancel.POLL_S", 0.01)
    monkeypatch.setattr("quantexp.launch.ledger.cancel.APPEARANCE_S", 0.1)
    real = ledger.cancel  # type: ignore[attr-defined]

    def cancelled(entries: list[ledger.Standing]) -> object:  # type: ignore[name-defined]
        slurm.answer("squeue")
        return real(entries)

    monkeypatch.setattr(ledger, "cancel", cancelled)
    assert main(["cancel"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "stopping 1 run; what has not ended after 25 s is killed",
        "cancelled  m_d_bf16-1: job 7_4 waiting (Resources)",
    ]
    far = make_run("m_d_FA-2", State.RUNNING, host="far", pid=7)
    write_json(far.claim, vars(Claim("0123", "far", 7, "", "another boot", "another machine")))
    assert main(["cancel"]) == 1
    captured = capsys.readouterr()
    assert "\nnot cancelled  m_d_FA-2: far, process 7: it is not a process of" in captured.out
    assert captured.err == "quantexp: 1 of 1 runs could not be cancelled\n"


def test_cancel_with_nothing_to_end_is_one_line(
    capsys: Captured, make_run: MakeRun, tmp_path: Path
) -> None:
    make_run("m_d_bf16-1", State.COMPLETED)
    assert main(["cancel", "runs"]) == 0
    assert capsys.readouterr().out == f"no pending or running runs in {tmp_path / 'runs'}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["status", "a", "b"],
            "status takes [--watch | --json] [DIR] [paths.root=FOLDER], got a b",
        ),
        (
            ["status", "training=fast"],
            "status takes [--watch | --json] [DIR] [paths.root=FOLDER], got training=fast",
        ),
        (["cancel", "a", "b"], "cancel takes [DIR] [paths.root=FOLDER], got a b"),
        (["logs", "a", "b"], "logs takes [--rank N] [-f] RUN [paths.root=FOLDER], got a b"),
        (["logs"], "logs takes a run: its folder, or a part of its name"),
        (
            ["logs", "a", "--rank", "x"],
            "--rank must be a whole number, got 'x'; see quantexp help logs",
        ),
        (["status", "--json", "--watch"], "--json and --watch exclude each other"),
        (["cancel", "--json"], "cancel has no flag --json; it is one of plan, "),
    ],
)
def test_misuse_is_reported(capsys: Captured, words: list[str], message: str) -> None:
    assert misuse(*words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["status", "logs", "cancel"])
def test_help_has_the_arguments_of_the_verb(capsys: Captured, verb: str) -> None:
    assert misuse(verb, "--help") == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: quantexp {verb} [")
    assert "paths.root=FOLDER" in out


def test_status_imports_no_torch(make_run: MakeRun, tmp_path: Path) -> None:
    run: RunDir = make_run("m_d_bf16-1", State.COMPLETED)
    run.rank_log(0).write_text("x\n")
    script = (
        "import sys\nfrom quantexp.cli.main import main\n"
        "for words in (['status'], ['cancel'], ['logs', 'bf16']):\n    assert main(words) == 0\n"
        "heavy = {'torch', 'megatron', 'matplotlib', 'numpy', 'hydra'} & set(sys.modules)\n"
        "sys.exit(repr(heavy) if heavy else 0)\n"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr

"""`quantexp watch` on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantexp.cli.main import main
from quantexp.extras.forensics.watch import verb as watch
from quantexp.runs.paths import RunsRoot
from quantexp.runs.status import State, write_json
from tests.extras.forensics.watch.watching import Watching
from tests.launchers.slurm.conftest import MakeRun

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_it_prints_the_address_and_serves_the_runs_until_ctrl_c(make_run: MakeRun) -> None:
    run = make_run("m_d_bf16-1", State.COMPLETED, iteration=8)
    before = {file: file.stat().st_mtime_ns for file in run.root.rglob("*")}
    with Watching() as watching:
        assert watching.lines[0].startswith(f"{Path('runs').absolute()}: http://127.0.0.1:")
        port = watching.address.split(":")[2].partition("/")[0]
        assert f"ssh -N -L {port}:127.0.0.1:{port} " in watching.lines[1]
        content = watching.content_when(lambda content: content["runs"][0]["state"])
        (row,) = content["runs"]
        assert (row["name"], row["state"], row["loss"]) == ("m_d_bf16-1", "completed", "4.0000")
        assert watching.end() == (130, "quantexp: interrupted\n")
    assert {file: file.stat().st_mtime_ns for file in run.root.rglob("*")} == before


def test_a_restart_has_the_address_of_before_and_a_second_server_another_port(
    make_run: MakeRun,
) -> None:
    make_run("m_d_bf16-1", State.COMPLETED)
    with Watching() as first, Watching("runs") as beside:
        assert beside.address != first.address
        assert beside.address.split("/")[3] == first.address.split("/")[3]
    with Watching() as again:
        assert again.address == first.address


def test_a_folder_where_runs_may_appear_can_be_watched(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for words in ((), ("empty",)):
        with Watching(*words) as watching:
            assert watching.content_when(bool)["summary"] == "no runs yet"


def test_the_sweeps_are_those_beside_the_runs(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("m_d_bf16-1", State.COMPLETED)
    elsewhere = tmp_path / "elsewhere"
    run.root.parent.rename(elsewhere)
    sweeps = RunsRoot(elsewhere).sweeps
    sweeps.mkdir()
    write_json(sweeps / "a.json", {"runs": [{"run": "m_d_bf16-1"}]})
    for words in ("elsewhere", "elsewhere/sweeps/a.json", "elsewhere/m_d_bf16-1"):
        server = watch.start(tmp_path / "runs", words, None)
        try:
            server.watch.refresh()
            (sweep,) = server.watch.state("", 0)["content"]["sweeps"]
        finally:
            server.close()
        assert (sweep["name"], sweep["states"]) == ("a", "1 completed")


@pytest.mark.parametrize("port", ["0", "65536", "-1"])
def test_a_port_that_is_none_is_refused(capsys: Captured, port: str) -> None:
    with pytest.raises(SystemExit):
        main(["watch", "--port", port])
    words = f"quantexp: --port must be from 1 to 65535, got {port}; see quantexp help watch\n"
    assert capsys.readouterr().err == words


def test_a_word_that_names_no_run_is_refused(capsys: Captured) -> None:
    assert main(["watch", "nothing"]) == 1
    assert "there is no run, sweep or folder nothing" in capsys.readouterr().err


def test_a_port_in_use_is_refused_if_it_was_asked_for(capsys: Captured, make_run: MakeRun) -> None:
    make_run("m_d_bf16-1", State.COMPLETED)
    server = watch.start(Path("runs").absolute(), None, None)
    try:
        assert main(["watch", "--port", str(server.port)]) == 1
    finally:
        server.close()
    words = f"port {server.port} of this machine cannot be used: Address already in use"
    assert words in capsys.readouterr().err


def test_an_error_of_the_refreshing_thread_ends_the_server_with_one_line(
    capsys: Captured, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run("m_d_bf16-1", State.COMPLETED)

    def fail(*arguments: object) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr(watch, "ledger", fail)
    assert main(["watch"]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("quantexp: unexpected TypeError: a bug; the traceback is in ")
    assert errors.count("\n") == 1


def test_a_bug_in_an_answer_is_one_line(capsys: Captured) -> None:
    watch._report(TypeError("a bug"))
    assert capsys.readouterr().err.startswith(
        "quantexp: unexpected TypeError: a bug; the traceback"
    )


def test_ledger_rows_say_what_a_run_does(make_run: MakeRun) -> None:
    run = make_run("m_d_bf16-1", State.FAILED, reason="loss nan")
    (row,) = watch.ledger([run])
    assert (row["state"], row["about"]) == ("failed", "loss nan")
    assert row["path"] == str(run.root)

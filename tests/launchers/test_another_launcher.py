"""A launcher of another package, with an entry point, serves every verb as the two shipped ones do."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quantexp.cli.main import main
from quantexp.config.compose import compose
from quantexp.config.launchers import load_launcher
from quantexp.errors import ConfigError
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, read_status

Captured = pytest.CaptureFixture[str]
WORDS = ["training=fast", "capture=off", "launcher.kind=example"]


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch, in_tmp: Path) -> Iterator[None]:
    """Puts the package on the path, as if it were installed."""
    folder = str(Path(__file__).parent / "example")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", folder)
    load_launcher.cache_clear()
    yield
    load_launcher.cache_clear()


def rows(capsys: Captured) -> list[dict[str, object]]:
    capsys.readouterr()
    assert main(["status", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert isinstance(content, list)
    return content


def test_its_job_is_submitted_shown_followed_and_cancelled(capsys: Captured) -> None:
    before = "+launcher.options.before='echo loading modules; sleep 300'"
    assert main([*WORDS, before]) == 0
    assert capsys.readouterr().out.startswith("job ")
    (row,) = rows(capsys)
    assert (row["state"], row["alive"]) == ("running", True)
    assert row["where"] == f"job {row['job_id']} running"
    (log,) = Path("runs").glob("*/logs/job.log")
    deadline = time.monotonic() + 240
    while not log.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert main(["logs", str(row["path"])]) == 0
    assert capsys.readouterr().out == f"==> {log.absolute()} <==\nloading modules\n"
    assert main([*WORDS, before]) == 0
    assert f"job {row['job_id']} is running" in capsys.readouterr().out, "is not started twice"
    assert main(["cancel"]) == 0
    assert f"cancelled  {row['run']}: job {row['job_id']} running" in capsys.readouterr().out
    (row,) = rows(capsys)
    assert (row["state"], row["alive"], row["where"]) == ("cancelled", False, "")


def test_job_that_vanishes_leaves_a_run_that_can_be_resumed(capsys: Captured) -> None:
    assert main([*WORDS, "+launcher.options.before=false"]) == 0
    deadline = time.monotonic() + 240
    while (row := rows(capsys)[0])["alive"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert row["state"] == "preempted"
    assert row["reason"] == f"job {row['job_id']} is gone, at iteration 0 of 8"
    assert main(["resume", "launcher.options.before=false"]) == 0
    assert "1 run starts at the first iteration" in capsys.readouterr().out


@pytest.mark.slow
def test_its_job_trains_to_the_end(capsys: Captured, tiny_words: list[str]) -> None:
    assert main([*tiny_words, "launcher.kind=example", "paths.root=runs"]) == 0
    deadline = time.monotonic() + 240
    while rows(capsys)[0]["alive"] and time.monotonic() < deadline:
        time.sleep(0.5)
    (run,) = Path("runs").glob("*/config.yaml")
    status = read_status(RunDir(run.parent).status)
    assert status is not None
    assert (status.state, status.launcher) == (State.COMPLETED, "example"), status.reason
    assert main([*tiny_words, "launcher.kind=example", "paths.root=runs"]) == 0
    assert "already completed" in capsys.readouterr().out


def test_plan_shows_the_worker_s_command(capsys: Captured) -> None:
    assert main(["plan", "--json", *WORDS]) == 0
    (command,) = json.loads(capsys.readouterr().out)["commands"]
    assert command[1:3] == ["-m", "quantexp.training.worker"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["+launcher.options.quue=1"],
            "unknown key launcher.options.quue; allowed with launcher.kind=example: before, priority",
        ),
        (
            ["+launcher.options.priority=high"],
            "launcher.options.priority must be a whole number, got 'high'",
        ),
        (
            ["launcher.num_processes=2", "training.micro_batch_size=1"],
            "launcher.kind=example runs one process, got more",
        ),
        (
            ["launcher.partition=gpu"],
            "launcher.partition=gpu is for SLURM and has no effect under launcher.kind=example; "
            "add launcher=slurm, or drop it",
        ),
        (["launcher.time_min=0"], "launcher.time_min must be at least 1, got 0"),
        (
            ["launcher.kind=broken"],
            "launcher.kind=broken cannot be loaded from quantexp_example:NoSuchLauncher: module 'quantexp_example' has "
            "no attribute 'NoSuchLauncher'",
        ),
        (
            ["launcher.kind=exmple"],
            "launcher.kind must be one of broken, example, local, slurm, got 'exmple'; did you mean example? "
            "(a package adds a kind by an entry point in the group quantexp.launchers)",
        ),
    ],
)
def test_configuration_that_it_cannot_serve_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([*WORDS, *words], None, {})
    assert str(caught.value) == message


@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_shipped_launchers_have_no_options(kind: str) -> None:
    with pytest.raises(
        ConfigError,
        match=f"unknown key launcher.options.a; allowed with launcher.kind={kind}: none",
    ):
        compose(["training=fast", f"launcher={kind}", "+launcher.options.a=1"], None, {})


def test_it_refuses_stages_which_it_does_not_have(capsys: Captured) -> None:
    words = [*WORDS, "-m", "quant=bf16,linear_mxfp8", "sweep.first=[{quant: bf16}]"]
    assert main(words) == 1
    assert "launcher.kind=example has no stages; drop sweep.first" in capsys.readouterr().err


def test_launcher_that_cannot_prepare_data_refuses_and_has_no_jobs_that_do(
    in_tmp: Path, capsys: Captured
) -> None:
    (in_tmp / "a.jsonl").write_text('{"text": "an owl hunts at night"}\n')
    words = ["prepare", "dataset.source=a.jsonl", "dataset.tokenizer=byte", "dataset.split='1'"]
    assert main([*words, "launcher.kind=example"]) == 1
    assert capsys.readouterr().err == (
        "quantexp: launcher.kind=example cannot run quantexp prepare; drop it to run that on this machine\n"
    )
    folder = in_tmp / "data" / "wikipedia.partial"
    folder.mkdir(parents=True)
    record = {"launcher": "example", "name": "q-1", "folder": "q-1", "job": "0"}
    (folder / "submission.json").write_text(json.dumps(record))
    assert main(words) == 0

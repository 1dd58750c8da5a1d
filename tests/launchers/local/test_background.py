"""The background process that works through a sweep, as far as one process alone can test it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from quantexp_launchers.local import queue
from quantexp_launchers.local.submit import main
from quantexp_launchers.local.sweep import Sweep, prepare
from rich.console import Console

from quantexp.runs.status import State, read_json
from quantexp.schema import Experiment

from .stand_in import Workers, is_interrupted, put_status


@pytest.fixture
def sweep(make: Callable[..., Experiment], workers: Workers) -> Sweep:
    sweep = prepare([(make(seed), 0) for seed in (1, 2)], Console(quiet=True))
    sweep.write()
    return sweep


def test_sheet_is_worked_through_and_printed(
    sweep: Sweep, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(sweep.files.listing) == 0
    assert workers.started == [1, 2]
    assert "completed  bf16 seed=2" in capsys.readouterr().out
    assert [row["state"] for row in read_json(sweep.files.listing)["runs"]] == ["completed"] * 2


def test_failed_run_is_exit_code_1(sweep: Sweep, workers: Workers) -> None:
    workers.does[1] = lambda run, _: put_status(run, State.FAILED, "loss nan")
    assert main(sweep.files.listing) == 1


def test_command_and_source_are_those_of_the_submission(
    sweep: Sweep, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep.command = ["quantexp", "as", "typed"]
    sweep.source = {"commit": "0123", "diff": None}
    sweep.write()
    monkeypatch.setattr("sys.argv", ["background"])
    main(sweep.files.listing)
    assert sweep.items[0].run is not None
    provenance = read_json(sweep.items[0].run.provenance)
    assert provenance["command"] == ["quantexp", "as", "typed"]
    assert provenance["source"]["commit"] == "0123"


def test_interruption_is_130(
    sweep: Sweep, workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    workers.does[1] = is_interrupted
    assert main(sweep.files.listing) == 130
    assert capsys.readouterr().err == "quantexp: interrupted\n"


def test_sheet_that_cannot_be_read_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(tmp_path / "x.json") == 1
    assert capsys.readouterr().err.startswith("quantexp: ")


def test_bug_of_the_queue_is_not_hidden(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    def stumbles(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(queue.Queue, "work", stumbles)
    with pytest.raises(ZeroDivisionError):
        main(sweep.files.listing)
    assert read_json(sweep.files.listing)["finished"] is not None

"""The lines printed after a submission."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quantexp_launchers.slurm.batch import Array, Batch, Sent
from quantexp_launchers.slurm.submitted import FEW, print_submitted
from rich.console import Console

from quantexp.runs.paths import RunDir
from quantexp.schema import Experiment, LauncherConfig

Show = Callable[..., str]


@pytest.fixture
def show(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> Show:
    """Prints a submission of `runs` runs and some unsent ones; returns the output."""

    def words(
        runs: int = 1,
        not_sent: tuple[str, ...] = (),
        scope: str = "runs/sweeps/s.json",
        batch: dict[str, Any] | None = None,
        **launcher: Any,
    ) -> str:
        folders = tuple(in_tmp / "runs" / f"run [{n}]" for n in range(runs))
        config = LauncherConfig(kind="slurm", **launcher)
        folder = in_tmp / "runs" / "submissions" / "q-1"
        one = Batch(folder, "q-1", folders, config, in_tmp, **(batch or {}))
        ids = tuple(f"7_{n}" for n in range(runs)) if runs > 1 else ("7",)
        sent = [
            Sent(Experiment(), RunDir(run), job_id)
            for run, job_id in zip(folders, ids, strict=False)
        ]
        sent += [
            Sent(Experiment(), RunDir(in_tmp / "runs" / f"other{n}"), None, reason)
            for n, reason in enumerate(not_sent)
        ]
        arrays = [Array(one, ids)] if runs else []
        print_submitted(sent, arrays, Console(width=300), in_tmp / scope)
        return capsys.readouterr().out

    return words


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_one_run_has_its_id_folder_script_and_commands(show: Show) -> None:
    assert lines(show(scope="runs/run [0]", gpus_per_node=1)) == [
        "submitted job 7",
        "job 7 runs/run [0]",
        "script runs/submissions/q-1/submission.sh",
        "follow quantexp status 'runs/run [0]' --watch",
        "quantexp logs 'runs/run [0]' -f",
        "stop quantexp cancel 'runs/run [0]'",
    ]


def test_array_has_its_runs_its_limit_and_its_dependency(show: Show) -> None:
    output = lines(show(3, batch={"throttle": 2, "dependency": "afterok:5"}, gpus_per_node=1))
    assert output[0] == "submitted 3 runs as the array 7, at most 2 at a time, after afterok:5"
    assert output[1:4] == [f"job 7_{n} runs/run [{n}]" for n in range(3)]
    assert "follow quantexp status runs/sweeps/s.json --watch" in output


def test_limit_that_does_not_bind_is_not_mentioned(show: Show) -> None:
    assert lines(show(3, batch={"throttle": 3}))[0] == "submitted 3 runs as the array 7"


def test_only_a_few_of_many_runs_are_named(show: Show) -> None:
    output = lines(show(60))
    assert sum(line.startswith("job 7_") for line in output) == FEW
    assert "and 48 more" in output


def test_run_without_a_gpu_is_pointed_out(show: Show) -> None:
    words = "no GPU requested (launcher.gpus_per_node=0): CPU cores"
    assert words in lines(show())
    assert words not in lines(show(gpus_per_node=1))


def test_unsent_runs_have_a_reason_and_no_command_to_stop_them(show: Show) -> None:
    output = lines(show(0, ("already completed [then]", "job 3 is waiting (Resources)")))
    assert output == [
        "not sent runs/other0: already completed [then]",
        "not sent runs/other1: job 3 is waiting (Resources)",
        "follow quantexp status runs/sweeps/s.json --watch",
    ]


def test_commands_can_be_copied_whatever_the_folder_is_called(show: Show) -> None:
    nasty = "it's $(a) `folder` & more"
    output = lines(show(scope=nasty))
    (command,) = (line for line in output if line.startswith("stop "))
    assert shlex.split(command) == ["stop", "quantexp", "cancel", nasty]

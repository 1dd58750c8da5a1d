"""Runs and sweeps on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from quantexp.cli.main import main
from quantexp.schema import Experiment

Points = list[tuple[Experiment, int]]
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(in_tmp: Path) -> None:
    pass


def test_detached_run_is_started_by_detach_run(monkeypatch: pytest.MonkeyPatch) -> None:
    detached: list[Experiment] = []

    def detach(experiment: Experiment, _: object) -> int:
        detached.append(experiment)
        return 0

    monkeypatch.setattr("quantexp_launchers.local.submit.detach_run", detach)
    assert main(["training=fast", "launcher.detach=true"]) == 0
    assert detached[0].launcher.detach


def test_missing_data_without_the_sample_says_what_to_give(capsys: Captured) -> None:
    assert main(["dataset=dolma"]) == 1
    assert capsys.readouterr().err == (
        "quantexp: dataset=dolma has no data: give dataset.path=PREFIX of a Megatron .bin/.idx "
        "pair and its dataset.tokenizer_path=FOLDER, or raw text (`quantexp prepare dataset=dolma "
        "dataset.source=FILES` writes data/dolma, which runs find), or training=fast for the built-in sample\n"
    )
    assert not list(Path.cwd().iterdir())


def test_a_wrong_path_of_data_comes_before_its_tokenizer(capsys: Captured) -> None:
    assert main(["training=fast", "dataset.path=/data/wiki"]) == 1
    assert capsys.readouterr().err.startswith("quantexp: no tokenised dataset at /data/wiki: ")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, in_tmp: Path) -> list[Points]:
    """The points of sweeps, collected instead of run."""
    sweeps: list[Points] = []

    def run_points(points: Points, _: Console) -> int:
        sweeps.append(points)
        return 0

    monkeypatch.setattr("quantexp_launchers.local.submit.run_points", run_points)
    return sweeps


def test_every_point_of_a_sweep_is_run_in_order(ran: list[Points]) -> None:
    assert main(["-m", "training=fast", "quant=bf16,FA_mxfp8", "sweep.first={quant: FA_*}"]) == 0
    (points,) = ran
    assert [(e.quant.name, stage) for e, stage in points] == [("FA_mxfp8", 0), ("bf16", 1)]


def test_bad_last_point_stops_the_whole_sweep(ran: list[Points], capsys: Captured) -> None:
    assert main(["-m", "training=fast", "training.seed=1,2,-1"]) == 1
    assert "training.seed must be at least 0, got -1" in capsys.readouterr().err
    assert not ran
    assert not Path("runs").exists()


def test_dry_points_are_shown_and_not_run(ran: list[Points], capsys: Captured) -> None:
    assert main(["-m", "training=fast", "quant=bf16,FA_mxfp8", "dry_run=true"]) == 0
    assert not ran
    assert "in all  2 runs" in capsys.readouterr().out


def test_points_of_two_launchers_are_refused(ran: list[Points], capsys: Captured) -> None:
    assert main(["-m", "training=fast", "launcher=local,slurm"]) == 1
    assert (
        "launcher must be one for all points of a sweep, got local, slurm; run one sweep for each"
        in capsys.readouterr().err
    )
    assert not ran

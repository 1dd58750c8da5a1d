"""`quantexp plan` and `dry_run=true` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantexp.cli.main import main

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(in_tmp: Path) -> None:
    pass


def test_plan_prints_json_without_data(capsys: Captured) -> None:
    assert main(["plan", "--json", "training=default", "capture=tensors"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["parameters"] == 1_235_814_400
    assert {"memory_gb_per_gpu", "capture_bytes", "precision_map", "commands"} <= set(content)
    assert content["capture_bytes"] > 0
    assert not list(Path.cwd().iterdir())


def test_plan_of_a_sweep_is_a_list(capsys: Captured) -> None:
    assert main(["plan", "-m", "quant=bf16,FA_mxfp8", "training=fast", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [plan["scheme"] for plan in content] == ["bf16", "FA_mxfp8"]
    assert not list(Path.cwd().iterdir())


def test_plan_of_a_sweep_ends_with_its_sum(capsys: Captured) -> None:
    assert main(["plan", "-m", "quant=bf16,FA_mxfp8", "training=fast"]) == 0
    *_, total, captures = capsys.readouterr().out.splitlines()
    assert total.startswith("in all  2 runs, 3.0 TFLOP, about ")
    assert captures.startswith("capture 662.7 MB of values in 112 tensors, statistics of 112; ")
    assert captures.endswith(f" are free in {Path.cwd()}")


def test_plan_of_a_sweep_shows_maps_on_request(capsys: Captured) -> None:
    words = ["plan", "-m", "quant=bf16,FA_mxfp8", "training=fast", "training.seed=1,2"]
    assert main(words) == 0
    assert "precision map" not in capsys.readouterr().out
    assert main([*words, "--maps"]) == 0
    assert capsys.readouterr().out.count("precision map") == 2, "one for both seeds"


def test_plan_of_a_sweep_lists_merged_points_on_standard_error(capsys: Captured) -> None:
    assert main(["plan", "-m", "quant=bf16,bf16", "training=fast", "--json"]) == 0
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)) == 1
    assert captured.err == (
        "quantexp: quant=bf16 training=fast is there more than once: it runs once\n"
    )


@pytest.mark.parametrize(("flags", "text"), [([], "precision map"), (["-m"], "in all  1 run,")])
def test_dry_run_shows_the_plan_and_runs_nothing(
    capsys: Captured, flags: list[str], text: str
) -> None:
    assert main([*flags, "training=fast", "quant=FA_mxfp8", "dry_run=true"]) == 0
    assert text in capsys.readouterr().out
    assert not list(Path.cwd().iterdir())

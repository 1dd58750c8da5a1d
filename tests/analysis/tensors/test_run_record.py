from __future__ import annotations

from pathlib import Path

import pytest

from quantexp.analysis.tensors.run_record import LossCurve, RunNames, read_losses, read_names
from quantexp.errors import RunError
from quantexp.runs.paths import RunDir


def test_names_come_from_the_configuration_and_the_label_wins(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "model: {name: m}\ndataset: {name: d, label: d (built-in sample)}\n"
        "quant: {name: FA_mxfp8}\ncapture: {dir: /elsewhere}\n"
    )
    names = read_names(RunDir(tmp_path))
    assert (names.run, names.model, names.dataset) == (tmp_path.name, "m", "d (built-in sample)")
    assert (names.scheme, names.capture_dir) == ("FA_mxfp8", "/elsewhere")
    assert (names.model_label, names.short_model_label) == ("m", "m")


def test_a_dataset_without_label_has_its_name(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("dataset: {name: dolma, label: null}\n")
    assert read_names(RunDir(tmp_path)).dataset == "dolma"


def test_without_a_configuration_the_folder_names_the_run(tmp_path: Path) -> None:
    assert read_names(RunDir(tmp_path)) == RunNames(tmp_path.name)


def test_no_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is no run folder: there is no such folder"):
        read_names(RunDir(tmp_path / "nowhere"))


def test_a_configuration_that_is_no_yaml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {name")
    with pytest.raises(RunError, match=r"config.yaml is not readable YAML"):
        read_names(RunDir(tmp_path))


def test_a_configuration_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("- a\n")
    with pytest.raises(RunError, match=r"config.yaml must hold a mapping, got list"):
        read_names(RunDir(tmp_path))


def test_losses_are_sorted_and_a_repeated_iteration_has_the_later(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"iteration": 1, "loss": 5}\n{"iteration": 3, "loss": 9.0}\n'
        '{"iteration": 2, "loss": 4.0}\n{"iteration": 3, "loss": 3.0}\n'
    )
    assert read_losses(RunDir(tmp_path)) == LossCurve((1, 2, 3), (5.0, 4.0, 3.0))


def test_non_finite_losses_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"iteration": 1, "loss": 5}\n{"iteration": 2, "loss": NaN}\n'
    )
    assert read_losses(RunDir(tmp_path)) == LossCurve((1,), (5.0,), (2,))


def test_lines_without_a_loss_and_torn_lines_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"iteration": 1}\n[1]\n{"iteration": 2, "loss": "x"}\n{"iteration": 3, "lo'
    )
    assert read_losses(RunDir(tmp_path)) == LossCurve()


def test_a_loss_of_null_was_not_finite(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"iteration": 1, "loss": 5.0}\n{"iteration": 2, "loss": null}\n'
    )
    assert read_losses(RunDir(tmp_path)) == LossCurve((1,), (5.0,), (2,))


def test_no_metrics_is_an_empty_curve(tmp_path: Path) -> None:
    assert read_losses(RunDir(tmp_path)) == LossCurve()

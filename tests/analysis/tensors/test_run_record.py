from __future__ import annotations

from pathlib import Path

import pytest

from quantexp.analysis.tensors.run_record import RunNames, read_names
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
    assert names.model_label == "m"


def test_a_dataset_without_label_has_its_name(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("dataset: {name: dolma, label: null}\n")
    assert read_names(RunDir(tmp_path)).dataset == "dolma"


def test_without_a_configuration_the_folder_names_the_run(tmp_path: Path) -> None:
    assert read_names(RunDir(tmp_path)) == RunNames(tmp_path.name)


def test_no_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a run folder: there is no such folder"):
        read_names(RunDir(tmp_path / "nowhere"))


def test_a_configuration_that_is_no_yaml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {name")
    with pytest.raises(RunError, match=r"config.yaml, line 2: did not find expected"):
        read_names(RunDir(tmp_path))


def test_a_configuration_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("- a\n")
    with pytest.raises(RunError, match=r"config.yaml must hold keys with values, got list"):
        read_names(RunDir(tmp_path))

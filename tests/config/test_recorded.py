"""The config.yaml of a run reads back as the same experiment, or is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from quantexp.config.compose import compose
from quantexp.config.load import from_plain, plain, read, save
from quantexp.errors import ConfigError
from quantexp.launch.reuse import read_capture
from quantexp.schema import Experiment, Precision


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    """Composed once; tests change copies of it."""
    return compose(["training=fast", "launcher=slurm"], None, {})


def test_config_yaml_reads_back_as_the_same_experiment(tmp_path: Path) -> None:
    rules = "quant.rules=[{layers:[0],iterations:[1,null],format:bf16}]"
    experiment = compose(["quant=FA_linear_hifp8", "training=fast", rules], None, {})
    save(experiment, tmp_path / "config.yaml")
    assert read(tmp_path / "config.yaml") == experiment


@pytest.mark.parametrize(
    "word", ["1e5", "1_000", "inf", "null", "yes", "0x1f", "a: b", "# c", "ü\n'\""]
)
def test_words_that_look_like_something_else_stay_words(
    experiment: Experiment, word: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    save(replace(experiment, dataset=replace(experiment.dataset, split=word)), file)
    assert OmegaConf.load(file).dataset.split == word


def test_config_yaml_has_the_schemes_name(tmp_path: Path) -> None:
    save(compose(["quant/pv=hifp8"], None, {}), tmp_path / "config.yaml")
    assert "  name: pv_hifp8\n" in (tmp_path / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", ", line 2: did not find expected node content"),
        ("- 1\n", " is not a configuration; run the experiment again"),
        ("a: &b [1]\nc: *b\n", ", line 2: it must have no alias, got \\*b"),
        ("a: " + "9" * 5000, ", line 1: a number must have at most 400 digits, got 5000"),
    ],
)
def test_broken_config_yaml_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"config\.yaml{words}"):
        read(tmp_path / "config.yaml")


def test_missing_config_yaml_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml cannot be read: .*No such file"):
        read(tmp_path / "config.yaml")


def test_config_yaml_of_another_version_names_the_key(
    experiment: Experiment, tmp_path: Path
) -> None:
    save(experiment, tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(text + "elsewhere: 1\n")
    with pytest.raises(ConfigError, match="unknown key elsewhere; allowed in the root: model, "):
        read(tmp_path / "config.yaml")


def test_config_yaml_out_of_range_is_refused(experiment: Experiment, tmp_path: Path) -> None:
    training = replace(experiment.training, iterations=0)
    save(replace(experiment, training=training), tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=r"training\.iterations must be at least 1, got 0"):
        read(tmp_path / "config.yaml")


def test_plain_configuration_reads_back_as_the_same_experiment() -> None:
    for words in (["quant=more/FA_full_mxfp8", "capture=tensors"], ["launcher=slurm"]):
        experiment = compose(words, None, {})
        container = OmegaConf.to_container(OmegaConf.structured(experiment), enum_to_str=True)
        assert plain(experiment) == container
        assert from_plain(json.loads(json.dumps(plain(experiment)))) == experiment


@pytest.mark.parametrize(
    ("section", "key", "value", "read_as"),
    [
        ("training", "lr", 1, 1.0),
        ("training", "lr", "1e-3", 1e-3),
        ("training", "iterations", "12", 12),
        ("training", "precision", "fp16", Precision.fp16),
        ("dataset", "path", 12, "12"),
        ("launcher", "environment", {"A": "b"}, {"A": "b"}),
        ("launcher", "environment", {"A": 1}, {"A": "1"}),
        ("capture", "iterations", [1, "2"], ["1", "2"]),
    ],
)
def test_plain_value_of_another_type_is_converted(
    experiment: Experiment, section: str, key: str, value: object, read_as: object
) -> None:
    content = plain(experiment)
    content[section][key] = value
    actual = getattr(getattr(from_plain(content), section), key)
    assert (type(actual), actual) == (type(read_as), read_as)


def test_interpolation_in_a_plain_configuration_is_none_of_its_values(
    experiment: Experiment,
) -> None:
    content = plain(experiment)
    content["dataset"]["path"] = "${nothing.there}"
    message = r"dataset\.path: Interpolation key 'nothing\.there' not found"
    with pytest.raises(ConfigError, match=message):
        from_plain(content)


def test_plain_configuration_out_of_range_is_refused(experiment: Experiment) -> None:
    content = plain(experiment)
    content["training"]["iterations"] = 0
    with pytest.raises(ConfigError, match=r"training\.iterations must be at least 1, got 0"):
        from_plain(content)


def test_plain_configuration_with_an_unknown_key_is_refused(experiment: Experiment) -> None:
    content = plain(experiment)
    content["launcher"]["nodles"] = 2
    with pytest.raises(ConfigError, match=r"unknown key launcher\.nodles"):
        from_plain(content)


def test_capture_of_a_run_folder_equals_that_of_its_whole_configuration(tmp_path: Path) -> None:
    save(compose(["training=fast", "capture.control_iter=0"], None, {}), tmp_path / "config.yaml")
    assert read_capture(tmp_path / "config.yaml") == read(tmp_path / "config.yaml").capture


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", ", line 2: did not find"),
        ("- 1\n", " must hold keys with values, got list"),
        ("a: 1\n", " cannot be read: 'capture'"),
        ("capture: {level: all}\n", " cannot be read: Invalid value 'all'"),
    ],
)
def test_broken_capture_of_a_run_folder_is_refused_by_name(
    tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"config\.yaml{words}"):
        read_capture(tmp_path / "config.yaml")


@pytest.mark.parametrize("key", ["trainig: {lr: 1}", "force: {a: 1}", "sweep: {}"])
def test_config_yaml_with_a_wrong_section_is_refused(tmp_path: Path, key: str) -> None:
    (tmp_path / "config.yaml").write_text(key + "\n")
    with pytest.raises(ConfigError, match=f"(unknown key )?{key.split(':')[0]}"):
        read(tmp_path / "config.yaml")

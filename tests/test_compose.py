"""Names of schemes, sweeps and the old scripts' variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantexp.compose import compose, compose_sweep, environment_overrides, sweep
from quantexp.errors import ConfigError
from quantexp.quant.scheme import SCHEMES
from quantexp.schema import CaptureLevel

OWN = """\
defaults:
  - linear: mxfp8
  - qk: none
  - pv: none
  - _self_

name: own
linear:
  dgrad:
    g: {format: bf16}
"""


def name(*words: str, config_dir: Path | None = None) -> str | None:
    return compose(list(words), config_dir, {}).quant.name


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A config-dir with the scheme `own`; its path needs every quoting there is."""
    folder = tmp_path / "it's, a \\ folder"
    (folder / "quant").mkdir(parents=True)
    (folder / "quant" / "own.yaml").write_text(OWN)
    return folder


# Names.


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["quant=FA_mxfp8", "quant/pv=hifp8"], "qk_mxfp8+pv_hifp8"),
        (["quant=bf16", "quant/linear=mxfp4"], "linear_mxfp4"),
        (["quant/linear=mxfp8", "quant/qk=mxfp8"], "FA_linear_mxfp8"),
        (["quant=FA_linear_mxfp8", "quant/qk=hifp8"], "linear_mxfp8+qk_hifp8"),
        (["quant=FA_linear_mxfp8", "quant/linear=none", "quant/qk=none"], "bf16"),
        (["quant=more/FA_full_mxfp8"], "FA_full_mxfp8"),
    ],
)
def test_composition_is_named_by_what_it_does(words: list[str], expected: str) -> None:
    assert name(*words) == expected


def test_changed_slot_makes_the_site_custom() -> None:
    changed = name("quant=linear_mxfp8", "quant.linear.wgrad.g.format=mxfp8_e5m2")
    assert changed is not None
    assert changed.startswith("linear_custom~")


def test_rule_adds_a_hash_of_the_meaning() -> None:
    first = name("quant=linear_mxfp8", "quant.rules=[{layers:[0],format:bf16}]")
    other = name("quant=linear_mxfp8", "quant.rules=[{layers:[1],format:bf16}]")
    assert first is not None
    assert first.startswith("linear_mxfp8~")
    assert first != other


def test_overridden_shipped_extra_scheme_loses_its_name() -> None:
    changed = name("quant=more/FA_full_hifp8", "quant/pv=hifp8")
    assert changed is not None
    assert changed.startswith("qk_custom+pv_hifp8~")


def test_own_scheme_keeps_its_name(own: Path) -> None:
    assert name("quant=own", "training.seed=2", config_dir=own) == "own"


def test_own_scheme_keeps_its_name_whatever_the_model(own: Path) -> None:
    text = OWN + "rules:\n  - {layers: [20], format: bf16}\n"
    (own / "quant" / "deep.yaml").write_text(text.replace("name: own", "name: deep"))
    assert name("quant=deep", "model.num_layers=32", config_dir=own) == "deep"


def test_own_scheme_loses_its_name_when_overridden(own: Path) -> None:
    changed = name("quant=own", "quant/pv=hifp8", config_dir=own)
    assert changed is not None
    assert changed.startswith("linear_custom+pv_hifp8~")


@pytest.mark.parametrize("taken", ["linear_mxfp8", "FA_full_mxfp8"])
def test_shipped_name_on_another_composition_is_refused(own: Path, taken: str) -> None:
    (own / "quant" / "own.yaml").write_text(OWN.replace("name: own", f"name: {taken}"))
    with pytest.raises(
        ConfigError, match=rf"quant\.name '{taken}' is a shipped scheme and this composition is "
    ):
        compose(["quant=own"], own, {})


@pytest.mark.parametrize("word", ["quant.name=fancy", "+quant.name=fancy", "quant.name=FA_mxfp8"])
def test_name_on_the_command_line_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=r"quant\.name cannot be set to '\w+': the name follows "):
        compose([word], None, {})


def test_missing_config_dir_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config-dir must be a folder, got '.*nowhere'"):
        compose([], tmp_path / "nowhere", {})


@pytest.mark.parametrize("word", ["a b=c", "quant={a", "quant=[bf16"])
def test_override_that_cannot_be_read_is_quoted(word: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the override .*; write key=value, in quot"):
        compose([word], None, {})


def test_sweep_without_the_flag_is_refused() -> None:
    with pytest.raises(ConfigError, match="Ambiguous value for argument 'quant=bf16,FA_mxfp8'"):
        compose(["quant=bf16,FA_mxfp8"], None, {})


# Sweeps.


def test_glob_is_exactly_the_ten_schemes(in_tmp: Path) -> None:
    points = compose_sweep(["quant=glob(*)", "model.num_layers=1"], None, {})
    assert len(points) == len(SCHEMES) == 10
    assert {point.quant.name for point in points} == set(SCHEMES)
    assert not list(in_tmp.iterdir()), "a sweep leaves no file of Hydra's behind"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["quant=bf16,FA_mxfp9"], "quant=FA_mxfp9: no such choice"),
        (["training.lr=1e-3,abc"], r"training\.lr must be a number, got 'abc'"),
        (["training.seed=1,-1"], r"training\.seed must be at least 0, got -1"),
        (["quant=linear_mxfp8", "quant.linear.block=32,24"], "must be a power of two, got 24"),
        (["quant=bf16,FA_mxfp8", "quant.name=bf16"], r"quant\.name cannot be set to 'bf16'"),
        (["+training.lrr=1,2"], r"unknown key training\.lrr; did you mean lr\?"),
    ],
)
def test_bad_last_point_means_that_nothing_ran(
    in_tmp: Path, words: list[str], message: str
) -> None:
    ran: list[object] = []
    with pytest.raises(ConfigError, match=message):
        sweep(words, ran.append, None, {})
    assert not ran


def test_bad_own_scheme_as_last_point_names_its_file(own: Path, in_tmp: Path) -> None:
    (own / "quant" / "typo.yaml").write_text(OWN.replace("dgrad", "dgard"))
    with pytest.raises(ConfigError, match=r"typo\.yaml: unknown key quant\.linear\.dgard; did you"):
        compose_sweep(["quant=own,typo"], own, {})


def test_own_scheme_keeps_its_name_in_a_sweep(own: Path, in_tmp: Path) -> None:
    points = compose_sweep(["quant=bf16,own"], own, {})
    assert [point.quant.name for point in points] == ["bf16", "own"]


# The old scripts' variables.


@pytest.mark.parametrize(
    ("value", "scheme"),
    [("mxfp8", "FA_linear_mxfp8"), ("hifp8", "FA_linear_hifp8"), ("FA_mxfp4", "FA_mxfp4")],
)
def test_custom_quant_type_chooses_the_scheme(value: str, scheme: str) -> None:
    assert compose([], None, {"CUSTOM_QUANT_TYPE": value}).quant.name == scheme


def test_variables_are_read_from_the_process_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUSTOM_QUANT_TYPE", "mxfp8")
    monkeypatch.setenv("TENSOR_SAVE_DIR", "/tensors of, it's\\")
    monkeypatch.setenv("TENSOR_SAVE_ENABLED", "1")
    experiment = compose([])
    assert experiment.quant.name == "FA_linear_mxfp8"
    assert experiment.capture.dir == "/tensors of, it's\\"
    assert experiment.capture.level is CaptureLevel.tensors


def test_tensor_save_enabled_wins_over_what_the_preset_turns_on() -> None:
    experiment = compose(["training=fast"], None, {"TENSOR_SAVE_ENABLED": "0"})
    assert experiment.capture.level is CaptureLevel.off


def test_empty_variables_say_nothing() -> None:
    empty = dict.fromkeys(("CUSTOM_QUANT_TYPE", "TENSOR_SAVE_DIR", "TENSOR_SAVE_ENABLED"), "")
    assert environment_overrides([], empty) == []


@pytest.mark.parametrize(
    ("variable", "value", "word"),
    [
        ("CUSTOM_QUANT_TYPE", "mxfp8", "quant=FA_linear_mxfp8"),
        ("CUSTOM_QUANT_TYPE", "mxfp8", "quant='FA_linear_mxfp8'"),
        ("TENSOR_SAVE_ENABLED", "true", "capture=tensors"),
        ("TENSOR_SAVE_ENABLED", "1", "capture.level=tensors"),
        ("TENSOR_SAVE_ENABLED", "no", "capture=off"),
        ("TENSOR_SAVE_DIR", "/t", "capture.dir=/t"),
    ],
)
def test_same_value_twice_is_fine(variable: str, value: str, word: str) -> None:
    assert environment_overrides([word], {variable: value}) == []


@pytest.mark.parametrize(
    ("variable", "value", "meaning", "word"),
    [
        ("CUSTOM_QUANT_TYPE", "mxfp8", "quant=FA_linear_mxfp8", "quant=bf16"),
        ("CUSTOM_QUANT_TYPE", "mxfp8", "quant=FA_linear_mxfp8", "quant/pv=hifp8"),
        ("CUSTOM_QUANT_TYPE", "bf16", "quant=bf16", "quant.linear.format=hifp8"),
        ("CUSTOM_QUANT_TYPE", "mxfp8", "quant=FA_linear_mxfp8", "quant=glob(*)"),
        ("CUSTOM_QUANT_TYPE", "bf16", "quant=bf16", "quant=bf16,FA_mxfp8"),
        ("TENSOR_SAVE_ENABLED", "1", "capture=tensors", "capture=stats"),
        ("TENSOR_SAVE_ENABLED", "0", "capture=off", "capture.level=tensors"),
        ("TENSOR_SAVE_DIR", "/a", "capture.dir=/a", "capture.dir=/b"),
    ],
)
def test_differing_override_is_an_error_that_names_both(
    variable: str, value: str, meaning: str, word: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        environment_overrides([word], {variable: value})
    assert str(caught.value) == (
        f"{variable}={value} (that is, {meaning}) and {word} differ; unset {variable} or drop the "
        "override"
    )


def test_bad_quant_type_lists_what_it_may_be() -> None:
    with pytest.raises(
        ConfigError, match=r"CUSTOM_QUANT_TYPE must be one of mxfp8, mxfp4, .*, got 'fp9'"
    ):
        environment_overrides([], {"CUSTOM_QUANT_TYPE": "fp9"})


def test_bad_tensor_save_enabled_is_refused() -> None:
    with pytest.raises(ConfigError, match="TENSOR_SAVE_ENABLED must be 0 or 1, got 'maybe'"):
        environment_overrides([], {"TENSOR_SAVE_ENABLED": "maybe"})


def test_variables_hold_for_every_point_of_a_sweep(in_tmp: Path) -> None:
    environment = {"CUSTOM_QUANT_TYPE": "mxfp4", "TENSOR_SAVE_ENABLED": "off"}
    points = compose_sweep(["training.seed=1,2"], None, environment)
    assert [p.quant.name for p in points] == ["FA_linear_mxfp4", "FA_linear_mxfp4"]
    assert {p.capture.level for p in points} == {CaptureLevel.off}
    assert [p.training.seed for p in points] == [1, 2]


def test_variable_beside_a_swept_scheme_is_an_error(in_tmp: Path) -> None:
    with pytest.raises(ConfigError, match=r"CUSTOM_QUANT_TYPE=mxfp8 .* and quant=bf16,FA_mxfp8 di"):
        compose_sweep(["quant=bf16,FA_mxfp8"], None, {"CUSTOM_QUANT_TYPE": "mxfp8"})

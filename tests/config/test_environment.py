"""The old scripts' variables, alone and beside overrides."""

from __future__ import annotations

import pytest

from quantexp.config.compose import compose
from quantexp.config.environment import environment_overrides
from quantexp.errors import ConfigError
from quantexp.schema import CaptureLevel, Precision

#: The overrides that CUSTOM_QUANT_TYPE=fp16 stands for.
_FP16 = "quant=bf16 training.precision=fp16"


@pytest.mark.parametrize(
    ("value", "scheme"),
    [
        ("mxfp8", "FA_linear_mxfp8"),
        ("mxfp4", "FA_linear_mxfp4"),
        ("hifp8", "FA_linear_hifp8"),
        ("FA_mxfp4", "FA_mxfp4"),
        ("bf16", "bf16"),
        ("none", "bf16"),
    ],
)
def test_custom_quant_type_chooses_the_scheme(value: str, scheme: str) -> None:
    assert compose([], None, {"CUSTOM_QUANT_TYPE": value}).quant.name == scheme


@pytest.mark.parametrize("value", ["fp16", "fp32"])
def test_working_precision_as_custom_quant_type_quantises_nothing(value: str) -> None:
    experiment = compose(["training=fast"], None, {"CUSTOM_QUANT_TYPE": value})
    assert experiment.quant.name == "bf16"
    assert experiment.training.precision is Precision[value]


def test_variables_are_read_from_the_process_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUSTOM_QUANT_TYPE", "mxfp8")
    monkeypatch.setenv("TENSOR_SAVE_DIR", "/tensors of, it's\\")
    monkeypatch.setenv("TENSOR_SAVE_ENABLED", "1")
    experiment = compose([])
    assert experiment.quant.name == "FA_linear_mxfp8"
    assert experiment.capture.dir == "/tensors of, it's\\"
    assert experiment.capture.level is CaptureLevel.tensors


def test_tensor_save_enabled_overrides_the_preset() -> None:
    experiment = compose(["training=fast"], None, {"TENSOR_SAVE_ENABLED": "0"})
    assert experiment.capture.level is CaptureLevel.off


def test_empty_variables_have_no_effect() -> None:
    empty = dict.fromkeys(("CUSTOM_QUANT_TYPE", "TENSOR_SAVE_DIR", "TENSOR_SAVE_ENABLED"), "")
    assert environment_overrides([], empty) == []


@pytest.mark.parametrize(
    ("variable", "value", "word"),
    [
        ("CUSTOM_QUANT_TYPE", "mxfp8", "quant=FA_linear_mxfp8"),
        ("CUSTOM_QUANT_TYPE", "mxfp8", "quant='FA_linear_mxfp8'"),
        ("CUSTOM_QUANT_TYPE", "none", "quant=bf16"),
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
        ("CUSTOM_QUANT_TYPE", "none", "quant=bf16", "quant=FA_mxfp8"),
        ("CUSTOM_QUANT_TYPE", "fp16", _FP16, "quant=FA_mxfp8"),
        ("CUSTOM_QUANT_TYPE", "fp16", _FP16, "training.precision=bf16"),
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


def test_bad_quant_type_lists_the_allowed_values() -> None:
    with pytest.raises(
        ConfigError, match=r"CUSTOM_QUANT_TYPE must be one of mxfp8, mxfp4, .*, got 'fp9'"
    ):
        environment_overrides([], {"CUSTOM_QUANT_TYPE": "fp9"})
    with pytest.raises(ConfigError, match=r"got 'mxpf8'; did you mean mxfp8\?$"):
        environment_overrides([], {"CUSTOM_QUANT_TYPE": "mxpf8"})


def test_bad_tensor_save_enabled_is_refused() -> None:
    with pytest.raises(ConfigError, match="TENSOR_SAVE_ENABLED must be 0 or 1, got 'maybe'"):
        environment_overrides([], {"TENSOR_SAVE_ENABLED": "maybe"})

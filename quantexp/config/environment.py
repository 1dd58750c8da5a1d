"""Translates the environment variables of the old scripts into overrides; explicit overrides take precedence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from quantexp.errors import ConfigError
from quantexp.folders import quoted
from quantexp.quant.scheme import SCHEME_FORMATS, SCHEMES
from quantexp.terminal.close_matches import did_you_mean, near

#: Values of CUSTOM_QUANT_TYPE that are not the name of a scheme -> their overrides: a format quantises linear layers
#: and attention scores, `none` and the working precisions quantise nothing.
QUANT_TYPES: dict[str, dict[str, str]] = {
    **{name: {"quant": f"FA_linear_{name}"} for name in SCHEME_FORMATS},
    "none": {"quant": "bf16"},
    **{name: {"quant": "bf16", "training.precision": name} for name in ("fp16", "fp32")},
}
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def environment_overrides(overrides: list[str], environment: Mapping[str, str]) -> list[str]:
    """The overrides for the old scripts' variables, without keys that are already overridden.

    Raises:
        ConfigError: a variable has an invalid value, or contradicts an override.
    """
    parsed = OverridesParser.create().parse_overrides(overrides)
    return [
        word
        for variable, value, meaning in _meanings(environment)
        for word in _unless_given(parsed, variable, value, meaning)
    ]


def environment_lines(environment: Mapping[str, str]) -> list[str]:
    """What the variables stand for: `CUSTOM_QUANT_TYPE=mxfp8 stands for quant=FA_linear_mxfp8`.

    Raises:
        ConfigError: a variable has an invalid value.
    """
    return [
        f"{variable}={value} stands for {_equivalent(meaning)}"
        for variable, value, meaning in _meanings(environment)
    ]


def _meanings(environment: Mapping[str, str]) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Each variable that is set, its value, and the overrides that it stands for."""
    if value := environment.get("CUSTOM_QUANT_TYPE"):
        yield "CUSTOM_QUANT_TYPE", value, _quant_type(value)
    if value := environment.get("TENSOR_SAVE_ENABLED"):
        if value.lower() not in (*_TRUE, *_FALSE):
            raise ConfigError(f"TENSOR_SAVE_ENABLED must be 0 or 1, got {value!r}")
        yield (
            "TENSOR_SAVE_ENABLED",
            value,
            {"capture": "tensors" if value.lower() in _TRUE else "off"},
        )
    if value := environment.get("TENSOR_SAVE_DIR"):
        yield "TENSOR_SAVE_DIR", value, {"capture.dir": value}


def _equivalent(meaning: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in meaning.items())


def _quant_type(value: str) -> dict[str, str]:
    """The overrides for a value of CUSTOM_QUANT_TYPE."""
    if value in SCHEMES:
        return {"quant": value}
    if value not in QUANT_TYPES:
        allowed = [*QUANT_TYPES, *SCHEMES]
        close = did_you_mean(near(value, allowed))
        raise ConfigError(
            f"CUSTOM_QUANT_TYPE must be one of {', '.join(allowed)}, got {value!r}{close and f'; {close}'}"
        )
    return QUANT_TYPES[value]


def _unless_given(
    parsed: list[Override], variable: str, value: str, meaning: dict[str, str]
) -> list[str]:
    """The overrides for a variable, without those already given.

    Raises:
        ConfigError: an override contradicts the variable.
    """
    words = []
    for key, expected in meaning.items():
        related = [override for override in parsed if _concerns(override, key)]
        for override in related:
            is_same_key = override.get_key_element() in (key, f"{key}.level")
            if not is_same_key or str(override.value()) != expected:
                raise ConfigError(
                    f"{variable}={value} (that is, {_equivalent(meaning)}) and {override.input_line} differ; "
                    f"unset {variable} or drop the override"
                )
        if not related:
            words.append(f"{key}={quoted(expected)}")
    return words


def _concerns(override: Override, key: str) -> bool:
    named = override.get_key_element().lstrip("+~")
    if key == "quant":
        return named == "quant" or named.startswith(("quant/", "quant."))
    if key == "capture":
        return named in ("capture", "capture.level")
    return named == key

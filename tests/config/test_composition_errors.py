"""A list in place of a mapping, and a mapping in place of a list, are named with their key and what they must be."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantexp.config.compose import compose
from quantexp.errors import ConfigError

LIST, MAPPING = "must be a list, in brackets", "must be keys with values, in braces"


def refusal(*words: str, config_dir: Path | None = None) -> str:
    """The message that refuses a composition."""
    with pytest.raises(ConfigError) as caught:
        compose(list(words), config_dir, {})
    return str(caught.value)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("quant.rules={layers: [0]}", f"quant.rules {LIST}"),
        ("evaluate.tasks={a: 1}", f"evaluate.tasks {LIST}"),
        ("quant.formats=[a]", f"quant.formats {MAPPING}"),
        (
            "quant.rules=[{layers: {a: 1}}]",
            f"quant.rules[0].layers {LIST}",
        ),
    ],
)
def test_override_of_another_shape_is_named(word: str, message: str) -> None:
    assert refusal(word) == message


@pytest.mark.parametrize(
    ("choice", "text", "message"),
    [
        ("quant=own", "rules: {layers: [0]}\n", f"quant.rules {LIST}"),
        ("quant=own", "linear: mxfp8\n", f"quant.linear {MAPPING}"),
        ("quant=april/own", "linear: {fprop: {x: a}}\n", f"quant.linear.fprop.x {MAPPING}"),
        ("quant/linear=own", "fprop: mxfp8\n", f"quant.linear.fprop {MAPPING}"),
        ("quant=own", "- linear\n", f"it {MAPPING}"),
        ("training=own", "# @package _global_\nquant: [a]\n", f"quant {MAPPING}"),
    ],
)
def test_value_of_another_shape_in_a_file_is_named_with_its_key(
    tmp_path: Path, choice: str, text: str, message: str
) -> None:
    file = tmp_path / f"{choice.replace('=', '/')}.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert refusal(choice, config_dir=tmp_path) == f"{file}: {message}"

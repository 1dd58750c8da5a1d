"""Explicit points from a YAML file: every value unchanged, every mistake with the file's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from quantexp.config.sweep.variants import listed, literal_word
from quantexp.errors import ConfigError


@pytest.mark.parametrize(
    "value",
    [
        "plain",
        "a,b",
        "it's",
        '"q"',
        "a b",
        " a ",
        "",
        "$(rm -rf x)",
        "${training.lr}",
        "[x",
        "{y: 1}",
        "back\\slash\\",
        "\\'",
        "glob(*)",
        "choice(1,2)",
        "=",
        "#c",
        "null",
        "true",
        "1e-4",
        "two\nlines",
        "é",
        1.0e-5,
        0.1,
        float("inf"),
        7,
        True,
        None,
        [1, "a,b", [2.5]],
        {"layers": [0, -1], "format": "bf16, quoted"},
        [{"layers": [0], "modules": ["fc*"], "format": "bf16"}],
    ],
)
def test_value_comes_out_of_hydras_grammar_as_it_went_in(value: Any) -> None:
    parsed = OverridesParser.create().parse_override(literal_word("some.key", value))
    assert not parsed.is_sweep_override()
    assert parsed.value() == value
    assert type(parsed.value()) is type(value)


def points(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "points.yaml"
    file.write_text(text)
    return file


def test_entries_are_variants_in_their_order(tmp_path: Path) -> None:
    file = points(
        tmp_path, "- {quant: FA_mxfp8, training.lr: 1e-4}\n- {+experiment: x, ~a: null}\n"
    )
    assert listed(file, []) == [
        {"quant": "quant='FA_mxfp8'", "training.lr": "training.lr=0.0001"},
        {"+experiment": "+experiment='x'", "~a": "~a=null"},
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "{file} must be a list of mappings such as `- {{quant: FA_mxfp8, training.lr: "),
        ("[]\n", "{file}: no points; write a list of mappings such as `- {{quant: FA_mxfp8, tra"),
        (
            "quant: bf16\n",
            "{file} must be a list of mappings such as `- {{quant: FA_mxfp8, training",
        ),
        ("- {quant: a\n", "{file} cannot be read: while parsing a flow mapping in"),
        ("- {a: 1, a: 2}\n", "{file} cannot be read: while constructing a mapping in"),
        ("- {a: 1}\n- 3\n", "{file}, entry 2 must be a mapping of overrides to values, got 3"),
        ("- {}\n", "{file}, entry 1 must be a mapping of overrides to values, got {{}}"),
        (
            "- {sweep.seeds: 2}\n",
            "{file}, entry 1: sweep.seeds is one for the whole sweep; give it ",
        ),
        ("- {hydra/launcher: x}\n", "{file}, entry 1: hydra/launcher is one for the whole sweep"),
        ("- {quant: x}\n", "{file}, entry 1: quant is on the command line too; give it in one"),
        ("- {+quant: x}\n", "{file}, entry 1: +quant is on the command line too; give it in one"),
    ],
)
def test_file_that_is_no_list_of_points_is_refused_by_name(
    tmp_path: Path, text: str, message: str
) -> None:
    file = points(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        listed(file, ["training", "quant"])
    assert str(caught.value).startswith(message.format(file=file))
    assert "\n" not in str(caught.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sweep\.points: there is no file .*nowhere\.yaml"):
        listed(tmp_path / "nowhere.yaml", [])


def test_yaml_is_that_of_a_plain_reader(tmp_path: Path) -> None:
    """PyYAML also reads 1.0e-4 as a number; the words are then the same."""
    text = "- {training.lr: 1.0e-4, training.seed: 3, capture.dir: 'a, b'}\n"
    (entry,) = yaml.safe_load(text)
    (variant,) = listed(points(tmp_path, text), [])
    parsed = OverridesParser.create().parse_overrides(list(variant.values()))
    assert {o.key_or_group: o.value() for o in parsed} == entry

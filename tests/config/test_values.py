"""Values of a composed configuration that are refused although its types accept them."""

from __future__ import annotations

import pytest

from quantexp.config.compose import compose
from quantexp.config.values import check_values
from quantexp.errors import ConfigError


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"quant": {"linear": {"window": "???"}}}, "quant.linear.window has no value; give quant."),
        ({"quant": {"rules": [{"block": "???"}]}}, "quant.rules[0].block has no value; give "),
        (
            {"paths": {"root": "a\0b"}},
            "paths.root must hold no control characters, got '\\x00'",
        ),
        (
            {"launcher": {"partition": 1.5}},
            "launcher.partition must be text, got 1.5; put the text in quotes",
        ),
        ({"training": {"deterministic": 2}}, "training.deterministic must be true or false, got 2"),
        ({"launcher": {"environment": {"A": True}}}, "launcher.environment.A must be text, got t"),
        (
            {"quant": {"rules": [{"modules": [["fc1"]]}]}},
            "quant.rules[0].modules[0] must be one value, got the list ['fc1']",
        ),
        (
            {"launcher": {"setup": [{"a": 1}]}},
            "launcher.setup[0] must be one value, got the mapping {'a': 1}",
        ),
    ],
)
def test_value_of_another_type_is_refused(content: object, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_values(content)
    assert str(caught.value).startswith(words)


def test_numbers_and_truth_values_of_their_own_keys_pass() -> None:
    check_values({"training": {"lr": 1.5, "weight_cache": True}, "analysis": {"auto": True}})
    check_values({"sweep": {"zip": [["a", "b"]], "first": [{"quant": "x"}]}})
    check_values({"quant": {"rules": [{"layers": [0]}]}, "launcher": {"options": {"a": [[1]]}}})
    check_values({"launcher": {"sbatch": {"exclusive": True}, "options": {"a": 1.5}}})


@pytest.mark.parametrize("text", ["1.50", "1e3", "007", "true", "No", "1_000", "0x1f", "'q'"])
def test_text_stays_as_typed(text: str) -> None:
    words = ["launcher=slurm", f"launcher.partition={text}", f"+launcher.environment.A={text}"]
    launcher = compose(words, None, {}).launcher
    assert launcher.partition == text.strip("'")
    assert launcher.environment == {"A": text.strip("'")}


def test_number_is_no_truth_value_on_the_command_line_either() -> None:
    with pytest.raises(ConfigError, match=r"training\.deterministic must be true or false, got 7"):
        compose(["training.deterministic=7"], None, {})
    assert compose(["training.deterministic=1"], None, {}).training.deterministic is True

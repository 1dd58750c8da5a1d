"""The displayed name of a model."""

from __future__ import annotations

import copy
from dataclasses import asdict

import pytest

from quantexp.config.compose import compose
from quantexp.model.label import count_words, describe_model, short_model_label

CUT = "llama32-1b cut to 2 of 16 layers, vocabulary 257 of 128,256: 122M parameters"


@pytest.mark.parametrize(
    ("overrides", "label"),
    [
        ([], "llama32-1b, 1.24B parameters"),
        (["training=fast"], CUT),
        (
            ["training=fast", "model=deepseek2_lite"],
            "deepseek2_lite cut to 2 of 27 layers, vocabulary 257 of 102,400, 8 of 64 experts: 182M parameters",
        ),
        (
            ["training=fast", "model.hidden_size=256"],
            "llama32-1b cut to 2 of 16 layers, width 256 of 2,048, vocabulary 257 of 128,256: 15.3M parameters",
        ),
        (
            ["model.num_layers=20", "model.rotary_base=10000"],
            "llama32-1b changed to 20 layers (published 16), rotary_base 10000 (published 500000): "
            "1.48B parameters",
        ),
        (
            ["model.name=mine", "model.num_layers=2"],
            "mine, 2 layers of width 2,048: 384M parameters",
        ),
    ],
)
def test_the_label_states_the_differences_from_the_published_model(
    overrides: list[str], label: str
) -> None:
    assert describe_model(compose(overrides, None, {}).model) == label


@pytest.mark.parametrize(
    ("overrides", "label"),
    [
        ([], "llama32-1b, 1.24B parameters"),
        (["training=fast"], "llama32-1b cut to 122M of 1.24B parameters"),
        (["model.num_layers=20"], "llama32-1b changed, 1.48B parameters (published 1.24B)"),
        (["model.rotary_base=10000"], "llama32-1b changed, 1.24B parameters (published 1.24B)"),
    ],
)
def test_the_short_label_has_the_word_cut_only_for_a_smaller_model(
    overrides: list[str], label: str
) -> None:
    assert short_model_label(compose(overrides, None, {}).model) == label


def test_a_saved_configuration_has_the_label_of_its_dataclass() -> None:
    for model in ("llama32-1b", "deepseek2_lite"):
        config = compose(["training=fast", f"model={model}"], None, {}).model
        saved = copy.deepcopy(asdict(config)) | {"key_of_a_later_version": 1}
        assert describe_model(saved) == describe_model(config)


@pytest.mark.parametrize(
    ("config", "label"),
    [
        ({}, ""),
        ({"name": "x"}, "x"),
        ({"name": "llama32-1b", "num_layers": 2}, "llama32-1b cut to 2 of 16 layers"),
        ({"name": "x", "num_layers": 2, "moe": "odd"}, "x, 2 layers"),
        ({"name": "llama32-1b", "from_hf": "/there", "num_layers": 2}, "llama32-1b, 2 layers"),
    ],
)
def test_an_incomplete_configuration_has_a_partial_label(
    config: dict[str, object], label: str
) -> None:
    assert describe_model(config) == label


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (812, "812"),
        (1000, "1k"),
        (115_328, "115k"),
        (999_700, "1M"),
        (1_246_720, "1.25M"),
        (61_300_000, "61.3M"),
        (15_706_000_000, "15.7B"),
        (2e12, "2000B"),
    ],
)
def test_counts_have_three_digits(count: int, words: str) -> None:
    assert count_words(count) == words

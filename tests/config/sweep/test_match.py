"""Patterns match the resolved point, and a pattern that matches no point is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hydra import compose as hydra_compose
from omegaconf import DictConfig

from quantexp.config.compose import configuration
from quantexp.config.sweep.points import Selection
from quantexp.errors import ConfigError

Compose = Callable[..., DictConfig]


@pytest.fixture(scope="module")
def composed() -> Iterator[Compose]:
    with configuration(None):
        yield lambda *words: hydra_compose("config", list(words), return_hydra_config=True)


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (["quant=FA_mxfp8"], {"quant": "FA_mxfp8"}),
        (["quant=FA_mxfp8"], {"quant": "FA_*"}),
        (["quant=FA_mxfp8"], {"quant": "*[48]", "model": "llama3?-1b"}),
        (["quant=bf16", "quant/qk=mxfp8"], {"quant": "FA_mxfp8"}),
        (["quant=more/FA_full_mxfp8"], {"quant": "FA_full_*"}),
        (["quant=more/FA_full_mxfp8"], {"quant": "more/*"}),
        (["quant=FA_mxfp8"], {"quant/qk": "mxfp8", "quant/linear": "none"}),
        (["training=fast"], {"training": "fast", "capture": "tensors"}),
        (["training.lr=1e-4"], {"training.lr": 0.0001}),
        (["training.lr=1e-4"], {"training.lr": "0.000?"}),
        (["training.seed=7"], {"training.seed": 7}),
        (["training.seed=7"], {"training.seed": "7"}),
        (["training.lr=1"], {"training.lr": 1}),
        (["training.precision=fp16"], {"training.precision": "fp*"}),
        (["force=true"], {"force": True}),
        (["force=true"], {"force": "true"}),
        ([], {"training.deterministic": None}),
        ([], {"training.deterministic": "null"}),
        (["training.min_lr=${training.lr}"], {"training.min_lr": 0.0003}),
    ],
)
def test_pattern_matches(composed: Compose, words: list[str], pattern: dict[str, Any]) -> None:
    selection = Selection("sweep.first", [pattern])
    assert selection.takes(composed(*words))
    selection.check(1)


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (["quant=FA_mxfp8"], {"quant": "fa_mxfp8"}),
        (["quant=FA_mxfp8"], {"quant": "mxfp8"}),
        (["quant=bf16", "quant/qk=mxfp8"], {"quant": "bf16"}),
        (["quant=more/FA_full_mxfp8", "quant/pv=hifp8"], {"quant": "more/*"}),
        (["quant=FA_mxfp8"], {"quant": "FA_*", "model": "deepseek*"}),
        (["training.seed=1"], {"training.seed": True}),
        (["force=true"], {"force": 1}),
        (["training.seed=0"], {"training.seed": None}),
    ],
)
def test_pattern_does_not_match(
    composed: Compose, words: list[str], pattern: dict[str, Any]
) -> None:
    assert not Selection("sweep.first", [pattern]).takes(composed(*words))


def test_invalid_scheme_is_matched_by_its_choice(composed: Compose) -> None:
    config = composed("quant=linear_hifp8", "quant.linear.block=16")
    assert Selection("sweep.exclude", [{"quant": "linear_hifp8"}]).takes(config)


@pytest.mark.slow
def test_one_of_several_patterns_is_enough_and_each_must_match_a_point(composed: Compose) -> None:
    selection = Selection("sweep.exclude", [{"quant": "FA_*"}, {"quant": "linear_mxfp4"}])
    matches = [
        selection.takes(composed(f"quant={q}")) for q in ("bf16", "FA_mxfp8", "linear_mxfp8")
    ]
    assert matches == [False, True, False]
    with pytest.raises(ConfigError) as caught:
        selection.check(3)
    assert str(caught.value) == (
        "sweep.exclude: {'quant': 'linear_mxfp4'} matches no point (of 3); "
        "quant is bf16, FA_mxfp8, linear_mxfp8"
    )


@pytest.mark.parametrize("key", ["qunt", "training.lrr", "nope.lr", "training.lr.x"])
def test_key_that_does_not_exist_is_named(composed: Compose, key: str) -> None:
    selection = Selection("sweep.exclude", [{"quant": "bf16", key: "x"}])
    assert not selection.takes(composed())
    with pytest.raises(ConfigError) as caught:
        selection.check(1)
    assert str(caught.value) == (
        f"sweep.exclude: {{'quant': 'bf16', '{key}': 'x'}} matches no point (of 1); quant is bf16; "
        f"there is no {key}: neither a group that is chosen nor a key of the configuration"
    )


def test_section_is_no_value(composed: Compose) -> None:
    with pytest.raises(
        ConfigError, match=r"sweep\.first: quant\.linear is a section; name a key in"
    ):
        Selection("sweep.first", [{"quant.linear": "mxfp8"}]).takes(composed())

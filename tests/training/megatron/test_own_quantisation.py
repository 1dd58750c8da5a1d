"""Megatron's own settings of quantisation are refused, not ignored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quantexp.errors import ConfigError
from quantexp.schema import Experiment
from quantexp.training.megatron.own_quantisation import refuse_own_quantisation
from quantexp.training.megatron.transformer_config import transformer_config


def test_quantexps_own_configuration_is_neutral(tiny: Any) -> None:
    experiment: Experiment = tiny()
    refuse_own_quantisation(transformer_config(experiment.model, experiment.training))


@pytest.mark.parametrize(
    ("name", "value", "effect"),
    [
        (
            "fp8",
            "hybrid",
            "quantises beside the scheme, or without Transformer Engine nothing at all",
        ),
        (
            "fp4",
            "e2m1",
            "quantises beside the scheme, or without Transformer Engine nothing at all",
        ),
        ("fp8_param", True, "leaves no weights in high precision to quantise"),
        ("fp4_param", True, "leaves no weights in high precision to quantise"),
        ("fp8_wgrad", False, "has no effect in Transformer Engine 2"),
        ("quant_recipe", "file.yaml", "gives modules recipes beside the scheme"),
        ("use_kitchen", True, "takes linear layers that the scheme does not reach"),
        ("gradient_accumulation_fusion", True, "computes the weight gradient past the scheme, and"),
    ],
)
def test_a_setting_that_would_bypass_the_scheme_is_refused(
    tiny: Any, name: str, value: object, effect: str
) -> None:
    experiment: Experiment = tiny()
    config = vars(transformer_config(experiment.model, experiment.training))
    with pytest.raises(ConfigError) as caught:
        refuse_own_quantisation(SimpleNamespace(**{**config, name: value}))
    assert f"TransformerConfig.{name} {effect}" in str(caught.value)
    assert f"got {value!r}; leave it at" in str(caught.value)

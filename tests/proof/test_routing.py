"""The choice and the weights of experts, beside those of Megatron-Core's function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.proof.products import num_wrong
from quantexp.proof.routing import Rule, num_other_choices, weights_of

RULES = {
    "softmax of all": Rule(2, False, True, 1, 1, 1.0, None),
    "softmax of the chosen": Rule(2, False, False, 1, 1, 1.0, None),
    "groups and a factor": Rule(4, False, True, 4, 2, 16.0, None),
    "one of many": Rule(1, False, True, 1, 1, 2.5, None),
    "sigmoid with a bias": Rule(4, True, False, 4, 2, 2.5, torch.linspace(-0.1, 0.1, 16)),
}


def _megatron(rule: Rule, logits: Tensor) -> Any:
    from quantexp.training.megatron.without_te import import_megatron

    import_megatron()
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    return topk_routing_with_score_function(
        logits,
        rule.top_k,
        rule.is_of_all,
        rule.num_groups if rule.num_groups > 1 else None,
        rule.top_groups if rule.num_groups > 1 else None,
        rule.factor,
        "sigmoid" if rule.is_sigmoid else "softmax",
        rule.bias,
    )


@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0, 30.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RULES)
def test_choice_and_weights_are_those_of_megatron(
    name: str, dtype: torch.dtype, size: float
) -> None:
    rule = RULES[name]
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(256, 16, generator=generator) * size).to(dtype)
    probs, chosen = _megatron(rule, logits)
    assert num_other_choices(rule, logits, chosen) == 0
    assert num_wrong(probs, weights_of(rule, logits, chosen)) == 0


@pytest.mark.parametrize("name", RULES)
def test_other_experts_and_other_weights_are_counted(name: str) -> None:
    rule = RULES[name]
    logits = torch.randn(256, 16, generator=torch.Generator().manual_seed(2)) * 3
    probs, chosen = _megatron(rule, logits)
    assert num_other_choices(rule, logits, chosen.roll(1, 0)) > 128
    assert num_other_choices(rule, logits, chosen | (chosen.cumsum(-1) == 1)) > 128
    assert num_wrong(probs * (1 + 2.0**-14), weights_of(rule, logits, chosen)) > 200
    wrong_order = weights_of(
        Rule(**{**vars(rule), "is_of_all": not rule.is_of_all}), logits, chosen
    )
    assert rule.is_sigmoid or num_wrong(probs, wrong_order) > 200

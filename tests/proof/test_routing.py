"""The choice and the weights of experts, beside those of Megatron-Core's function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.proof.products import num_wrong
from quantexp.proof.routing import (
    Balance,
    Rule,
    balance_of,
    logits_gradient,
    num_other_choices,
    weights_of,
)

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


S, B, E = 128, 2, 16
#: Of the balancing loss: its coefficient and the loss scale.
FACTOR = 0.05


def _balanced(rule: Rule, logits: Tensor, is_by_sequence: bool) -> Any:
    """Megatron-Core's balancing loss of [S, B, E], without a coefficient."""
    from megatron.core.transformer.moe import moe_utils

    score = "sigmoid" if rule.is_sigmoid else "softmax"
    chosen, scores = moe_utils.compute_routing_scores_for_aux_loss(
        logits.view(-1, E), rule.top_k, score
    )
    rows = S if is_by_sequence else S * B
    scores, chosen = scores.reshape(rows, -1), chosen.reshape(rows, -1)
    own = scores, chosen.sum(0), rows, rule.top_k, E, 1.0
    return moe_utils.switch_load_balancing_loss_func(*own) / (B if is_by_sequence else 1)


def _gradient(
    rule: Rule, logits: Tensor, g: Tensor, factor: float, is_by_sequence: bool = False
) -> Tensor:
    own = logits.clone().requires_grad_()
    loss = (_megatron(rule, own.view(-1, E))[0] * g).sum()
    (loss + factor * _balanced(rule, own, is_by_sequence)).backward()
    assert own.grad is not None
    return own.grad.view(-1, E)


def _expected(rule: Rule, logits: Tensor, g: Tensor, balance: Balance) -> Any:
    chosen = _megatron(rule, logits.view(-1, E))[1]
    slopes = (FACTOR * balance.slopes).expand(S, B, E).reshape(-1, E)
    slack = (FACTOR * balance.slack).expand(S, B, 1).reshape(-1, 1)
    return logits_gradient(rule, logits.view(-1, E), chosen, g, slopes, slack)


@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0, 30.0, 1e3])
@pytest.mark.parametrize("is_by_sequence", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_the_gradient_and_the_balancing_loss_are_those_of_megatron(
    name: str, is_by_sequence: bool, size: float
) -> None:
    rule, generator = RULES[name], torch.Generator().manual_seed(3)
    logits = torch.randn(S, B, E, generator=generator) * size
    g = torch.randn(S * B, E, generator=generator)
    balance = balance_of(rule, logits, is_by_sequence, 1, lambda x: x)
    loss = float(_balanced(rule, logits, is_by_sequence))
    # A float32 sum of some hundred positive numbers.
    assert abs(balance.value - loss) <= 2.0**-18 * loss + balance.slack_of_value
    own = _gradient(rule, logits, g, FACTOR, is_by_sequence)
    assert num_wrong(own, _expected(rule, logits, g, balance)) == 0


@pytest.mark.parametrize("name", RULES)
def test_another_gradient_and_another_balancing_loss_are_counted(name: str) -> None:
    rule, generator = RULES[name], torch.Generator().manual_seed(4)
    logits = torch.randn(S, B, E, generator=generator)
    logits[:, 1] += torch.linspace(0, 2, E)  # the sequences are not alike
    g = torch.randn(S * B, E, generator=generator) / 256  # of a mean
    balance = balance_of(rule, logits, False, 1, lambda x: x)
    assert balance.slack_of_value < 1e-6
    expected = _expected(rule, logits, g, balance)
    for own in (
        _gradient(rule, logits, g * (1 + 2.0**-12), FACTOR),
        _gradient(rule, logits, g, 1.01 * FACTOR),
        _gradient(rule, logits, g, 0.0),
        _gradient(rule, logits, g, FACTOR, is_by_sequence=True),
    ):
        assert num_wrong(own, expected) > S * B
    by_sequence = balance_of(rule, logits, True, 1, lambda x: x)
    assert abs(by_sequence.value / balance.value - 1) > 2.0**-10


def test_ranks_that_divide_tokens_balance_them_together() -> None:
    rule = RULES["softmax of all"]
    logits = torch.randn(S, B, E, generator=torch.Generator().manual_seed(5))
    parts, sums = logits.chunk(2), []
    for part in parts:
        balance_of(rule, part, True, 2, lambda x: sums.append(x.clone()) or x)
    both = [balance_of(rule, part, True, 2, lambda x: sums[0] + sums[1]) for part in parts]
    whole = balance_of(rule, logits, True, 1, lambda x: x)
    assert both[0].value + both[1].value == pytest.approx(whole.value, rel=1e-12)
    assert torch.allclose(both[1].slopes, whole.slopes, rtol=1e-12, atol=0)

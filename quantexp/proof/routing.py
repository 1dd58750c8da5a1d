"""Which experts a token goes to, and with what weights, from its router's logits; in float64.

scores      softmax(l) or sigmoid(l) of all experts, or the logits l themselves, whose softmax is taken afterwards
choice      the k largest scores (plus a bias), where groups limit it among the experts of the best groups
weights     the scores of the chosen, a sigmoid's divided by their sum; times a factor
balance     E / (k T^2) sum_e n_e sum_t s_te, where n_e of T tokens have e among their k largest scores s, without a
            bias and groups; of all tokens of a micro-batch, or the mean of its sequences'. A sigmoid's scores are
            divided by their sum over all experts

# R tokens, E experts, S tokens of a rank in each of B sequences
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantexp.proof.products import LAMBDA, Reference, largest_finite, unit


@dataclass(frozen=True)
class Rule:
    """How a router chooses."""

    top_k: int
    #: Whether the scores are sigmoids.
    is_sigmoid: bool
    #: Whether the softmax of all logits is taken, and not that of the chosen.
    is_of_all: bool
    num_groups: int
    top_groups: int
    factor: float
    #: Added to the scores for the choice alone, [E].
    bias: Tensor | None


def rule_of(router: Any) -> Rule | None:
    """That of a Megatron-Core `TopKRouter`; None if it chooses by more than its logits, or by a fused kernel."""
    config, score = router.config, getattr(router.config, "moe_router_score_function", "")
    others = (
        *("moe_expert_capacity_factor", "moe_router_force_load_balancing", "moe_router_fusion"),
        *("moe_enable_routing_replay", "moe_router_padding_for_quantization"),
    )
    bias = getattr(router, "expert_bias", None)
    if (
        score not in ("softmax", "sigmoid")
        or (score == "softmax" and bias is not None)
        or config.moe_router_load_balancing_type == "sinkhorn"
        or any(getattr(config, name, None) for name in others)
        or not hasattr(router, "gating")
    ):
        return None
    return Rule(
        config.moe_router_topk,
        score == "sigmoid",
        bool(config.moe_router_pre_softmax),
        config.moe_router_num_groups or 1,
        config.moe_router_group_topk or 1,
        config.moe_router_topk_scaling_factor or 1.0,
        None if bias is None else bias.detach(),
    )


def num_other_choices(rule: Rule, logits: Tensor, chosen: Tensor) -> int:
    """In how many rows other experts are chosen than those of the logits, [R, E].

    A row in which rounding of the scores could decide, or with NaN, is not counted if it has k experts.
    """
    scores = _scores(rule, logits)
    # A score in the dtype of the logits is off by some roundings, in float32 by the error of exp besides.
    error = scores.abs() * (4 * unit(logits.dtype)) + _exponential(logits) * scores.abs()
    if rule.bias is not None:
        scores = scores + rule.bias
        error = error + 2 * unit(torch.float32) * scores.abs()
    error = error + torch.finfo(logits.dtype).smallest_normal
    wrong = chosen.sum(-1) != rule.top_k
    sure = scores.isfinite().all(-1)
    if rule.top_groups < rule.num_groups:
        each = rule.top_k // rule.top_groups
        by_group = scores.view(len(scores), rule.num_groups, -1).topk(each, dim=-1).values.sum(-1)
        of_group = each * error.amax(-1, keepdim=True) * 2
        best, is_clear = _largest(by_group, of_group.expand_as(by_group), rule.top_groups)
        sure &= is_clear
        inside = best.repeat_interleave(scores.shape[-1] // rule.num_groups, dim=-1)
        scores = scores.masked_fill(~inside, -math.inf)
    best, is_clear = _largest(scores, error, rule.top_k)
    return int((wrong | (sure & is_clear & (best != chosen).any(-1))).sum())


def weights_of(rule: Rule, logits: Tensor, chosen: Tensor) -> Reference:
    """The weights of the chosen experts, [R, E], zero for all others."""
    among = chosen if not (rule.is_of_all or rule.is_sigmoid) else torch.ones_like(chosen)
    scores = logits.double().masked_fill(~among, -math.inf)
    scores = scores.sigmoid() if rule.is_sigmoid else scores.softmax(-1)
    values = scores.masked_fill(~chosen, 0.0)
    if rule.is_sigmoid and rule.top_k > 1:
        values = values / (values.sum(-1, keepdim=True) + 1e-20)
    values = values * rule.factor
    summed = values * (_exponential(logits) * 2.0**24 + math.sqrt(logits.shape[-1]))
    smallest = torch.finfo(torch.float32).smallest_normal * (1 + rule.factor)
    # The scores, their sum, the quotient, the product with the factor, and the result may each be rounded.
    return Reference(values, values, summed, smallest, roundings=6)


@dataclass(frozen=True)
class Balance:
    """The balancing loss of a rank's tokens in a micro-batch, without its coefficient."""

    value: float
    #: Its derivative by each score, [1, 1 or B, E].
    slopes: Tensor
    #: By how much these may be off, as rounding of scores could decide a choice; [1, 1 or B, 1].
    slack: Tensor
    #: By how much the value may be.
    slack_of_value: float


def balance_of(
    rule: Rule,
    logits_SBE: Tensor,
    is_by_sequence: bool,
    num_ranks: int,
    add: Callable[[Tensor], Tensor],
) -> Balance:
    """The balancing loss of logits.

    Args:
        rule: how the router chooses.
        logits_SBE: of all tokens of this rank.
        is_by_sequence: whether it is the mean of that of each sequence.
        num_ranks: so many ranks divide the tokens.
        add: the sum of a tensor over these.
    """
    S, B, E = logits_SBE.shape
    scores = _balanced_scores(rule, logits_SBE)
    best, is_clear = _largest(scores, scores * 4 * _exponential(logits_SBE), rule.top_k)
    dims = (0,) if is_by_sequence else (0, 1)
    numbers = torch.cat([best.double(), (~is_clear)[..., None].double()], dim=-1)
    numbers = add(numbers.sum(dims, keepdim=True))
    tokens = S * num_ranks * (1 if is_by_sequence else B)
    numbers *= E / (rule.top_k * tokens**2) / (B if is_by_sequence else 1)
    slopes, slack = numbers[..., :-1], numbers[..., -1:]
    columns = scores.sum(dims, keepdim=True)
    return Balance(float((slopes * columns).sum()), slopes, slack, float((slack * columns).sum()))


def logits_gradient(
    rule: Rule, logits: Tensor, chosen: Tensor, g: Tensor, slopes: Tensor, slack: Tensor
) -> Reference:
    """The gradient of logits, [R, E], for that of the weights and for the derivative of the balancing loss.

    Args:
        rule: how the router chooses.
        logits: of some tokens.
        chosen: their experts, [R, E].
        g: the gradient of the weights, [R, E].
        slopes: the derivative by each balanced score, [R, E], with its coefficient and the loss scale; or zeros.
        slack: by how much that may be off, [R, 1].
    """
    wide = logits.double()
    g, slopes = rule.factor * g.double().masked_fill(~chosen, 0.0), slopes.double()
    if rule.is_sigmoid:
        scores = wide.sigmoid()
        own = _sigmoid_back(scores, g, chosen if rule.top_k > 1 else None)
        balanced = _sigmoid_back(scores, slopes, torch.ones_like(chosen))
    else:
        among = torch.ones_like(chosen) if rule.is_of_all else chosen
        own = _softmax_back(wide.masked_fill(~among, -math.inf).softmax(-1), g)
        balanced = _softmax_back(wide.softmax(-1), slopes)
    magnitude = own[1] + balanced[1]
    # exp, twice in a product; sums over experts; and a choice that rounding could decide.
    summed = magnitude * (3 * _exponential(logits) * 2.0**24 + 2 * math.sqrt(logits.shape[-1]))
    summed = summed + 2 * slack * _balanced_scores(rule, logits) * 2.0**24 / LAMBDA
    lost = torch.finfo(torch.float32).smallest_normal * logits.shape[-1]
    lost *= 1 + largest_finite(g) + largest_finite(slopes)
    return Reference(own[0] + balanced[0], magnitude, summed, lost, roundings=8)


def _softmax_back(p: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """p (g - sum p g), and the magnitudes of its terms."""
    values = p * (g - (p * g).sum(-1, keepdim=True))
    return values, p * (g.abs() + (p * g.abs()).sum(-1, keepdim=True))


def _sigmoid_back(s: Tensor, g: Tensor, among: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same of s, or of s / sum s of some experts; 1 - s has the error of 1."""
    if among is None:
        return s * (1 - s) * g, s * g.abs()
    inside = s.masked_fill(~among, 0.0)
    total = inside.sum(-1, keepdim=True) + 1e-20
    mean = (inside * g).sum(-1, keepdim=True) / total
    magnitude = (inside * g.abs()).sum(-1, keepdim=True) / total
    values = inside * (1 - s) * (g - mean) / total
    return values, inside * (g.abs() + magnitude) / total


def _balanced_scores(rule: Rule, logits: Tensor) -> Tensor:
    wide = logits.double()
    if not rule.is_sigmoid:
        return wide.softmax(-1)
    scores = wide.sigmoid()
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def _scores(rule: Rule, logits: Tensor) -> Tensor:
    wide = logits.double()
    if rule.is_sigmoid:
        return wide.sigmoid()
    return wide.softmax(-1) if rule.is_of_all else wide


def _exponential(logits: Tensor) -> Tensor:
    """The relative error of exp(l - max) in float32: that of its argument, and some last bits; [R, 1]."""
    wide = logits.double()
    return (wide.amax(-1, keepdim=True) - wide.amin(-1, keepdim=True) + 8) * 2.0**-24


def _largest(scores: Tensor, error: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Which are the k largest, and of which rows that is sure: the next is less by more than the errors."""
    ordered = scores.topk(min(k + 1, scores.shape[-1]), dim=-1)
    best = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, ordered.indices[..., :k], True)
    if ordered.values.shape[-1] <= k:
        return best, torch.ones(scores.shape[:-1], dtype=torch.bool, device=scores.device)
    own = error.gather(-1, ordered.indices)
    margin = ordered.values[..., k - 1] - ordered.values[..., k]
    return best, margin > own[..., k - 1] + own[..., k]

"""Adds up what gradients differ by from those in fp32, raw and scaled by Adam's root v; needs torch and Megatron.

Adam divides by root v. Its next step would have v' = beta2 v + (1 - beta2) r^2 (bias-corrected), with v of the
checkpoint and r the gradient in fp32, clipped as there; here r^2 is the mean over the batches. Without that part the
scaled error would be that of tokens which the run has seldom seen, whose v is nearly zero; Adam itself prevents that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantexp.extras.resolve.gradient.estimates import Tally, finite, mean_product
from quantexp.extras.resolve.gradient.results import ADAM, RAW
from quantexp.model.training_state import MOMENTS
from quantexp.training.gradients import Sums, gradient_of, group_of, scale_of, sums_of
from quantexp.training.megatron.state_shards import held_pieces
from quantexp.training.megatron.step import Stepper

#: Gradients or errors by parameter.
_Tensors = Mapping[str, Tensor]
#: A scaling, and a group of parameters in words.
_Key = tuple[str, str]


@dataclass(frozen=True)
class Reference:
    """The gradients in fp32 of a checkpoint's batches."""

    of_batches: Sequence[_Tensors]
    #: What multiplies the elements of a parameter in each scaling; None for 1.
    weights: Mapping[str, Mapping[str, Tensor | None]]
    #: In the order of the model.
    groups: Sequence[str]

    def squares(self, tensors: _Tensors) -> dict[_Key, float]:
        """|x|^2 of each group in each scaling."""
        squares: dict[_Key, float] = {}
        for scaling, weights in self.weights.items():
            for name, x in tensors.items():
                key, weight = (scaling, group_of(name)[1]), weights[name]
                x = x.double() if weight is None else x.double() * weight
                squares[key] = squares.get(key, 0.0) + float(x.square().sum())
        return squares

    def signal(self) -> dict[str, list[float | None]]:
        """|E r|^2 / E |r|^2 in each scaling, of all parameters and of each group; unbiased above and below."""
        each = [self.squares(gradients) for gradients in self.of_batches]
        total = self.squares({n: sum(x[n] for x in self.of_batches) for n in self.of_batches[0]})  # type: ignore[misc]
        shares: dict[str, list[float | None]] = {}
        for scaling in self.weights:
            shares[scaling] = []
            for groups in (self.groups, *([words] for words in self.groups)):
                own = [sum(one[scaling, words] for words in groups) for one in each]
                mean = sum(own) / len(own)
                product = mean_product(own, sum(total[scaling, words] for words in groups))
                shares[scaling].append(finite(product / mean) if mean else None)
        return shares


def reference_of(stepper: Stepper, of_batches: Sequence[_Tensors]) -> Reference:
    """The reference of gradients in fp32 that a stepper at the checkpoint has computed."""
    weights: dict[str, Mapping[str, Tensor | None]] = {RAW: dict.fromkeys(stepper.parts)}
    if scaled := _adam_weights(stepper, of_batches):
        weights[ADAM] = scaled
    groups = [words for _, words in sorted({group_of(name) for name in stepper.parts})]
    return Reference(of_batches, weights, groups)


def _adam_weights(stepper: Stepper, of_batches: Sequence[_Tensors]) -> dict[str, Tensor | None]:
    """1 / (root v' + eps) by parameter; empty if one has no v: before Adam's first step, and under Muon."""
    training, (_, second) = stepper.training, MOMENTS
    norms = [
        math.sqrt(sum(float(x.double().square().sum()) for x in gradients.values()))
        for gradients in of_batches
    ]
    limit = training.clip_grad or math.inf
    factors = [min(1.0, limit / norm) if norm else 1.0 for norm in norms]
    weights: dict[str, Tensor | None] = {}
    for name, held in held_pieces(stepper.optimizer, stepper.parts).items():
        if second not in held.kinds or not held.steps:
            return {}
        clipped = [c * x[name] for c, x in zip(factors, of_batches, strict=True)]
        square = torch.stack([x.square() for x in clipped]).mean(0)
        beta2 = training.adam_beta2
        v = beta2 * held.moment(second).view(square.shape) + (1 - beta2) * square
        root = (v / (1 - beta2 ** (held.steps + 1))).sqrt()
        weights[name] = 1 / (root + training.adam_eps)
    return weights


class Errors:
    """Adds up the errors of one map over batches and draws; memory for two errors in float64 besides the reference."""

    def __init__(self, stepper: Stepper, reference: Reference) -> None:
        self._parts, self._reference = stepper.parts, reference
        self._scale = scale_of(stepper)
        self._of_batch: dict[str, Tensor] = {}
        self._total: dict[str, Tensor] = {}
        self._each: dict[_Key, list[Sums]] = {}
        self._squares: dict[_Key, list[float]] = {}

    @torch.no_grad()
    def add(self, k: int) -> None:
        """Add the gradients that are in the stepper's parts, of a draw of batch k."""
        sums: dict[_Key, Sums] = {}
        for name, part in self._parts.items():
            other = self._reference.of_batches[k][name]
            own = gradient_of(part).double() / self._scale
            self._of_batch[name] = own - other + self._of_batch.get(name, 0)
            for scaling, weights in self._reference.weights.items():
                key = scaling, group_of(name)[1]
                sums[key] = sums.get(key, Sums()) + sums_of(own, other, weights[name])
        for key, each in sums.items():
            self._each.setdefault(key, []).append(each)

    def end_batch(self, draws: int) -> None:
        """All draws of a batch are added."""
        means = {name: error / draws for name, error in self._of_batch.items()}
        self._total = {name: mean + self._total.get(name, 0) for name, mean in means.items()}
        for key, square in self._reference.squares(means).items():
            self._squares.setdefault(key, []).append(square)
        self._of_batch = {}

    def tallies(self) -> dict[str, list[Tally]]:
        """For each scaling those of all parameters, then of each group."""
        totals, groups = self._reference.squares(self._total), self._reference.groups
        tallies = {}
        for scaling in self._reference.weights:
            keys = [(scaling, words) for words in groups]
            own = [Tally(self._each[key], self._squares[key], totals[key]) for key in keys]
            tallies[scaling] = [sum(own, Tally()), *own]
        return tallies

"""The gradient of one iteration under several maps, on the same weights and micro-batches, in any layout.

The passes are those of a step: the same draws, the same reduction over data-parallel ranks, no step of the optimizer,
and no update of amax histories. For each parameter p, with g its gradient under a map and b that in bf16, a rank sums

    g.g    b.b    g.b    |g - b|^2

in float64, strip by strip. A parameter, or a part of one, that several ranks hold counts once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantexp.model.shards import Shard, layer_of
from quantexp.proof.verdict import Verdict, require
from quantexp.quant.precision import PrecisionMap
from quantexp.schema import Precision
from quantexp.training.megatron.collectives import complete_gradients, gather
from quantexp.training.megatron.grad_norm import GPU_STRIP, STRIP
from quantexp.training.megatron.parameters import Part
from quantexp.training.megatron.passes import Batch
from quantexp.training.megatron.step import Stepper
from quantexp.training.megatron.watched import Watched


@dataclass(frozen=True)
class Sums:
    """Sums over the elements of a gradient g and of the same gradient in bf16, b."""

    own: float = 0.0
    bf16: float = 0.0
    product: float = 0.0
    difference: float = 0.0

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.own + other.own,
            self.bf16 + other.bf16,
            self.product + other.product,
            self.difference + other.difference,
        )

    @property
    def cosine(self) -> float:
        """Of the angle between g and b; NaN if one is zero or not finite."""
        norms = math.sqrt(self.own) * math.sqrt(self.bf16) if self.is_finite else 0.0
        return max(-1.0, min(1.0, self.product / norms)) if norms else math.nan

    @property
    def distance(self) -> float:
        """|g - b| / |b|; NaN if b is zero or one is not finite."""
        if not self.is_finite or not self.bf16:
            return math.nan
        return math.sqrt(self.difference / self.bf16)

    @property
    def is_finite(self) -> bool:
        """Whether both gradients are."""
        return math.isfinite(self.own + self.bf16 + self.difference)


#: Group -> its sums, in the order of the model.
Groups = dict[str, Sums]


@dataclass(frozen=True)
class Compared:
    """The gradient under one map, of all ranks."""

    loss: float
    groups: Groups
    verdict: Verdict

    @property
    def whole(self) -> Sums:
        """Of all parameters."""
        return sum(self.groups.values(), Sums())


#: Computes the reduced gradients of the iteration under a map, on every rank; the loss, and the verdict of the proof.
RunPasses = Callable[[PrecisionMap], tuple[float, Verdict]]


class GradientComparison:
    """Gradients of one iteration under several maps; every rank calls each method."""

    def __init__(
        self, run_passes: RunPasses, parts: Mapping[str, Part], scale: float = 1.0
    ) -> None:
        """Compare what `run_passes` leaves in the parts, which is multiplied by `scale`, as fp16 does."""
        self._run_passes, self._parts, self._scale = run_passes, parts, scale
        self._reference: dict[str, Tensor] = {}

    def reference(self, declared: PrecisionMap) -> Compared:
        """The gradient that all others are compared with, here with itself.

        Raises:
            EngagementError: as `compare`.
        """
        loss, verdict = self._run_passes(declared)
        parts = self._parts.items()
        self._reference = {name: _gradient(part.tensor).clone() for name, part in parts}
        return Compared(loss, self._sums(), verdict)

    def compare(self, declared: PrecisionMap) -> Compared:
        """The gradient under a map against the reference.

        Raises:
            EngagementError: the passes did not quantise exactly what the map declares.
        """
        loss, verdict = self._run_passes(declared)
        return Compared(loss, self._sums(), verdict)

    @torch.no_grad()
    def _sums(self) -> Groups:
        own = {
            (name, part.shard): _sums_of(_gradient(part.tensor), self._reference[name], self._scale)
            for name, part in self._parts.items()
        }
        everywhere: dict[tuple[str, Shard], Sums] = {}
        for of_rank in gather(own):
            everywhere |= of_rank  # ranks with the same part have the same sums
        by_group: dict[tuple[int, str], Sums] = {}
        for name, shard in sorted(everywhere, key=lambda key: (key[0], key[1].ranges)):
            group = _group_of(name)
            by_group[group] = by_group.get(group, Sums()) + everywhere[name, shard]
        return {words: by_group[place, words] for place, words in sorted(by_group)}


def comparison_of(stepper: Stepper, iteration: int, batches: Iterator[Batch]) -> GradientComparison:
    """Gradients of quantexp's own loop, by a stepper that takes no step from now on."""
    of_iteration = [next(batches) for _ in range(stepper.num_micro_batches)]
    watched = Watched(stepper.chunks, stepper.training.seed)
    stepper.step_state.updates_histories = False

    def run_passes(declared: PrecisionMap) -> tuple[float, Verdict]:
        stepper.set_precision(declared)
        with (
            watched.proving(iteration, declared) as verdict,
            stepper.rounded_reduction(iteration, None),
        ):
            losses = stepper.repeat(
                iteration, of_iteration, lambda index: watched.begin(iteration, index)
            )
        result = verdict()
        require(result)
        if stepper.is_distributed:
            complete_gradients(stepper.models)
        return stepper.mean_loss(losses), result

    is_scaled = stepper.training.precision is Precision.fp16
    scale = float(stepper.optimizer.get_loss_scale()) if is_scaled else 1.0
    return GradientComparison(run_passes, stepper.parts, scale)


def _group_of(name: str) -> tuple[int, str]:
    """The place and the words of the group that a parameter belongs to, by its global name."""
    if (layer := layer_of(name)) is not None:
        return layer, f"layer {layer}"
    if name.startswith("embedding."):
        return -1, "embedding"
    return (
        (1 << 31, "output layer") if name.startswith("output_layer.") else (1 << 30, "final norm")
    )


def _gradient(parameter: Tensor) -> Tensor:
    """The reduced gradient of a rank's part, in float32."""
    gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]
    return gradient


def _sums_of(own: Tensor, bf16: Tensor, scale: float) -> Sums:
    """The sums over all elements of gradients that were multiplied by `scale`; memory for a few strips."""
    totals = torch.zeros(4, dtype=torch.float64, device=own.device)
    length = STRIP if own.device.type == "cpu" else GPU_STRIP
    pairs = (torch.split(x.detach().reshape(-1), length) for x in (own, bf16))
    for g, b in zip(*pairs, strict=True):
        g, b = g.double(), b.double()
        totals += torch.stack([g.dot(g), b.dot(b), g.dot(b), (g - b).square().sum()])
    return Sums(*(totals / scale**2).tolist())

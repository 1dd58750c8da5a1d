"""The gradient of an iteration under several maps, on the same weights and micro-batches, in any layout.

The passes are those of a step: the same draws, the same reduction over data-parallel ranks, no step of the optimizer,
and no update of amax histories. For each parameter p, with g its gradient under a map and b a reference (that in bf16,
or in fp32), a rank sums

    g.g    b.b    g.b    |g - b|^2

in float64, strip by strip. A parameter, or a part of one, that several ranks hold counts once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from quantexp.model.shards import Shard, layer_of
from quantexp.proof.declaration import Declaration
from quantexp.proof.objective import Objective
from quantexp.proof.verdict import Verdict, require, require_none
from quantexp.quant.precision import PrecisionMap, precision_map
from quantexp.quant.units import Unit, working_rules
from quantexp.schema import Experiment, Precision, QuantConfig
from quantexp.training.megatron.collectives import complete_gradients, gather
from quantexp.training.megatron.grad_norm import GPU_STRIP, STRIP
from quantexp.training.megatron.parameters import Part
from quantexp.training.megatron.passes import Batch
from quantexp.training.megatron.step import Stepper
from quantexp.training.megatron.watched import Watched


@dataclass(frozen=True)
class Sums:
    """Sums over the elements of a gradient g and of a reference b of it."""

    own: float = 0.0
    reference: float = 0.0
    product: float = 0.0
    difference: float = 0.0

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.own + other.own,
            self.reference + other.reference,
            self.product + other.product,
            self.difference + other.difference,
        )

    @property
    def cosine(self) -> float:
        """Of the angle between g and b; NaN if one is zero or not finite."""
        norms = math.sqrt(self.own) * math.sqrt(self.reference) if self.is_finite else 0.0
        return max(-1.0, min(1.0, self.product / norms)) if norms else math.nan

    @property
    def distance(self) -> float:
        """|g - b| / |b|; NaN if b is zero or one is not finite."""
        if not self.is_finite or not self.reference:
            return math.nan
        return math.sqrt(self.difference / self.reference)

    @property
    def is_finite(self) -> bool:
        """Whether both gradients are."""
        return math.isfinite(self.own + self.reference + self.difference)


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
        self._reference = {name: gradient_of(part).clone() for name, part in parts}
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
            (name, part.shard): sums_of(gradient_of(part), self._reference[name], scale=self._scale)
            for name, part in self._parts.items()
        }
        everywhere: dict[tuple[str, Shard], Sums] = {}
        for of_rank in gather(own):
            everywhere |= of_rank  # ranks with the same part have the same sums
        by_group: dict[tuple[int, str], Sums] = {}
        for name, shard in sorted(everywhere, key=lambda key: (key[0], key[1].ranges)):
            group = group_of(name)
            by_group[group] = by_group.get(group, Sums()) + everywhere[name, shard]
        return {words: by_group[place, words] for place, words in sorted(by_group)}


class StepPasses:
    """Gradients of quantexp's own loop, by a stepper that takes no step from now on; every rank calls each method."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        #: What proves the passes.
        self.watched = Watched(stepper.chunks, stepper.training.seed)
        context, scale = stepper.layout.context, scale_of(stepper)
        # Whether some tokens do not count is no option of a step: those that have a part must have the same.
        self.watched.objective = Objective(stepper.num_micro_batches, context, True, scale)
        stepper.step_state.updates_histories = False

    def run(self, iteration: int, batches: Sequence[Batch], declared: PrecisionMap) -> float:
        """Leave the reduced gradients of an iteration's micro-batches in the stepper's parts; returns the loss.

        The draws are those of the iteration. Call inside a proof by `watched`.
        """
        stepper = self._stepper
        stepper.set_precision(declared)
        with stepper.rounded_reduction(iteration, None):
            losses = stepper.repeat(iteration, batches, partial(self.watched.begin, iteration))
        if stepper.is_distributed:
            complete_gradients(stepper.models)
        return stepper.mean_loss(losses)


def batches_of(stepper: Stepper, batches: Iterator[Batch]) -> list[Batch]:
    """The next micro-batches of a step."""
    return [next(batches) for _ in range(stepper.num_micro_batches)]


def scale_of(stepper: Stepper) -> float:
    """What the gradients are multiplied by: the loss scale in fp16, else 1."""
    is_scaled = stepper.training.precision is Precision.fp16
    return float(stepper.optimizer.get_loss_scale()) if is_scaled else 1.0


def comparison_of(stepper: Stepper, iteration: int, batches: Iterator[Batch]) -> GradientComparison:
    """Gradients of one iteration in quantexp's own loop, by a stepper that takes no step from now on."""
    passes, of_iteration = StepPasses(stepper), batches_of(stepper, batches)

    def run_passes(declared: PrecisionMap) -> tuple[float, Verdict]:
        with passes.watched.proving(iteration, declared) as verdict:
            loss = passes.run(iteration, of_iteration, declared)
        result = verdict()
        require(result)
        return loss, result

    return GradientComparison(run_passes, stepper.parts, scale_of(stepper))


def map_of(experiment: Experiment, iteration: int, off: Sequence[Unit] = ()) -> PrecisionMap:
    """The map of an experiment's scheme, with some units in the working precision by the rules that a user would write.

    Raises:
        EngagementError: it is not what is configured.
    """
    quant: QuantConfig = experiment.quant
    if off:
        quant = replace(quant, rules=[*quant.rules, *working_rules(off)])
    declared = precision_map(experiment.model, quant, iteration)
    declaration = Declaration(quant, experiment.model.num_layers)
    require_none(declaration.differences(declared, iteration), iteration)
    return declared


def group_of(name: str) -> tuple[int, str]:
    """The place and the words of the group that a parameter belongs to, by its global name."""
    if (layer := layer_of(name)) is not None:
        return layer, f"layer {layer}"
    if name.startswith("embedding."):
        return -1, "embedding"
    return (
        (1 << 31, "output layer") if name.startswith("output_layer.") else (1 << 30, "final norm")
    )


def gradient_of(part: Part) -> Tensor:
    """The reduced gradient of a rank's part, in float32."""
    gradient: Tensor = part.tensor.main_grad  # type: ignore[attr-defined]
    return gradient


def sums_of(
    own: Tensor, reference: Tensor, weight: Tensor | None = None, scale: float = 1.0
) -> Sums:
    """The sums over all elements; memory for a few strips.

    Args:
        own: the gradient, multiplied by `scale`.
        reference: the same.
        weight: multiplies the elements of both; None for 1.
        scale: see `scale_of`.
    """
    totals = torch.zeros(4, dtype=torch.float64, device=own.device)
    length = STRIP if own.device.type == "cpu" else GPU_STRIP
    tensors = [own, reference] if weight is None else [own, reference, weight]
    strips = (torch.split(x.detach().reshape(-1), length) for x in tensors)
    for g, b, *weights in zip(*strips, strict=True):
        g, b = g.double(), b.double()
        for w in weights:
            g, b = g * w, b * w
        totals += torch.stack([g.dot(g), b.dot(b), g.dot(b), (g - b).square().sum()])
    return Sums(*(totals / scale**2).tolist())

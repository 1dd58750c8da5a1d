"""Predicts the memory of a run's fullest rank, by part, from the configuration alone.

The training state is exact (weights, main gradients, master weights, Adam's two moments), and so are the quantised
weights kept within a step (`quantexp.quant.weight_cache.policy`). Activations are counted tensor by tensor
(`quantexp.memory.activations`). `temporaries` is the additional memory at the peak of a step. On a CPU there are also
`scratch`, the buffers of quantised operands and of 16-bit products through fp32, and `heap`, freed tensors that the C
library keeps, and `checkpoint`, the copy of what a rank saves; on a GPU `workspace`, which the products' library uses.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from quantexp.capture.select.budget import rank_bytes_of_iteration
from quantexp.capture.select.schedule import captured_iterations
from quantexp.memory.activations import (
    activation_bytes,
    largest_layer_bytes,
    largest_linear,
    logit_bytes,
    passing_bytes,
)
from quantexp.memory.part import Parameters, Part, parts_of
from quantexp.memory.scratch import linear_widths, output_copies, scratch_bytes, summed_bytes
from quantexp.model.decoder import EMBEDDING, is_routed
from quantexp.model.layout import Layout
from quantexp.model.sizes import (
    distributes_optimizer,
    element_bytes,
    num_micro_batches_each,
    output_shape,
    shapes_by_layer,
)
from quantexp.model.training_state import KEPT
from quantexp.quant.outside_products import MASTER, weight_slots
from quantexp.quant.precision import (
    PrecisionMap,
    declared_maps,
)
from quantexp.quant.rules import changes
from quantexp.quant.sites import DGRAD_W, FPROP_W, LOOKUP_W, Operand
from quantexp.quant.slots import working_spec
from quantexp.quant.weight_cache.policy import num_kept
from quantexp.runs.device import device_class, multiplies_natively
from quantexp.schema import (
    AttentionPath,
    CaptureLevel,
    Experiment,
    ModelConfig,
    Optimizer,
    Precision,
    QuantConfig,
    Recompute,
    TrainingConfig,
)

#: The C library returns tensors below 32 MiB to its own heap, not to the system, and their sizes vary: over iterations
#: of different models this much was resident beyond torch's allocations (0.20 to 0.51). It is never more than a step
#: frees, which is less for a small model, or a small part of one.
HEAP_GB = 0.35
#: Two of cuBLAS's workspaces, one for each thread that multiplies (forward and backward), of 32 MiB on a Hopper GPU and
#: less on others, and a few MB of small tensors.
WORKSPACE_GB = 0.075


@dataclass(frozen=True)
class RankMemory:
    """The memory of the ranks of one stage."""

    part: Part
    #: Memory by part, in units of 1e9 bytes.
    parts_gb: dict[str, float]

    @property
    def gb(self) -> float:
        """All of it, in units of 1e9 bytes."""
        return sum(self.parts_gb.values())


def memory_parts_gb(
    experiment: Experiment, maps: Sequence[PrecisionMap] | None = None
) -> dict[str, float]:
    """Training memory of the fullest rank by part, in units of 1e9 bytes; `maps` are its `declared_maps`."""
    return fullest_rank(experiment, maps).parts_gb


def fullest_rank(experiment: Experiment, maps: Sequence[PrecisionMap] | None = None) -> RankMemory:
    """The memory of the stage whose ranks need most; of equal ones the first."""
    if maps is None:
        maps = declared_maps(experiment.model, experiment.quant)
    parts = parts_of(experiment)
    layout = parts[0].layout
    copies = [0] * layout.pipeline
    if not experiment.evaluate.only:
        copies = _weight_copies(experiment, maps, layout)
    ranks = [
        RankMemory(part, _rank_parts_gb(experiment, maps, part, copies[part.stage]))
        for part in parts
    ]
    return max(ranks, key=lambda rank: rank.gb)


def _rank_parts_gb(
    experiment: Experiment, maps: Sequence[PrecisionMap], part: Part, copies: int
) -> dict[str, float]:
    model, training = experiment.model, experiment.training
    is_cpu = device_class(experiment.launcher) == "cpu"
    parameters = part.parameters(model)
    if experiment.evaluate.only:
        return _forward_parts_gb(experiment, maps, part, is_cpu=is_cpu)
    updated = _updated(experiment, parameters, part.layout)
    # Adam has two moments of each element, Muon has one.
    moments = updated * 8
    if training.optimizer is Optimizer.muon:
        moments -= 4 * part.matrices(model)
    size = element_bytes(training)
    kept = _kept_bytes(experiment, part, updated / parameters.total)
    master = 0 if training.precision is Precision.fp32 else 4
    activations = activation_bytes(model, training, is_cpu=is_cpu, part=part)
    # Of what a CPU has as scratch, a GPU's count has the operands of the output layer, by far the largest.
    beside = {} if is_cpu else output_copies(model, training, maps, part)
    copied = sum(beside.values()) * size
    # On a GPU the copies end with the backward pass; on a CPU their buffers stay.
    freed = activations if is_cpu else activations + copies * size
    temporaries = _temporary_bytes(experiment, parameters, freed, copied, part, is_cpu=is_cpu)
    parts = {
        "weights": parameters.total * size / 1e9,
        "main_gradients": parameters.total * 4 * (1 + experiment.gradient.only) / 1e9,
        "optimizer": (moments + updated * master + kept) / 1e9,
        "activations": activations / 1e9,
        "weight_copies": copies * size / 1e9,
        "temporaries": temporaries / 1e9,
        "scratch": (
            (scratch_bytes(experiment, maps, part) + _products_bytes(model, training, part))
            if is_cpu
            else 0
        )
        / 1e9
        + summed_bytes(experiment, maps, part) / 1e9,
        "capture": _capture_bytes(experiment, maps, moments) / 1e9,
        "checkpoint": (
            _copied_bytes(experiment, parameters.total, updated * 4 + moments + kept)
            if is_cpu
            else 0
        )
        / 1e9,
    }
    return parts | _outside_tensors(activations + temporaries, is_cpu=is_cpu)


def _forward_parts_gb(
    experiment: Experiment, maps: Sequence[PrecisionMap], part: Part, *, is_cpu: bool
) -> dict[str, float]:
    """Of an evaluation without training: weights, one layer's tensors, and the logits in bf16 and of the scheme."""
    model, training = experiment.model, experiment.training
    logits = logit_bytes(model, training, part) if part.is_last else 0
    # As many micro-batches as stages run together, and wait for the scheme's with their logits in bf16.
    kept = logits * (part.layout.pipeline + 1)
    activations = largest_layer_bytes(model, training, is_cpu=is_cpu, part=part)
    scratch = _products_bytes(model, training, part) if is_cpu else 0
    weight = output_copies(model, training, maps, part).get(Operand.W, 0)
    largest = max(largest_linear(model, part), weight) * element_bytes(training)
    parts = {
        "weights": part.parameters(model).total * element_bytes(training) / 1e9,
        "activations": activations / 1e9,
        "logits": kept / 1e9,
        "temporaries": largest / 1e9,
        "scratch": (scratch + summed_bytes(experiment, maps, part)) / 1e9,
    }
    passing = activations + kept + largest
    return parts | _outside_tensors(passing, is_cpu=is_cpu)


def _outside_tensors(freed: int, *, is_cpu: bool) -> dict[str, float]:
    """What a C library keeps of the bytes that a step frees, or a GPU's library for products allocates."""
    return {"heap": min(HEAP_GB, freed / 1e9)} if is_cpu else {"workspace": WORKSPACE_GB}


def _copied_bytes(experiment: Experiment, total: int, state: int) -> int:
    """Bytes of the copy of what a rank writes to a checkpoint, on a CPU; from a GPU it goes to the host's memory.

    Counted for a rank whose parts no lower rank has.
    """
    checkpoint = experiment.checkpoint
    if not (checkpoint.asynchronous and (checkpoint.at_end or checkpoint.every is not None)):
        return 0
    return state if checkpoint.optimizer else total * element_bytes(experiment.training)


def _updated(experiment: Experiment, parameters: Parameters, layout: Layout) -> int:
    """Parameters whose optimizer's state a rank keeps: all of its own, or its share of them."""
    if not distributes_optimizer(experiment):
        return parameters.total
    dense = -(-parameters.dense // (layout.data * layout.context))
    return dense + -(-parameters.routed // layout.expert_data)


def _kept_bytes(experiment: Experiment, part: Part, share: float) -> int:
    """What some schemes keep of linear weights besides, of a share of the rank's, and a copy of them in a step."""
    slots = [slot.product for slot in weight_slots(experiment.quant)]
    kept = sum(len(KEPT.get(product, ())) for product in slots)
    copies = any(product != MASTER for product in slots)
    return round(4 * (kept + copies) * part.matrices(experiment.model) * share)


def _weight_copies(
    experiment: Experiment, maps: Sequence[PrecisionMap], layout: Layout
) -> list[int]:
    """Elements of the quantised weights that a rank of each stage keeps within a step: the maximum over all iterations.

    The experts of a layer are counted as if every rank had an equal share of their copies.
    """
    model, training = experiment.model, experiment.training
    most = [0] * layout.pipeline
    if not training.weight_cache:
        return most
    several = num_micro_batches_each(experiment) > 1
    recomputed = training.recompute is Recompute.full
    stages = {**layout.stage_of_layers(model.num_layers), model.num_layers: layout.pipeline - 1}
    ranks = {False: layout.tensor, True: layout.expert * layout.expert_tensor}
    shapes = shapes_by_layer(model)
    copies_of: dict[int, int] = {}  # by the slots, which many modules share
    for declared_by_module in maps:
        counts = [{False: 0, True: 0} for _ in most]
        for module, declared in declared_by_module.items():
            # Without stages a tied embedding looks up the output layer's copy.
            if module.name == EMBEDDING and layout.pipeline > 1:
                lookup, no_dgrad = declared.spec(LOOKUP_W), working_spec(DGRAD_W)
                count = num_kept(lookup, no_dgrad, several, recomputed) * output_shape(model).count
                counts[0][False] += count
            if not declared.is_linear:
                continue
            if id(declared.alike) not in copies_of:
                fprop, dgrad = declared.spec(FPROP_W), declared.spec(DGRAD_W)
                copies_of[id(declared.alike)] = num_kept(fprop, dgrad, several, recomputed)
            count = copies_of[id(declared.alike)] * shapes[module.layer][module.name].count
            counts[stages[module.layer]][is_routed(module.name)] += count
        kept = [sum(n // ranks[routed] for routed, n in count.items()) for count in counts]
        most = [max(pair) for pair in zip(most, kept, strict=True)]
    return most


def _temporary_bytes(
    experiment: Experiment,
    parameters: Parameters,
    freed: int,
    copied: int,
    part: Part,
    *,
    is_cpu: bool,
) -> int:
    """Bytes beyond the training state and what the backward pass frees: of that pass, or of what follows it.

    `freed` are bytes that the prediction counts and that exist no more after the backward pass. `copied` are the
    quantised operands of the output layer.

    On a GPU torch's Adam processes all tensors at once, with one more float32 copy of each; on a CPU in strips
    (`quantexp.training.megatron.cpu`). There, ranks that divide the optimizer's state reduce a copy of the main
    gradients: gloo has no reduce-scatter of its own.
    """
    backward = passing_bytes(
        experiment.model, experiment.training, is_cpu=is_cpu, part=part, copied=copied
    )
    if is_cpu:
        after = 4 * _reduced_at_once(parameters, part) if distributes_optimizer(experiment) else 0
    else:
        after = 4 * _updated(experiment, parameters, part.layout)
    return max(backward, after - freed)


def _reduced_at_once(parameters: Parameters, part: Part) -> int:
    """Elements of the largest main gradient that a rank reduces: of its dense parameters, or of its experts."""
    layout = part.layout
    dense = parameters.dense if layout.data * layout.context > 1 else 0
    routed = parameters.routed if layout.expert_data > 1 else 0
    return max(dense, routed) // layout.chunks


def _products_bytes(model: ModelConfig, training: TrainingConfig, part: Part) -> int:
    """Bytes of 16-bit products through fp32: the smaller operand, and strips of the other and of the result.

    A product of a linear layer has an operand with the rank's tokens. The fused attention converts all its inputs and
    outputs: q, k, v, the output and their four gradients.
    """
    if multiplies_natively(training.precision):
        return 0
    from quantexp.quant.products import KEPT_BYTES, STRIP_BYTES

    tokens = part.tokens(training)
    widest = max(max(widths) for widths in linear_widths(model, part))
    kept = max(STRIP_BYTES, min(KEPT_BYTES, 4 * tokens * widest))
    is_fused = training.attention is AttentionPath.fused
    return kept + 2 * STRIP_BYTES + is_fused * 32 * tokens * part.heads(model) * model.head_dim


def _capture_bytes(experiment: Experiment, maps: Sequence[PrecisionMap], moments: int) -> int:
    """Bytes of one iteration's tensors that wait to be processed and written, up to the size of the queue.

    In the first iteration they fit in the memory of Adam's two moments, which do not exist yet.
    """
    capture = experiment.capture
    iterations = captured_iterations(capture, experiment.training.last_iteration)
    levels = {capture.level, *(rule.level for rule in capture.rules)}
    if not iterations or CaptureLevel.tensors not in levels:
        return 0
    declared = map_in_force(maps, experiment.quant, iterations[0])
    values = rank_bytes_of_iteration(experiment, declared)
    waiting = min(round(capture.queue_gb * 1e9), values)
    return max(0, waiting - moments) if iterations[-1] == 1 else waiting


def map_in_force(maps: Sequence[PrecisionMap], quant: QuantConfig, iteration: int) -> PrecisionMap:
    """The entry of a run's `declared_maps` for an iteration (from 1), while no rule's condition is met."""
    return maps[bisect_right(changes(quant), iteration) - 1]

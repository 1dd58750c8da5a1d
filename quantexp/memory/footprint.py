"""Predicts the memory of a run, by part, from the configuration alone.

The training state is exact (weights, main gradients, master weights, Adam's two moments), and so are the quantised
weights kept within a step (`quantexp.quant.weight_cache.policy`). Activations are counted tensor by tensor
(`quantexp.memory.activations`). `temporaries` is the additional memory at the peak of a step. On a CPU there are also
`scratch`, the buffers of quantised operands and of 16-bit products through fp32, and `heap`, freed tensors that the C
library keeps.
"""

from __future__ import annotations

from collections.abc import Sequence

from quantexp.capture.select.budget import rank_bytes_of_iteration
from quantexp.capture.select.rules import captured_iterations
from quantexp.memory.activations import activation_bytes, largest_linear, passing_bytes
from quantexp.model.decoder import alike_layers, is_routed, linear_shapes, shapes_by_layer
from quantexp.model.sizes import (
    element_bytes,
    num_micro_batches_each,
    num_padding_parameters,
    num_parameters,
)
from quantexp.quant.precision import (
    PrecisionMap,
    declared_maps,
    distinct_slots,
    map_in_force,
)
from quantexp.quant.sites import DGRAD_W, FPROP_W, Site
from quantexp.quant.weight_cache.policy import num_kept
from quantexp.runs.device import device_class, multiplies_natively
from quantexp.schema import (
    AttentionPath,
    Experiment,
    ModelConfig,
    Precision,
    Recompute,
    TrainingConfig,
)

#: The C library returns tensors below 32 MiB to its own heap, not to the system, and their sizes vary: over iterations
#: of different models this much was resident beyond torch's allocations (0.20 to 0.51).
HEAP_GB = 0.35


def memory_parts_gb(
    experiment: Experiment, maps: Sequence[PrecisionMap] | None = None
) -> dict[str, float]:
    """Training memory of one process by part, in units of 1e9 bytes; `maps` are the experiment's `declared_maps`."""
    if maps is None:
        maps = declared_maps(experiment.model, experiment.quant)
    model, training = experiment.model, experiment.training
    is_cpu = device_class(experiment.launcher) == "cpu"
    count = num_parameters(model) + num_padding_parameters(model)
    size = element_bytes(training)
    master = 0 if training.precision is Precision.fp32 else 4
    activations = activation_bytes(model, training, is_cpu=is_cpu)
    parts = {
        "weights": count * size / 1e9,
        "main_gradients": count * 4 / 1e9,
        "optimizer": count * (8 + master) / 1e9,
        "activations": activations / 1e9,
        "weight_copies": _weight_copies(experiment, maps) * size / 1e9,
        "temporaries": _temporary_bytes(model, training, count, activations, is_cpu) / 1e9,
        "scratch": (
            (_scratch_bytes(experiment, maps) + _products_bytes(model, training)) if is_cpu else 0
        )
        / 1e9,
        "capture": _capture_bytes(experiment, maps, count * 8) / 1e9,
    }
    return parts | ({"heap": HEAP_GB} if is_cpu else {})


def _weight_copies(experiment: Experiment, maps: Sequence[PrecisionMap]) -> int:
    """Elements of the quantised weights kept within a step: the maximum over all iterations."""
    model, training = experiment.model, experiment.training
    if not training.weight_cache:
        return 0
    several = num_micro_batches_each(experiment) > 1
    recomputed = training.recompute is Recompute.full
    shapes = shapes_by_layer(model)
    counts = [0]
    for declared_by_module in maps:
        count = 0
        for module, declared in declared_by_module.items():
            if not declared.is_linear:
                continue
            fprop, dgrad = declared.spec(FPROP_W), declared.spec(DGRAD_W)
            copies = num_kept(fprop, dgrad, several, recomputed)
            count += copies * shapes[module.layer][module.name].count
        counts.append(count)
    return max(counts)


def _temporary_bytes(
    model: ModelConfig, training: TrainingConfig, count: int, activations: int, is_cpu: bool
) -> int:
    """Bytes beyond state and activations: of the backward pass, or of the optimizer, when no activations remain.

    On a GPU torch's Adam processes all tensors at once, with one more float32 copy of each; on a CPU in strips
    (`quantexp.training.megatron.optimizer`).
    """
    backward = passing_bytes(model, training, is_cpu=is_cpu)
    return backward if is_cpu else max(backward, 4 * count - activations)


def _scratch_bytes(experiment: Experiment, maps: Sequence[PrecisionMap]) -> int:
    """Bytes of the buffers that every linear layer writes its quantised operands to: the largest w, x and twice g.

    On a CPU the buffers exist (`quantexp.quant.weight_cache.buffers`) if weight copies do; on a GPU the allocator
    reuses the memory.
    """
    model, training = experiment.model, experiment.training
    if not training.weight_cache:
        return 0
    quantised = {
        slot.operand.value
        for declared in maps
        for slots in distinct_slots(declared)
        for slot, spec in slots.items()
        if slot.site is Site.LINEAR and spec.quantised
    }
    tokens = training.seq_length * training.micro_batch_size
    shapes = [
        shape
        for layer, _ in alike_layers(model)
        for name, shape in linear_shapes(model, layer).items()
        if not is_routed(name)
    ]
    elements = {
        "w": largest_linear(model),
        "x": tokens * max(shape.input_width for shape in shapes),
        "g": 2 * tokens * max(shape.output_width for shape in shapes),
    }
    return sum(elements[name] for name in quantised) * element_bytes(training)


def _products_bytes(model: ModelConfig, training: TrainingConfig) -> int:
    """Bytes of 16-bit products through fp32, at most; the fused attention converts all its inputs and outputs.

    These are q, k, v, the output and their four gradients.
    """
    if multiplies_natively(training.precision):
        return 0
    from quantexp.quant.products import SCRATCH_BYTES

    if training.attention is not AttentionPath.fused:
        return SCRATCH_BYTES
    tokens = training.seq_length * training.micro_batch_size
    return SCRATCH_BYTES + 8 * 4 * tokens * model.num_attention_heads * model.head_dim


def _capture_bytes(experiment: Experiment, maps: Sequence[PrecisionMap], moments: int) -> int:
    """Bytes of one iteration's tensors that wait to be processed and written, up to the size of the queue.

    In the first iteration they fit in the memory of Adam's two moments, which do not exist yet.
    """
    capture = experiment.capture
    iterations = captured_iterations(capture, experiment.training.iterations)
    if not iterations:
        return 0
    declared = map_in_force(maps, experiment.quant, iterations[0])
    values = rank_bytes_of_iteration(experiment, declared)
    waiting = min(round(capture.queue_gb * 1e9), values)
    return max(0, waiting - moments) if iterations[-1] == 1 else waiting

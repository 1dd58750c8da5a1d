"""What a training takes of memory, by part, from the configuration alone.

The training state is exact (weights, main gradients, master weights, Adam's two moments), and so are the quantised
weights that are kept within a step (`quantexp.quant.weight_cache.policy`); activations are counted tensor by tensor
(`quantexp.memory.activations`). `temporaries` is what comes on top of both at the worst moment of a step. On a CPU
there are `scratch`, where quantised operands lie, and those of 16-bit products through fp32, and `heap`, what the C
library keeps of tensors that were let go.
"""

from __future__ import annotations

from collections.abc import Sequence

from quantexp.capture.select.budget import price_of_iteration
from quantexp.capture.select.schedule import captured_iterations
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
    distinct_sites,
    map_in_force,
)
from quantexp.quant.sites import Product, Site
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

#: The C library hands tensors below 32 MiB back to its own heap, not to the system, and their sizes differ: over
#: iterations of different models this much was resident beyond what torch had allocated (0.20 to 0.51).
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
    """Elements of the quantised weights that are kept within a step, at most over the iterations."""
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
            if Site.LINEAR not in declared.sites:
                continue
            fprop, dgrad = (
                declared.operand(Site.LINEAR, product, "w")
                for product in (Product.FPROP, Product.DGRAD)
            )
            copies = num_kept(fprop, dgrad, several, recomputed)
            count += copies * shapes[module.layer][module.name].count
        counts.append(count)
    return max(counts)


def _temporary_bytes(
    model: ModelConfig, training: TrainingConfig, count: int, activations: int, is_cpu: bool
) -> int:
    """Beyond state and activations: of the backward, or of the optimizer, which no activation stands beside.

    On a GPU torch's Adam works on all tensors at once, with one more of each in float32; on a CPU in strips
    (`quantexp.training.megatron.optimizer`).
    """
    backward = passing_bytes(model, training, is_cpu=is_cpu)
    return backward if is_cpu else max(backward, 4 * count - activations)


def _scratch_bytes(experiment: Experiment, maps: Sequence[PrecisionMap]) -> int:
    """Memory that every linear layer writes its quantised operands to: of the largest w, x and, both ways, g.

    On a CPU it is kept (`quantexp.quant.weight_cache.buffers`) where weight copies are; on a GPU it is the allocator's,
    for whatever comes next.
    """
    model, training = experiment.model, experiment.training
    if not training.weight_cache:
        return 0
    held = {
        name
        for declared in maps
        for sites in distinct_sites(declared)
        for (_, name), operand in sites.get(Site.LINEAR, {}).items()
        if operand.quantised
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
    return sum(elements[name] for name in held) * element_bytes(training)


def _products_bytes(model: ModelConfig, training: TrainingConfig) -> int:
    """What 16-bit products through fp32 hold, at most; the fused attention converts all that enters and leaves it.

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
    """Tensors of one iteration, which wait to be looked at and written, as far as the queue holds them.

    In the first iteration there is room for them where Adam's two moments will be.
    """
    capture = experiment.capture
    taken = captured_iterations(capture, experiment.training.iterations)
    if not taken:
        return 0
    declared = map_in_force(maps, experiment.quant, taken[0])
    values = price_of_iteration(experiment, declared, num_processes=1).num_bytes
    waiting = min(round(capture.queue_gb * 1e9), values)
    return max(0, waiting - moments) if taken[-1] == 1 else waiting

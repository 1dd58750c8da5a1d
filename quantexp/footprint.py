"""What a training takes of memory, by part, from the configuration alone.

The training state is exact (weights, main gradients, master weights, Adam's two moments), and so are the quantised
weights that are kept within a step; the activations are an estimate: the tensors that the layers keep for the backward.
"""

from __future__ import annotations

from quantexp.decoder import is_routed, linear_shapes, moe_of
from quantexp.quant.kept import num_kept
from quantexp.quant.precision import changes, precision_map
from quantexp.quant.sites import Product, Site
from quantexp.schema import (
    AttentionPath,
    Experiment,
    ModelConfig,
    Precision,
    Recompute,
    TrainingConfig,
)
from quantexp.sizes import (
    element_bytes,
    num_micro_batches_each,
    num_padding_parameters,
    num_parameters,
    padded_vocab_size,
)


def memory_parts_gb(experiment: Experiment) -> dict[str, float]:
    """Training memory of one process by part, in units of 1e9 bytes.

    # T tokens, B micro-batch, V padded vocabulary; s bytes of the working dtype
    """
    model, training = experiment.model, experiment.training
    count = num_parameters(model) + num_padding_parameters(model)
    size = element_bytes(training)
    master = 0 if training.precision is Precision.fp32 else 4
    return {
        "weights": count * size / 1e9,
        "main_gradients": count * 4 / 1e9,
        "optimizer": count * (8 + master) / 1e9,
        "activations": _activation_bytes(model, training) / 1e9,
        "weight_copies": _weight_copies(experiment) * size / 1e9,
        "quantised_operands": _largest_linear(model) * (2 * size) / 1e9,
    }


def _weight_copies(experiment: Experiment) -> int:
    """Elements of the quantised weights that are kept within a step, at most over the iterations."""
    model, training = experiment.model, experiment.training
    if not training.weight_cache:
        return 0
    several = num_micro_batches_each(experiment) > 1
    recomputed = training.recompute is Recompute.full
    shapes = [linear_shapes(model, layer) for layer in range(model.num_layers)]
    counts = [0]
    for iteration in changes(experiment.quant):
        count = 0
        for module, declared in precision_map(model, experiment.quant, iteration).items():
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


def _activation_bytes(model: ModelConfig, training: TrainingConfig) -> int:
    """What is kept for the backward: by layer the inputs of every product, norm and activation; the logits in fp32."""
    tokens = training.seq_length * training.micro_batch_size
    size = element_bytes(training)
    layers = [_layer_bytes(model, training, layer) for layer in range(model.num_layers)]
    logits = _logit_bytes(model, tokens, size)
    if training.recompute is Recompute.full:
        inputs = model.num_layers * tokens * model.hidden_size * size
        return inputs + max(layers) + logits
    return sum(layers) + logits


def _layer_bytes(model: ModelConfig, training: TrainingConfig, layer: int) -> int:
    tokens = training.seq_length * training.micro_batch_size
    size = element_bytes(training)
    widths = 0
    for name, shape in linear_shapes(model, layer).items():
        if not is_routed(name):
            widths += shape.input_width + shape.output_width
    if (moe := moe_of(model, layer)) is not None:  # every token passes top_k experts, alike in size
        experts = (linear_shapes(model, layer)[f"expert0-{name}"] for name in ("fc1", "fc2"))
        widths += moe.top_k * sum(s.input_width + s.output_width for s in experts)
    if training.attention is AttentionPath.fused:
        # q, k and v of each query head as they are held, and a sum for each row
        attention = model.num_attention_heads * (3 * model.head_dim * size + 4)
    else:  # scores in float32 and as rounded, probabilities
        attention = model.num_attention_heads * training.seq_length * (4 + 2 * size)
    return tokens * (size * (widths + 2 * model.hidden_size) + attention)


def _logit_bytes(model: ModelConfig, tokens: int, size: int) -> int:
    return tokens * padded_vocab_size(model.vocab_size) * (size + 4 + 4)


def _largest_linear(model: ModelConfig) -> int:
    layers = range(model.num_layers)
    return max(s.count for layer in layers for s in linear_shapes(model, layer).values())

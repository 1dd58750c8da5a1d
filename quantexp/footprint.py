"""What a training takes of memory, by part, from the configuration alone.

The training state is exact (weights, main gradients, master weights, Adam's two moments); the activations are an
estimate: the tensors that the layers keep for the backward.
"""

from __future__ import annotations

from quantexp.decoder import is_routed, linear_shapes, moe_of
from quantexp.quant.tiles import ROWS
from quantexp.schema import AttentionPath, ModelConfig, Precision, Recompute, TrainingConfig
from quantexp.sizes import (
    element_bytes,
    num_padding_parameters,
    num_parameters,
    padded_vocab_size,
)


def memory_parts_gb(model: ModelConfig, training: TrainingConfig) -> dict[str, float]:
    """Training memory of one process by part, in units of 1e9 bytes.

    # T tokens, B micro-batch, V padded vocabulary; s bytes of the working dtype
    """
    count = num_parameters(model) + num_padding_parameters(model)
    size = element_bytes(training)
    master = 0 if training.precision is Precision.fp32 else 4
    return {
        "weights": count * size / 1e9,
        "main_gradients": count * 4 / 1e9,
        "optimizer": count * (8 + master) / 1e9,
        "activations": _activation_bytes(model, training) / 1e9,
        "quantised_operands": _largest_linear(model) * (2 * size) / 1e9,
    }


def _activation_bytes(model: ModelConfig, training: TrainingConfig) -> int:
    """What is kept for the backward: by layer the inputs of every product, norm and activation; the logits in fp32."""
    tokens = training.seq_length * training.micro_batch_size
    size = element_bytes(training)
    layers = [_layer_bytes(model, training, layer) for layer in range(model.num_layers)]
    logits, tile = _logit_bytes(model, tokens, size), _tile_bytes(model, training)
    if training.recompute is Recompute.full:
        inputs = model.num_layers * tokens * model.hidden_size * size
        return inputs + max(layers) + logits + tile
    return sum(layers) + logits + tile


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
    return tokens * (size * (widths + 2 * model.hidden_size) + _attention_bytes(model, training))


def _attention_bytes(model: ModelConfig, training: TrainingConfig) -> int:
    """What a layer's attention keeps of each token."""
    size = element_bytes(training)
    match training.attention:
        case AttentionPath.plain:  # scores in float32 and as rounded, probabilities
            return model.num_attention_heads * training.seq_length * (4 + 2 * size)
        case (
            AttentionPath.fused
        ):  # q, k and v of each query head as they are held, and a sum for each row
            return model.num_attention_heads * (3 * model.head_dim * size + 4)
        case AttentionPath.tiled:  # q, k and v as they come
            return (model.num_attention_heads + 2 * model.num_query_groups) * model.head_dim * size


def _tile_bytes(model: ModelConfig, training: TrainingConfig) -> int:
    """The tile of T x T at work: its softmax and the backward of that in float32, the rest in the working dtype."""
    if training.attention is not AttentionPath.tiled:
        return 0
    rows = min(ROWS, training.seq_length)
    scores = training.micro_batch_size * model.num_attention_heads * rows * training.seq_length
    return scores * (4 * 4 + 6 * element_bytes(training))


def _logit_bytes(model: ModelConfig, tokens: int, size: int) -> int:
    return tokens * padded_vocab_size(model.vocab_size) * (size + 4 + 4)


def _largest_linear(model: ModelConfig) -> int:
    layers = range(model.num_layers)
    return max(s.count for layer in layers for s in linear_shapes(model, layer).values())

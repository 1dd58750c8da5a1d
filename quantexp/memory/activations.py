"""Predicts activation memory: bytes kept from forward to backward, and temporary bytes in addition.

The prediction counts the tensors that autograd saves with Megatron-Core without Transformer Engine: the inputs of every
product, both halves of a gated feed-forward and their activation, attention's operands, the norms' copies.
Temporaries within an operation are counted only where they determine the peak.

    # T tokens of a sequence, B sequences of a micro-batch, H heads, D head_dim; s bytes of the working dtype
"""

from __future__ import annotations

from quantexp.model.decoder import (
    LinearShape,
    alike_layers,
    linear_shapes,
    moe_of,
    shared_width,
    value_head_dim,
)
from quantexp.model.sizes import element_bytes, padded_vocab_size
from quantexp.quant.attention.tiles import ROWS
from quantexp.schema import AttentionPath, ModelConfig, MoeConfig, Recompute, TrainingConfig

#: Bytes per element of the softmax and of the main gradients.
_FP32 = 4


def activation_bytes(model: ModelConfig, training: TrainingConfig, *, is_cpu: bool) -> int:
    """Bytes saved for the backward pass; with recomputation the layers' inputs and one largest layer in full."""
    tokens = training.seq_length * training.micro_batch_size
    layers = [(_layer(model, training, i, is_cpu), count) for i, count in alike_layers(model)]
    last = tokens * (_norm(model.hidden_size, training, is_cpu) + _hidden(model, training))
    if training.recompute is Recompute.full:
        return model.num_layers * tokens * _hidden(model, training) + max(layers)[0] + last
    return sum(size * count for size, count in layers) + last


def passing_bytes(model: ModelConfig, training: TrainingConfig, *, is_cpu: bool) -> int:
    """Temporary bytes on top of the activations at the peak of forward and backward.

    The maximum of: the logits in the working dtype and in float32; the gradient of the logits and that of the output
    layer's weight, which is added to the float32 main gradient; the same for the largest weight of a layer; the scores
    of the last layer's attention (or a tile of them) in float32 and back, before its feed-forward has saved anything.
    """
    size = element_bytes(training)
    tokens = training.seq_length * training.micro_batch_size
    rows = padded_vocab_size(model.vocab_size)
    of_weight = (size + _FP32) if size != _FP32 else size
    logits = tokens * rows * (size + _FP32)
    output = tokens * rows * size + rows * model.hidden_size * of_weight
    within = largest_linear(model) * of_weight
    if training.recompute is not Recompute.full:
        return max(logits, output, within, _scores_passing(model, training))
    layer_bytes = max(_layer(model, training, layer, is_cpu) for layer, _ in alike_layers(model))
    return max(within, logits - layer_bytes, output - layer_bytes, _scores_passing(model, training))


def largest_linear(model: ModelConfig) -> int:
    """Elements of the largest weight of a layer."""
    layers = [linear_shapes(model, layer) for layer, _ in alike_layers(model)]
    return max(shape.count for shapes in layers for shape in shapes.values())


def _layer(model: ModelConfig, training: TrainingConfig, layer: int, is_cpu: bool) -> int:
    tokens = training.seq_length * training.micro_batch_size
    per_token = 2 * _norm(model.hidden_size, training, is_cpu)
    per_token += _attention(model, training, layer, is_cpu)
    per_token += _feed_forward(model, training, layer)
    return tokens * per_token


def _hidden(model: ModelConfig, training: TrainingConfig) -> int:
    return model.hidden_size * element_bytes(training)


def _norm(width: int, training: TrainingConfig, is_cpu: bool) -> int:
    """A root-mean-square norm: torch saves input and result in float32 on a CPU, the input unchanged on a GPU."""
    return 2 * _FP32 * width if is_cpu else element_bytes(training) * width


def _attention(model: ModelConfig, training: TrainingConfig, layer: int, is_cpu: bool) -> int:
    """Bytes per token: the projections' inputs, the products' operands and the probabilities."""
    size, heads = element_bytes(training), model.num_attention_heads
    shapes = linear_shapes(model, layer)
    own = size * model.hidden_size
    if model.mla is not None:
        own += size * shapes["kv-up"].input_width
        own += _norm(model.mla.kv_lora_rank, training, is_cpu)
        if model.mla.q_lora_rank is not None:
            own += size * model.mla.q_lora_rank
            own += _norm(model.mla.q_lora_rank, training, is_cpu)
    if training.attention is AttentionPath.fused:
        # q, k, v and o of every query head, padded to head_dim, and one sum per row; o is the input of proj
        own += heads * (4 * model.head_dim * size + _FP32)
        return own if model.mla is None else own + size * shapes["proj"].input_width
    own += size * (_operand_width(model, shapes) + shapes["proj"].input_width)
    return own if training.attention is AttentionPath.tiled else own + _scores(model, training)


def _operand_width(model: ModelConfig, shapes: dict[str, LinearShape]) -> int:
    """Elements of q, k and v saved per token; v is a view of the whole projection if there is one."""
    heads, D = model.num_attention_heads, model.head_dim
    if model.mla is not None:
        return heads * (2 * D + value_head_dim(model))
    return shapes["qkv"].output_width + (heads + model.num_query_groups) * D


def _scores(model: ModelConfig, training: TrainingConfig) -> int:
    """Bytes per token: the probabilities in float32 for the softmax, and in the working dtype for the product."""
    size = element_bytes(training)
    per_score = _FP32 if size == _FP32 else _FP32 + size
    return model.num_attention_heads * training.seq_length * per_score


def _scores_passing(model: ModelConfig, training: TrainingConfig) -> int:
    """Scores in the working dtype and in float32, minus what the last feed-forward has not saved by then."""
    tokens = training.seq_length * training.micro_batch_size
    later = tokens * _feed_forward(model, training, model.num_layers - 1)
    match training.attention:
        case AttentionPath.plain:
            return tokens * _scores(model, training) - later
        case AttentionPath.fused:
            return 0
        case AttentionPath.tiled:
            return _tile(model, training) - later


def _tile(model: ModelConfig, training: TrainingConfig) -> int:
    """A tile in the backward pass: two tensors in float32 and five in the working dtype.

    Plus the operands of every query head and dq, and dk and dv in float32. Compared with torch's own count: 18 bytes
    per score of a tile in bf16; 20 in float32, or 31 with a scale of the whole tensor; 23 to 27 for the rest in bf16.
    """
    size, heads = element_bytes(training), model.num_attention_heads
    tokens = training.seq_length * training.micro_batch_size
    rows = min(ROWS, training.seq_length)
    scores = training.micro_batch_size * heads * rows * training.seq_length
    return scores * (2 * _FP32 + 5 * size) + tokens * heads * model.head_dim * (
        4 * size + 2 * _FP32
    )


def _feed_forward(model: ModelConfig, training: TrainingConfig, layer: int) -> int:
    """Bytes per token: the input, gate and up, the activation, up shifted, their product."""
    size, moe = element_bytes(training), moe_of(model, layer)
    if moe is None:
        return size * (model.hidden_size + 5 * model.ffn_hidden_size)
    return size * (model.hidden_size + _experts(model, moe))


def _experts(model: ModelConfig, moe: MoeConfig) -> int:
    """Elements saved per token in its experts: rows in and out, and the product with its probability."""
    routed = 2 * model.hidden_size + 6 * moe.expert_ffn_hidden_size
    shared = 5 * shared_width(moe) if moe.num_shared_experts else 0
    return moe.top_k * routed + shared

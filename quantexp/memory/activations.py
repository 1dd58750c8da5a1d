"""What a training keeps between forward and backward, and what it needs beside that while it runs: bytes by arithmetic.

Counted are the tensors that autograd holds, as they are with Megatron-Core without Transformer Engine: the inputs of
every product, both halves of a gated feed-forward and what its activation makes of them, attention's operands, the
norms' copies. What comes and goes within an operation is counted only where it makes the peak.

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

#: Bytes of an element of the softmax and of the main gradients.
_FP32 = 4


def activation_bytes(model: ModelConfig, training: TrainingConfig, *, is_cpu: bool) -> int:
    """What the forward keeps for the backward; with recomputation the layers' inputs and the largest layer's all."""
    tokens = training.seq_length * training.micro_batch_size
    layers = [(_layer(model, training, i, is_cpu), count) for i, count in alike_layers(model)]
    last = tokens * (_norm(model.hidden_size, training, is_cpu) + _hidden(model, training))
    if training.recompute is Recompute.full:
        return model.num_layers * tokens * _hidden(model, training) + max(layers)[0] + last
    return sum(each * count for each, count in layers) + last


def passing_bytes(model: ModelConfig, training: TrainingConfig, *, is_cpu: bool) -> int:
    """What comes on top at the worst moment of forward and backward.

    One of: the logits as they are multiplied and in float32; the gradient of the logits beside that of the output
    layer's weight, which enters the float32 main gradient; the same of the largest weight of a layer; the scores of the
    last layer's attention (or a tile of them) on their way to float32 and back, while its feed-forward keeps nothing.
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
    held = max(_layer(model, training, layer, is_cpu) for layer, _ in alike_layers(model))
    return max(within, logits - held, output - held, _scores_passing(model, training))


def largest_linear(model: ModelConfig) -> int:
    """Elements of the largest weight of a layer."""
    layers = [linear_shapes(model, layer) for layer, _ in alike_layers(model)]
    return max(shape.count for shapes in layers for shape in shapes.values())


def _layer(model: ModelConfig, training: TrainingConfig, layer: int, is_cpu: bool) -> int:
    tokens = training.seq_length * training.micro_batch_size
    each = 2 * _norm(model.hidden_size, training, is_cpu)
    each += _attention(model, training, layer, is_cpu)
    each += _feed_forward(model, training, layer)
    return tokens * each


def _hidden(model: ModelConfig, training: TrainingConfig) -> int:
    return model.hidden_size * element_bytes(training)


def _norm(width: int, training: TrainingConfig, is_cpu: bool) -> int:
    """A root-mean-square norm: on a CPU torch keeps input and result in float32, on a GPU the input as it is."""
    return 2 * _FP32 * width if is_cpu else element_bytes(training) * width


def _attention(model: ModelConfig, training: TrainingConfig, layer: int, is_cpu: bool) -> int:
    """The projections' inputs, the products' operands and the probabilities, for each token."""
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
        # q, k, v and o of every query head, padded to head_dim, and a sum for each row; o is what proj multiplies
        own += heads * (4 * model.head_dim * size + _FP32)
        return own if model.mla is None else own + size * shapes["proj"].input_width
    own += size * (_operand_width(model, shapes) + shapes["proj"].input_width)
    return own if training.attention is AttentionPath.tiled else own + _scores(model, training)


def _operand_width(model: ModelConfig, shapes: dict[str, LinearShape]) -> int:
    """Elements of q, k and v that a token keeps; v is a view of the whole projection where there is one."""
    heads, D = model.num_attention_heads, model.head_dim
    if model.mla is not None:
        return heads * (2 * D + value_head_dim(model))
    return shapes["qkv"].output_width + (heads + model.num_query_groups) * D


def _scores(model: ModelConfig, training: TrainingConfig) -> int:
    """The probabilities in float32 for the softmax, and as the product takes them, for each token."""
    size = element_bytes(training)
    each = _FP32 if size == _FP32 else _FP32 + size
    return model.num_attention_heads * training.seq_length * each


def _scores_passing(model: ModelConfig, training: TrainingConfig) -> int:
    """Scores as multiplied and in float32, less what the last layer's feed-forward keeps by then: nothing."""
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
    """A tile in its backward, two tensors of which are in float32 beside five of the working dtype.

    And the operands of every query head and dq, with dk and dv in float32. Held against torch's own count: 18 bytes for
    each score of a tile in bf16; 20, or with a scale of the whole 31, in float32; 23 to 27 for the rest in bf16.
    """
    size, heads = element_bytes(training), model.num_attention_heads
    tokens = training.seq_length * training.micro_batch_size
    rows = min(ROWS, training.seq_length)
    scores = training.micro_batch_size * heads * rows * training.seq_length
    return scores * (2 * _FP32 + 5 * size) + tokens * heads * model.head_dim * (
        4 * size + 2 * _FP32
    )


def _feed_forward(model: ModelConfig, training: TrainingConfig, layer: int) -> int:
    """For each token: the input, gate and up, the activation, up shifted, their product."""
    size, moe = element_bytes(training), moe_of(model, layer)
    if moe is None:
        return size * (model.hidden_size + 5 * model.ffn_hidden_size)
    return size * (model.hidden_size + _experts(model, moe))


def _experts(model: ModelConfig, moe: MoeConfig) -> int:
    """Elements that a token keeps in its experts: rows on their way in and out, the product by its probability too."""
    routed = 2 * model.hidden_size + 6 * moe.expert_ffn_hidden_size
    shared = 5 * shared_width(moe) if moe.num_shared_experts else 0
    return moe.top_k * routed + shared

"""Predicts activation memory: bytes kept from forward to backward, and temporary bytes in addition.

The prediction counts the tensors that autograd saves with Megatron-Core without Transformer Engine: the inputs of every
product, both halves of a gated feed-forward and their activation, attention's operands, the norms' copies.
Temporaries within an operation are counted only where they determine the peak.

A rank of a divided model keeps its share: heads and widths are divided by tensor parallelism, tokens outside the
products by sequence parallelism, sequences by context parallelism, whose ranks keep the keys and values of whole
sequences. The tokens of routed experts are counted as if the router spread them evenly.

    # T tokens of a sequence, B sequences of a micro-batch, H heads, D head_dim; s bytes of the working dtype
"""

from __future__ import annotations

import dataclasses

from quantexp.memory.part import WHOLE, Part
from quantexp.model.decoder import (
    LinearShape,
    linear_shapes,
    moe_of,
    shared_width,
    value_head_dim,
)
from quantexp.model.sizes import element_bytes, padded_vocab_size
from quantexp.quant.attention.tiles import ROWS
from quantexp.schema import (
    AttentionPath,
    Dispatcher,
    ModelConfig,
    MoeConfig,
    Recompute,
    TrainingConfig,
)

#: Bytes per element of the softmax and of the main gradients.
_FP32 = 4


def activation_bytes(
    model: ModelConfig, training: TrainingConfig, *, is_cpu: bool, part: Part = WHOLE
) -> int:
    """Bytes saved for the backward pass by all micro-batches in flight.

    With selective recomputation without the scores, but for those of one layer; with full recomputation the layers'
    inputs, and one largest layer in full. A stage also keeps what it sends to the next one.
    """
    tokens, layers = part.tokens(training), part.alike_layers(model)
    hidden = tokens * _hidden(model, training) // part.ranks_of_tokens
    last = _norm(model.hidden_size, training, is_cpu) + _hidden(model, training)
    once = part.is_last * (tokens * last // part.ranks_of_tokens)
    kept = sum(count * _layer(model, training, i, is_cpu, part) for i, count in layers)
    if training.recompute is not Recompute.none:
        whole = dataclasses.replace(training, recompute=Recompute.none)
        largest = [_layer(model, whole, layer, is_cpu, part) for layer, _ in layers]
        if training.recompute is Recompute.full:
            once += max(largest)
            kept = sum(count for _, count in layers) * hidden
        else:
            once += max(largest) - max(_layer(model, training, i, is_cpu, part) for i, _ in layers)
    sent = 0 if part.is_last else hidden
    return kept * part.chunks_in_flight // part.layout.chunks + sent * part.chunks_in_flight + once


def passing_bytes(
    model: ModelConfig,
    training: TrainingConfig,
    *,
    is_cpu: bool,
    part: Part = WHOLE,
    copied: int = 0,
) -> int:
    """Temporary bytes on top of the activations at the peak of forward and backward.

    The maximum of: the logits in the working dtype and in float32; the gradient of the logits and that of the output
    layer's weight, which is added to the float32 main gradient, beside `copied` bytes of its quantised operands; the
    same for the largest weight of a layer; the softmax of the last layer's attention (or of a tile of it), while its
    feed-forward has nothing saved; the tokens on their way to and from the experts of other ranks. Sequence
    parallelism gathers a product's input beside its gradients.
    """
    size, tokens = element_bytes(training), part.tokens(training)
    rows = part.is_last * padded_vocab_size(model.vocab_size) // part.layout.tensor
    of_weight = (size + _FP32) if size != _FP32 else size
    gathered = tokens * model.hidden_size * size if part.ranks_of_tokens > 1 else 0
    logits = tokens * rows * (size + _FP32)
    output = tokens * rows * size + rows * model.hidden_size * of_weight + part.is_last * gathered
    output += copied
    within = largest_linear(model, part) * of_weight + gathered
    scores = _scores_passing(model, training, is_cpu, part)
    exchanged = _exchanged(model, training, part)
    if training.recompute is not Recompute.full:
        return max(logits, output, within, scores, exchanged)
    layers = part.alike_layers(model)
    layer_bytes = max(_layer(model, training, layer, is_cpu, part) for layer, _ in layers)
    return max(within, logits - layer_bytes, output - layer_bytes, scores, exchanged)


def largest_layer_bytes(
    model: ModelConfig, training: TrainingConfig, *, is_cpu: bool, part: Part = WHOLE
) -> int:
    """Bytes of one layer's tensors in a forward pass that keeps nothing for a backward pass."""
    layers = part.alike_layers(model)
    return max(_layer(model, training, layer, is_cpu, part) for layer, _ in layers)


def logit_bytes(model: ModelConfig, training: TrainingConfig, part: Part = WHOLE) -> int:
    """Bytes of a micro-batch's logits over the whole padded vocabulary, in the working dtype."""
    rows = padded_vocab_size(model.vocab_size)
    return part.tokens(training) * rows * element_bytes(training)


def largest_linear(model: ModelConfig, part: Part = WHOLE) -> int:
    """Elements of the largest weight of a layer that the rank holds."""
    return max(
        shape.count // part.ranks_of(name)
        for layer, _ in part.alike_layers(model)
        for name, shape in linear_shapes(model, layer).items()
    )


def _layer(
    model: ModelConfig, training: TrainingConfig, layer: int, is_cpu: bool, part: Part
) -> int:
    per_token = 2 * _norm(model.hidden_size, training, is_cpu) // part.ranks_of_tokens
    per_token += _attention(model, training, layer, is_cpu, part)
    per_token += _feed_forward(model, training, layer, part)
    return part.tokens(training) * per_token + _mask(training, part)


def _hidden(model: ModelConfig, training: TrainingConfig) -> int:
    return model.hidden_size * element_bytes(training)


def _norm(width: int, training: TrainingConfig, is_cpu: bool) -> int:
    """A root-mean-square norm: torch saves input and result in float32 on a CPU, the input unchanged on a GPU."""
    return 2 * _FP32 * width if is_cpu else element_bytes(training) * width


def _attention(
    model: ModelConfig, training: TrainingConfig, layer: int, is_cpu: bool, part: Part
) -> int:
    """Bytes per token: the projections' inputs, the products' operands and the probabilities."""
    size, heads = element_bytes(training), part.heads(model)
    shapes, path = linear_shapes(model, layer), training.attention
    own = size * model.hidden_size
    if model.mla is not None:
        own += size * shapes["kv-up"].input_width
        own += _norm(model.mla.kv_lora_rank, training, is_cpu)
        if model.mla.q_lora_rank is not None:
            own += size * model.mla.q_lora_rank
            own += _norm(model.mla.q_lora_rank, training, is_cpu)
    own //= part.ranks_of_tokens
    if model.qk_norm:
        own += _norm(model.head_dim * (heads + part.groups(model)), training, is_cpu)
    output = size * heads * value_head_dim(model)
    recomputed = training.recompute is Recompute.selective
    if path is AttentionPath.fused and not recomputed:
        # q, k, v and o of every query head, padded to head_dim, and one sum per row; o is the input of proj
        own += heads * (4 * model.head_dim * size + _FP32)
        return own if model.mla is None else own + output
    own += size * _operand_width(model, shapes, part) + output
    scores = 0 if path is AttentionPath.tiled or recomputed else _scores(model, training, part)
    return own + scores


def _operand_width(model: ModelConfig, shapes: dict[str, LinearShape], part: Part) -> int:
    """Elements of q, k and v saved per token; v is a view of the whole projection if there is one.

    With context parallelism k and v are gathered: as many for each of a rank's tokens as ranks share the sequence. With
    fewer query groups than ranks the whole projection is gathered.
    """
    heads, groups, D = part.heads(model), part.groups(model), model.head_dim
    values, context, tensor = value_head_dim(model), part.layout.context, part.layout.tensor
    if context > 1:
        gathered = heads if model.mla is not None else groups
        return heads * D + context * gathered * (D + values)
    if model.mla is not None:
        return heads * (2 * D + values)
    projection = shapes["qkv"].output_width
    shared = tensor if tensor <= model.num_query_groups else 1
    return projection // shared + (heads + groups) * D


def _scores(model: ModelConfig, training: TrainingConfig, part: Part) -> int:
    """Bytes per token: the probabilities in float32 for the softmax, and in the working dtype for the product."""
    size = element_bytes(training)
    per_score = _FP32 if size == _FP32 else _FP32 + size
    return part.heads(model) * training.seq_length * per_score


def _mask(training: TrainingConfig, part: Part) -> int:
    """Bytes of the causal mask, which each layer's plain attention makes and saves: one for all heads and sequences."""
    if training.attention is not AttentionPath.plain or training.recompute is Recompute.selective:
        return 0
    return training.seq_length * training.seq_length // part.layout.context


def _scores_passing(model: ModelConfig, training: TrainingConfig, is_cpu: bool, part: Part) -> int:
    """Bytes at the softmax of the last layer, minus what its feed-forward saves later, or has freed."""
    last = part.layout.stage_layers(model.num_layers, part.stage)[-1]
    later = part.tokens(training) * _feed_forward(model, training, last, part)
    match training.attention:
        case AttentionPath.plain:
            scores = part.tokens(training) * part.heads(model) * training.seq_length
            return scores * _softmax_passing(training, is_cpu) - later
        case AttentionPath.fused:
            return 0
        case AttentionPath.tiled:
            return _tile(model, training, part) - later


def _softmax_passing(training: TrainingConfig, is_cpu: bool) -> int:
    """Temporary bytes per score of a whole softmax, in addition to its saved probabilities P.

    In 16 bits the forward pass has S in both dtypes. The backward pass has dP and dS in float32, without the working
    dtype's P, which its product has freed; on a GPU also P dP, a tensor of its own in torch's `softmax_backward_cuda`
    (ATen/native/cuda/SoftMax.cu). In float32 the mask is filled into a view of S, and autograd copies the gradient of
    its base: four tensors besides the freed P, as many as dP, dS and P dP.
    """
    size = element_bytes(training)
    if size == _FP32:
        return 3 * _FP32
    forward, backward = size + _FP32, 2 * _FP32 - size
    return max(forward, backward if is_cpu else backward + _FP32)


def _tile(model: ModelConfig, training: TrainingConfig, part: Part) -> int:
    """A tile in the backward pass: two tensors in float32 and five in the working dtype.

    Plus the operands of every query head and dq, and dk and dv in float32. Compared with torch's own count: 18 bytes
    per score of a tile in bf16; 20 in float32, or 31 with a scale of the whole tensor; 23 to 27 for the rest in bf16.
    """
    size, heads = element_bytes(training), part.heads(model)
    rows = min(ROWS, training.seq_length // part.layout.context)
    scores = training.micro_batch_size * heads * rows * training.seq_length
    of_keys = part.layout.context * (2 * size + 2 * _FP32)
    operands = part.tokens(training) * heads * model.head_dim * (2 * size + of_keys)
    return scores * (2 * _FP32 + 5 * size) + operands


def _feed_forward(model: ModelConfig, training: TrainingConfig, layer: int, part: Part) -> int:
    """Bytes per token: the input, gate and up, the activation, up shifted, their product."""
    size, moe = element_bytes(training), moe_of(model, layer)
    own = model.hidden_size // part.ranks_of_tokens
    if moe is None:
        return size * (own + 5 * model.ffn_hidden_size // part.layout.tensor)
    return size * (own + _experts(model, moe, part))


def _experts(model: ModelConfig, moe: MoeConfig, part: Part) -> int:
    """Elements saved per token in its experts: rows in and out, and the product with its probability.

    The ranks that share an expert have the rows of all of them.
    """
    ranks = part.layout.expert_tensor
    routed = 2 * model.hidden_size + 6 * moe.expert_ffn_hidden_size // ranks
    shared = 5 * shared_width(moe) if moe.num_shared_experts else 0
    return moe.top_k * routed * ranks // part.ranks_of_tokens + shared // part.layout.tensor


def _exchanged(model: ModelConfig, training: TrainingConfig, part: Part) -> int:
    """Bytes of the tokens on their way to experts and back: all of the group's, or a copy for each expert."""
    group = part.layout.expert * part.layout.expert_tensor
    if model.moe is None or group == 1:
        return 0
    copies = group if part.dispatcher is Dispatcher.allgather else model.moe.top_k
    return 2 * copies * part.tokens(training) * _hidden(model, training) // part.ranks_of_tokens

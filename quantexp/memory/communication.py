"""Predicts the bytes that one rank sends in an optimizer step, by the kind of its group, from the configuration alone.

Collectives over r ranks are counted as rings: an all-gather or a reduce-scatter of n bytes sends (r - 1) / r of them
from each rank, an all-reduce twice as many. Gradients of parameters, and of keys and values that ranks gathered, are
reduced in float32; all else travels in the working dtype. For t tokens of a micro-batch on a rank, of hidden size D,
each micro-batch sends:

    tensor      for attention, and for a feed-forward or shared experts, of each layer: with sequence parallelism 3
                all-gathers (forward, backward, and the input again for the weight's gradient) and 2 reduce-scatters
                of t D, without 2 all-reduces; the embedding and the output layer likewise
    context     k and v of each layer, gathered forward, and their gradients reduced to the ranks backward
    expert      the tokens of each layer with experts, to the experts and back, forward and backward
    pipeline    t D forward for each chunk of layers but the last, and as much backward

and each step the gradients (`data`): an all-reduce of float32, or a reduce-scatter and an all-gather of the weights
with the distributed optimizer; for tied embeddings on two stages also the embedding's (`pipeline`). Recomputation
repeats what the recomputed forward pass sends. The router's probabilities, the softmax over a divided vocabulary, the
latents of MLA and scalars are not counted.
"""

from __future__ import annotations

from quantexp.memory.part import Part, parts_of
from quantexp.model.decoder import moe_of, value_head_dim
from quantexp.model.sizes import distributes_optimizer, element_bytes, padded_vocab_size
from quantexp.schema import Dispatcher, Experiment, ModelConfig, Recompute, TrainingConfig

_FP32 = 4


def communication_bytes(experiment: Experiment) -> dict[str, int]:
    """The most bytes that a rank sends in a step, for each kind of group that has several ranks."""
    ranks = [_rank_bytes(experiment, part) for part in parts_of(experiment)]
    most = {kind: max(rank[kind] for rank in ranks) for kind in ranks[0]}
    return {kind: num_bytes for kind, num_bytes in most.items() if num_bytes}


def _rank_bytes(experiment: Experiment, part: Part) -> dict[str, int]:
    model, training, times = experiment.model, experiment.training, part.micro_batches
    return {
        "tensor": times * _tensor(model, training, part),
        "context": times * _context(model, training, part),
        "expert": times * _expert(model, training, part),
        "pipeline": times * _pipeline(model, training, part) + _tied_embedding(model, part),
        "data": _data(experiment, part),
    }


def _ring(num_bytes: int, ranks: int) -> int:
    """Bytes that a rank sends in a ring's all-gather or reduce-scatter of so many bytes in all."""
    return num_bytes * (ranks - 1) // ranks


def _tensor(model: ModelConfig, training: TrainingConfig, part: Part) -> int:
    elements = part.tokens(training) * model.hidden_size
    each = _ring(elements * element_bytes(training), part.layout.tensor)
    again = training.recompute is Recompute.full
    blocks = sum(count * _blocks(model, layer) for layer, count in part.alike_layers(model))
    if part.layout.sequence:
        return (blocks * (5 + 2 * again) + 2 * part.is_first + 3 * part.is_last) * each
    return (blocks * (4 + 2 * again) + 2 * part.is_first + 2 * part.is_last) * each


def _blocks(model: ModelConfig, layer: int) -> int:
    """Attention, and a feed-forward or shared experts."""
    moe = moe_of(model, layer)
    return 1 if moe is not None and not moe.num_shared_experts else 2


def _context(model: ModelConfig, training: TrainingConfig, part: Part) -> int:
    heads = part.groups(model) if model.mla is None else part.heads(model)
    width = heads * (model.head_dim + value_head_dim(model))
    layers = sum(count for _, count in part.alike_layers(model))
    gathers = 1 if training.recompute is Recompute.none else 2
    per_element = gathers * element_bytes(training) + _FP32
    return layers * (part.layout.context - 1) * part.tokens(training) * width * per_element


def _expert(model: ModelConfig, training: TrainingConfig, part: Part) -> int:
    moe, layout = model.moe, part.layout
    if moe is None:
        return 0
    layers = sum(count for i, count in part.alike_layers(model) if moe_of(model, i) is not None)
    tokens = part.tokens(training) // part.ranks_of_tokens
    copies = tokens * model.hidden_size * element_bytes(training)
    if part.dispatcher is Dispatcher.allgather:
        one_way = (layout.expert * layout.expert_tensor - 1) * copies
    else:
        to_experts = _ring(moe.top_k * copies, layout.expert)
        one_way = to_experts + (layout.expert_tensor - 1) * moe.top_k * copies
    return layers * (6 if training.recompute is Recompute.full else 4) * one_way


def _pipeline(model: ModelConfig, training: TrainingConfig, part: Part) -> int:
    tokens = part.tokens(training) // part.ranks_of_tokens
    messages = 2 * part.layout.chunks - part.is_first - part.is_last
    return messages * tokens * model.hidden_size * element_bytes(training)


def _tied_embedding(model: ModelConfig, part: Part) -> int:
    is_shared = model.tie_embeddings and part.is_first != part.is_last
    rows = padded_vocab_size(model.vocab_size) // part.layout.tensor
    return is_shared * 2 * _ring(rows * model.hidden_size * _FP32, 2)


def _data(experiment: Experiment, part: Part) -> int:
    layout, size = part.layout, element_bytes(experiment.training)
    parameters = part.parameters(experiment.model)
    per_element = _FP32 + (size if distributes_optimizer(experiment) else _FP32)
    dense = _ring(parameters.dense * per_element, layout.data * layout.context)
    return dense + _ring(parameters.routed * per_element, layout.expert_data)

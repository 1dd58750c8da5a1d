"""Counts parameters, bytes and shapes from a configuration alone, without building a model."""

from __future__ import annotations

from quantexp.model.decoder import (
    OUTPUT,
    LinearShape,
    alike_layers,
    bias_parameters,
    is_routed,
    linear_shapes,
    moe_of,
    other_parameters,
    value_head_dim,
)
from quantexp.model.layout import Layout
from quantexp.schema import Experiment, ModelConfig, Optimizer, Precision, TrainingConfig

#: Megatron pads the vocabulary to a multiple of this, so that it divides over tensor-parallel ranks.
VOCAB_MULTIPLE = 128


def padded_vocab_size(vocab_size: int) -> int:
    """Rows of the embedding in Megatron."""
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def output_shape(model: ModelConfig) -> LinearShape:
    """The output layer's weight, and the embedding's."""
    return LinearShape(padded_vocab_size(model.vocab_size), model.hidden_size)


def shapes_by_layer(model: ModelConfig) -> list[dict[str, LinearShape]]:
    """The linear modules of every layer, then the output layer; equal layers share one dictionary."""
    alike = [(linear_shapes(model, first), count) for first, count in alike_layers(model)]
    layers = (shapes for shapes, count in alike for _ in range(count))
    return [*layers, {OUTPUT: output_shape(model)}]


def num_micro_batches_each(experiment: Experiment) -> int:
    """Micro-batches of one data-parallel rank in one global batch."""
    training = experiment.training
    sequences = training.micro_batch_size * Layout.of(experiment).data
    return training.global_batch_size // sequences


def distributes_optimizer(experiment: Experiment) -> bool:
    """Whether the ranks that hold the same parameters divide the optimizer's state among them.

    By default where there are several data-parallel ranks, and never under Muon, which takes whole matrices.
    """
    configured = experiment.training.distributed_optimizer
    if experiment.training.optimizer is Optimizer.muon:
        return False
    return Layout.of(experiment).data > 1 if configured is None else configured


def num_parameters(model: ModelConfig) -> int:
    """Parameters, without Megatron's padding of the vocabulary."""
    layers = num_linear_parameters(model)
    layers += sum(count * other_parameters(model, layer) for layer, count in alike_layers(model))
    layers += model.num_layers * bias_parameters(model)
    embeddings = (1 if model.tie_embeddings else 2) * model.vocab_size * model.hidden_size
    return layers + model.hidden_size + embeddings


def num_linear_parameters(model: ModelConfig) -> int:
    """Elements of the decoder's linear weights."""
    return sum(
        count * sum(shape.count for shape in linear_shapes(model, layer).values())
        for layer, count in alike_layers(model)
    )


def num_matrix_parameters(experiment: Experiment) -> int:
    """Elements of the weights that Muon moves: those of the decoder's linear layers; 0 under another optimizer."""
    is_muon = experiment.training.optimizer is Optimizer.muon
    return num_linear_parameters(experiment.model) if is_muon else 0


def num_padding_parameters(model: ModelConfig) -> int:
    """Parameters of the vocabulary's padding."""
    rows = padded_vocab_size(model.vocab_size) - model.vocab_size
    return (1 if model.tie_embeddings else 2) * rows * model.hidden_size


def element_bytes(training: TrainingConfig) -> int:
    """Bytes per element in the working precision."""
    return 4 if training.precision is Precision.fp32 else 2


def active_linear_parameters(model: ModelConfig, layer: int) -> int:
    """Elements of the weights, router included, that multiply one token in a layer."""
    moe, shapes = moe_of(model, layer), linear_shapes(model, layer)
    if moe is None:
        return sum(shape.count for shape in shapes.values())
    always = sum(shape.count for name, shape in shapes.items() if not is_routed(name))
    routed = sum(shapes[f"expert0-{name}"].count for name in ("fc1", "fc2"))
    return always + moe.top_k * routed + moe.num_experts * model.hidden_size


def flops_per_iteration(model: ModelConfig, seq_length: int, num_sequences: int) -> float:
    """Model FLOPs of one optimizer step: 2 per multiply-add, the backward pass twice the forward pass.

    A token counts the weights of its own experts, of all shared ones and of the router. The causal half of the
    attention products is not subtracted; norms, softmax and activations, recomputation and quantisation are not
    counted.
    """
    tokens = seq_length * num_sequences
    linear = sum(n * active_linear_parameters(model, layer) for layer, n in alike_layers(model))
    output = output_shape(model).count
    heads = model.num_attention_heads * (model.head_dim + value_head_dim(model))
    return 6.0 * tokens * (linear + output + model.num_layers * seq_length * heads)

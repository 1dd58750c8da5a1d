"""Counting without building: parameters, bytes and tensor shapes that follow from a configuration alone."""

from __future__ import annotations

from dataclasses import dataclass

from quantexp.quant.precision import LINEAR_MODULES
from quantexp.schema import Experiment, ModelConfig, Precision, TrainingConfig

#: Megatron pads the vocabulary to a multiple of this, so that it divides over tensor-parallel ranks.
VOCAB_MULTIPLE = 128


def padded_vocab_size(vocab_size: int) -> int:
    """Rows of the embedding as Megatron holds it."""
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def num_micro_batches_each(experiment: Experiment) -> int:
    """Micro-batches that each process takes of a global batch."""
    training = experiment.training
    together = training.micro_batch_size * experiment.launcher.num_processes
    return training.global_batch_size // together


@dataclass(frozen=True)
class LinearShape:
    """A linear layer's weight is [output_width, input_width]."""

    output_width: int
    input_width: int

    @property
    def count(self) -> int:
        """Elements of the weight."""
        return self.output_width * self.input_width


def linear_shapes(model: ModelConfig) -> dict[str, LinearShape]:
    """The linear modules of one decoder layer; fc1 holds gate and up in one."""
    query = model.num_attention_heads * model.head_dim
    key_value = model.num_query_groups * model.head_dim
    shapes = (
        LinearShape(query + 2 * key_value, model.hidden_size),
        LinearShape(model.hidden_size, query),
        LinearShape(2 * model.ffn_hidden_size, model.hidden_size),
        LinearShape(model.hidden_size, model.ffn_hidden_size),
    )
    return dict(zip(LINEAR_MODULES, shapes, strict=True))


def num_parameters(model: ModelConfig) -> int:
    """Parameters, without Megatron's padding of the vocabulary."""
    layer = sum(shape.count for shape in linear_shapes(model).values()) + 2 * model.hidden_size
    embeddings = (1 if model.tie_embeddings else 2) * model.vocab_size * model.hidden_size
    return model.num_layers * layer + model.hidden_size + embeddings


def num_padding_parameters(model: ModelConfig) -> int:
    """Parameters that exist only because the vocabulary is padded."""
    rows = padded_vocab_size(model.vocab_size) - model.vocab_size
    return (1 if model.tie_embeddings else 2) * rows * model.hidden_size


def element_bytes(training: TrainingConfig) -> int:
    """Bytes of one element of the working precision."""
    return 4 if training.precision is Precision.fp32 else 2


def flops_per_iteration(model: ModelConfig, seq_length: int, num_sequences: int) -> float:
    """Model FLOPs of one optimizer step: 2 a multiply-add, the backward twice the forward.

    The causal half of the attention products is not subtracted; recomputation and quantisation are not counted.
    """
    tokens = seq_length * num_sequences
    linear = model.num_layers * sum(shape.count for shape in linear_shapes(model).values())
    output = padded_vocab_size(model.vocab_size) * model.hidden_size
    attention = 2 * model.num_layers * seq_length * model.num_attention_heads * model.head_dim
    return 6.0 * tokens * (linear + output + attention)

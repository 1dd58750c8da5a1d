"""The part of a run that one rank holds and computes: a stage of the layers, a share of each, its micro-batches.

All ranks of a stage have equal parts. Micro-batches in flight, forward but not yet backward, follow Megatron's
schedules (arXiv 2104.04473), for stage s of p with c chunks:

    one chunk        min(p - s, micro-batches)
    interleaved      min(2 (p - s - 1) + (c - 1) p + 1, c x micro-batches), counted in chunks of layers
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from quantexp.model.decoder import (
    alike_layers,
    bias_parameters,
    is_routed,
    linear_shapes,
    other_parameters,
)
from quantexp.model.layout import Layout
from quantexp.model.sizes import num_micro_batches_each, padded_vocab_size
from quantexp.schema import Dispatcher, Experiment, ModelConfig, TrainingConfig


class Parameters(NamedTuple):
    """Parameters of one rank, with the padding of the vocabulary."""

    dense: int
    #: Of routed experts.
    routed: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.routed


@dataclass(frozen=True)
class Part:
    """The part of one rank; the default is a whole run of one micro-batch."""

    layout: Layout = field(default_factory=Layout)
    stage: int = 0
    #: Micro-batches of one data-parallel rank in a step.
    micro_batches: int = 1
    dispatcher: Dispatcher = Dispatcher.allgather

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the output layer."""
        return self.stage == self.layout.pipeline - 1

    @property
    def ranks_of_tokens(self) -> int:
        """The ranks that share the tokens outside the products."""
        return self.layout.tensor if self.layout.sequence else 1

    @property
    def chunks_in_flight(self) -> int:
        """Chunks of layers whose activations are kept at once; each is 1 / `layout.chunks` of the stage's layers."""
        layout, following = self.layout, self.layout.pipeline - self.stage - 1
        if layout.pipeline == 1:
            return 1
        if layout.chunks == 1:
            return min(following + 1, self.micro_batches)
        warm_up = 2 * following + (layout.chunks - 1) * layout.pipeline
        return min(warm_up + 1, self.micro_batches * layout.chunks)

    def tokens(self, training: TrainingConfig) -> int:
        """The tokens of a micro-batch that the rank has."""
        return training.seq_length * training.micro_batch_size // self.layout.context

    def heads(self, model: ModelConfig) -> int:
        """Its query heads."""
        return model.num_attention_heads // self.layout.tensor

    def groups(self, model: ModelConfig) -> int:
        """Its key and value heads; ranks share one if there are fewer than ranks."""
        return max(1, model.num_query_groups // self.layout.tensor)

    def ranks_of(self, module: str) -> int:
        """The ranks that share a linear module."""
        return self.layout.expert_tensor if is_routed(module) else self.layout.tensor

    def alike_layers(self, model: ModelConfig) -> list[tuple[int, int]]:
        """For each range of equal layers of the model, its first layer and how many of it the stage has."""
        own = self.layout.stage_layers(model.num_layers, self.stage)
        counts = (
            (first, sum(first <= layer < first + count for layer in own))
            for first, count in alike_layers(model)
        )
        return [(first, count) for first, count in counts if count]

    def matrices(self, model: ModelConfig) -> int:
        """Elements of the rank's linear weights inside the layers."""
        return sum(
            count
            * (shape.count // self.ranks_of(name) // (self.layout.expert if is_routed(name) else 1))
            for layer, count in self.alike_layers(model)
            for name, shape in linear_shapes(model, layer).items()
        )

    def parameters(self, model: ModelConfig) -> Parameters:
        """The parameters of the rank; a tied embedding is on the first and on the last stage."""
        tensor, dense, routed = self.layout.tensor, 0, 0
        for layer, count in self.alike_layers(model):
            shapes = linear_shapes(model, layer)
            experts = sum(shape.count for name, shape in shapes.items() if is_routed(name))
            others = sum(shape.count for name, shape in shapes.items() if not is_routed(name))
            others += bias_parameters(model)
            dense += count * (others // tensor + other_parameters(model, layer))
            routed += count * (experts // (self.layout.expert * self.layout.expert_tensor))
        embedding = padded_vocab_size(model.vocab_size) * model.hidden_size // tensor
        dense += self.is_first * embedding
        if self.is_last:
            is_shared = model.tie_embeddings and self.layout.pipeline == 1
            dense += model.hidden_size + (0 if is_shared else embedding)
        return Parameters(dense, routed)


WHOLE = Part()


def parts_of(experiment: Experiment) -> list[Part]:
    """The part of a rank of each stage."""
    layout, each = Layout.of(experiment), num_micro_batches_each(experiment)
    dispatcher = experiment.parallel.dispatcher
    return [Part(layout, stage, each, dispatcher) for stage in range(layout.pipeline)]

"""How one model lies on the processes of a run: sizes, the place of each rank, the layers of each stage.

    world = data x tensor x context x pipeline              attention, dense layers, embedding
          = expert_data x expert_tensor x expert x pipeline routed experts

Ranks count through these in Megatron's order: tensor fastest, then context, data and pipeline; for experts
expert_tensor, expert, expert_data and pipeline. So the ranks of a tensor-parallel group are neighbours. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quantexp.schema import Experiment, ParallelConfig


@dataclass(frozen=True)
class Place:
    """The position of a rank in each kind of group, from 0."""

    tensor: int
    context: int
    data: int
    pipeline: int
    expert_tensor: int
    expert: int
    expert_data: int


@dataclass(frozen=True)
class Layout:
    """The sizes of a run's groups; the default is one process."""

    data: int = 1
    tensor: int = 1
    #: Whether tokens are divided between the ranks of a tensor-parallel group outside the products.
    sequence: bool = False
    context: int = 1
    pipeline: int = 1
    #: Chunks of layers a stage.
    chunks: int = 1
    expert: int = 1
    expert_tensor: int = 1

    @classmethod
    def of(cls, experiment: Experiment) -> Layout:
        """An experiment's layout; `validate` has refused those that do not divide."""
        return cls.from_config(experiment.parallel, experiment.launcher.num_processes)

    @classmethod
    def from_config(cls, parallel: ParallelConfig, num_processes: int) -> Layout:
        """The layout of a section on a number of processes."""
        tensor = parallel.tensor
        return cls(
            data=max(1, num_processes // (tensor * parallel.context * parallel.pipeline)),
            tensor=tensor,
            sequence=tensor > 1 if parallel.sequence is None else parallel.sequence and tensor > 1,
            context=parallel.context,
            pipeline=parallel.pipeline,
            chunks=parallel.virtual_pipeline,
            expert=parallel.expert,
            expert_tensor=_expert_tensor(parallel, num_processes),
        )

    @property
    def num_processes(self) -> int:
        """All ranks."""
        return self.data * self.tensor * self.context * self.pipeline

    @property
    def expert_data(self) -> int:
        """Ranks that hold the same part of the same experts."""
        return self.num_processes // (self.expert * self.expert_tensor * self.pipeline)

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds the whole model and whole sequences."""
        return self.model_ranks * self.expert * self.expert_tensor == 1

    @property
    def model_ranks(self) -> int:
        """Ranks that together hold one copy of the dense model and one micro-batch."""
        return self.tensor * self.context * self.pipeline

    @property
    def micro_batches_together(self) -> int:
        """Micro-batches that a step takes at once: interleaved stages take as many as there are stages."""
        return self.data * (self.pipeline if self.chunks > 1 else 1)

    @property
    def micro_batches_in_words(self) -> str:
        """The same in words: `launcher.num_processes`."""
        data = "launcher.num_processes"
        if self.model_ranks > 1:
            data = f"data-parallel ranks ({data} / {self.model_ranks})"
        return data + (" x parallel.pipeline (interleaved)" if self.chunks > 1 else "")

    def place(self, rank: int) -> Place:
        """The place of a rank."""
        stage, within = divmod(rank, self.num_processes // self.pipeline)
        dense, tensor = divmod(within, self.tensor)
        data, context = divmod(dense, self.context)
        routed, expert_tensor = divmod(within, self.expert_tensor)
        expert_data, expert = divmod(routed, self.expert)
        return Place(tensor, context, data, stage, expert_tensor, expert, expert_data)

    def layers(self, num_layers: int, stage: int, chunk: int = 0) -> range:
        """The layers (global, from 0) of a stage's chunk.

        With chunks the layers divide evenly; otherwise every stage but the last has as many as the first.
        """
        if self.chunks > 1:
            each = num_layers // (self.pipeline * self.chunks)
            first = (chunk * self.pipeline + stage) * each
            return range(first, first + each)
        each = -(-num_layers // self.pipeline)
        return range(stage * each, min(num_layers, (stage + 1) * each))

    def stage_layers(self, num_layers: int, stage: int) -> list[int]:
        """All layers of a stage, in order of its chunks."""
        return [
            layer for chunk in range(self.chunks) for layer in self.layers(num_layers, stage, chunk)
        ]

    def stage_of_layers(self, num_layers: int) -> dict[int, int]:
        """Layer -> its stage."""
        stages = range(self.pipeline)
        return {layer: s for s in stages for layer in self.stage_layers(num_layers, s)}

    def experts(self, num_experts: int, place: Place) -> range:
        """The routed experts (global, from 0) of a rank."""
        each = num_experts // self.expert
        return range(place.expert * each, (place.expert + 1) * each)

    def places(self) -> Iterator[tuple[int, Place]]:
        """Every rank with its place."""
        return ((rank, self.place(rank)) for rank in range(self.num_processes))

    def model_places(self) -> list[tuple[int, Place]]:
        """The lowest rank, with its place, of those that hold the same parts of the model."""
        lowest: dict[tuple[int, ...], tuple[int, Place]] = {}
        for rank, place in self.places():
            parts = (place.pipeline, place.tensor, place.expert, place.expert_tensor)
            lowest.setdefault(parts, (rank, place))
        return list(lowest.values())


def _expert_tensor(parallel: ParallelConfig, num_processes: int) -> int:
    if parallel.expert_tensor is not None:
        return parallel.expert_tensor
    in_stage = max(1, num_processes // parallel.pipeline)
    divides = in_stage % (parallel.tensor * parallel.expert) == 0
    return parallel.tensor if divides or parallel.expert == 1 else 1

"""What a rank holds: against the parameters of Megatron's model, and its schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches

from quantexp.memory.part import WHOLE, Part, parts_of
from quantexp.model.layout import Layout
from quantexp.model.shards import WHOLE as WHOLE_TENSOR
from quantexp.model.shards import expert_of, holds, shard_of
from quantexp.model.sizes import num_padding_parameters, num_parameters
from quantexp.schema import Experiment
from quantexp.training.megatron.model import build_model
from quantexp.training.megatron.session import session
from quantexp.training.megatron.specs import inject, stock_spec

Tiny = Callable[..., Experiment]

LAYOUTS = [
    Layout(),
    Layout(tensor=2, sequence=True, expert_tensor=2),
    Layout(pipeline=2),
    Layout(data=2, expert=2),
    Layout(data=2, tensor=2, sequence=True, pipeline=2, expert=2, expert_tensor=2),
]


def named_shapes(experiment: Experiment) -> dict[str, tuple[int, ...]]:
    with session(experiment.training):
        spec = inject(stock_spec(experiment.model))
        model, _ = build_model(experiment.model, experiment.training, spec)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "name", ["llama32-1b", "deepseek2_lite", "qwen2", "qwen3", "mixtral", "qwen3_moe"]
)
def test_parameters_of_each_rank_are_its_shards_of_megatrons_model(
    tiny: Tiny, tiny_models: dict[str, list[str]], name: str, tied: bool
) -> None:
    experiment = tiny(*tiny_models[name], f"model.tie_embeddings={str(tied).lower()}")
    model = experiment.model
    shapes = named_shapes(experiment)
    for layout in LAYOUTS:
        for _, place in layout.places():
            expected = [0, 0]
            for parameter, shape in shapes.items():
                owner = parameter
                if tied and layout.pipeline > 1 and parameter.startswith("output_layer"):
                    continue
                if not holds(owner, model, layout, place):
                    continue
                shard = shard_of(parameter, shape, layout, place)
                count = math.prod(shape)
                if shard != WHOLE_TENSOR and shard.axis is not None:
                    count = count // shape[shard.axis] * shard.extent
                expected[expert_of(parameter) is not None] += count
            parameters = Part(layout, place.pipeline).parameters(model)
            assert [parameters.dense, parameters.routed] == expected, (layout, place)


def test_part_of_one_process_is_the_model_with_its_padding(tiny: Tiny) -> None:
    model = tiny().model
    assert WHOLE.parameters(model).total == num_parameters(model) + num_padding_parameters(model)


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("micro_batches", [4, 8, 32])
def test_micro_batches_in_flight_are_those_of_megatrons_schedules(
    stages: int, chunks: int, micro_batches: int
) -> None:
    """All of the warm-up, and the first of the steady state before its backward pass."""
    for stage in range(stages):
        communicator = SimpleNamespace(
            pp_group=SimpleNamespace(size=lambda: stages, rank=lambda s=stage: s),
            virtual_pipeline_model_parallel_size=None if chunks == 1 else chunks,
        )
        total, _, warm_up, _ = get_pp_rank_microbatches(
            micro_batches, chunks, stages, p2p_communicator=communicator
        )
        part = Part(Layout(pipeline=stages, chunks=chunks), stage, micro_batches)
        assert part.chunks_in_flight == min(warm_up + 1, total)


def test_fewer_query_groups_than_ranks_leave_one_to_a_rank(tiny: Tiny) -> None:
    part = Part(Layout(tensor=4))
    assert (part.heads(tiny().model), part.groups(tiny().model)) == (1, 1)


def test_every_stage_has_a_part(tiny: Tiny) -> None:
    experiment = tiny("launcher.num_processes=2", "parallel.pipeline=2", "model.num_layers=3")
    first, last = parts_of(experiment)
    assert (first.is_first, first.is_last, last.is_first, last.is_last) == (
        True,
        False,
        False,
        True,
    )
    assert [part.alike_layers(experiment.model) for part in (first, last)] == [[(0, 2)], [(0, 1)]]
    assert first.micro_batches == 1

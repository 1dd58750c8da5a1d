"""The part of each parameter that a rank holds, against slices of a whole tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantexp.model.huggingface.mapping import mapping
from quantexp.model.layout import Layout
from quantexp.model.shards import WHOLE, Shard, expert_of, holds, shard_of
from tests.model.huggingface.layouts import LAYOUTS, MODELS, part_of

FC1 = "decoder.layers.1.mlp.linear_fc1.weight"
FC2 = "decoder.layers.1.mlp.linear_fc2.weight"


def cut(name: str, whole: Tensor, layout: Layout, rank: int) -> Tensor:
    return part_of(whole, shard_of(name, tuple(whole.shape), layout, layout.place(rank)))


def test_a_rank_has_its_share_of_gate_and_of_up() -> None:
    gate, up = torch.arange(12).view(6, 2), torch.arange(12, 24).view(6, 2)
    layout = Layout(tensor=3)
    for rank in range(3):
        expected = torch.cat([gate.chunk(3)[rank], up.chunk(3)[rank]])
        assert torch.equal(cut(FC1, torch.cat([gate, up]), layout, rank), expected)


def test_row_parallel_layers_are_divided_by_columns() -> None:
    whole = torch.arange(24).view(4, 6)
    for name in (FC2, FC2.replace("mlp.linear_fc2", "self_attention.linear_proj")):
        for rank in range(2):
            assert torch.equal(cut(name, whole, Layout(tensor=2), rank), whole.chunk(2, 1)[rank])


def test_norms_and_the_router_are_whole() -> None:
    for name in ("decoder.final_layernorm.weight", "decoder.layers.1.mlp.router.weight"):
        assert shard_of(name, (8, 6), Layout(tensor=2), Layout(tensor=2).place(1)) == WHOLE


def test_an_expert_is_divided_over_the_expert_tensor_group_alone() -> None:
    name = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight"
    layout = Layout(tensor=2, expert=2, expert_tensor=1)
    assert expert_of(name) == 3
    assert shard_of(name, (8, 6), layout, layout.place(1)) == WHOLE
    layout = Layout(tensor=2, expert=1, expert_tensor=2)
    assert shard_of(name, (8, 6), layout, layout.place(1)) == Shard(1, ((3, 6),))


def test_stages_hold_the_layers_of_their_chunks() -> None:
    model = MODELS["llama32"]
    names = [f"decoder.layers.{layer}.mlp.linear_fc1.weight" for layer in range(4)]
    for layout, expected in (
        (Layout(pipeline=2), [[0, 1], [2, 3]]),
        (Layout(pipeline=2, chunks=2), [[0, 2], [1, 3]]),
    ):
        for rank, layers in enumerate(expected):
            own = [name for name in names if holds(name, model, layout, layout.place(rank))]
            assert own == [names[layer] for layer in layers]


def test_a_tied_embedding_is_on_the_first_and_the_last_stage() -> None:
    name, layout = "embedding.word_embeddings.weight", Layout(pipeline=3)
    for family, expected in (("llama32", [True, False, True]), ("llama31", [True, False, False])):
        places = [layout.place(rank) for rank in range(3)]
        assert [holds(name, MODELS[family], layout, place) for place in places] == expected


@pytest.mark.parametrize("case", LAYOUTS)
def test_every_element_of_every_parameter_is_on_the_same_number_of_ranks(case: str) -> None:
    """As many as there are replicas; a tied embedding of several stages has twice as many."""
    family, layout = LAYOUTS[case]
    model = MODELS[family]
    for parameter in mapping(model):
        count = torch.zeros(parameter.shape, dtype=torch.int)
        for _, place in layout.places():
            if holds(parameter.name, model, layout, place):
                shard = shard_of(parameter.name, parameter.shape, layout, place)
                for start, stop in shard.ranges or ((0, count.shape[0]),):
                    count.narrow(shard.axis or 0, start, stop - start).add_(1)
        assert count.min() == count.max() > 0, parameter.name

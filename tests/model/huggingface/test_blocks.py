"""The parts of all ranks are the published tensors, once."""

from __future__ import annotations

import pytest
import torch

from quantexp.config.compose import compose
from quantexp.model.huggingface.blocks import blocks_of, sources
from quantexp.model.huggingface.mapping import mapping, published
from quantexp.model.layout import Layout
from quantexp.model.shards import WHOLE, owners, shard_of
from tests.model.huggingface.layouts import LAYOUTS, MODELS, part_of


@pytest.mark.parametrize("case", ["one process", *LAYOUTS])
def test_blocks_of_the_ranks_make_every_published_tensor(case: str) -> None:
    """Parameters are concatenated rows of published tensors with distinct elements, and cut with plain indices."""
    family, layout = LAYOUTS.get(case, ("deepseek_v2", Layout()))
    model = MODELS[family]
    tensors = {name: torch.rand(source.shape) for name, source in sources(model).items()}
    gathered = {name: torch.full(x.shape, torch.nan) for name, x in tensors.items()}
    for parameter in mapping(model):
        name, shape = parameter.name, parameter.shape
        rows = [tensors[p.tensor][p.first : p.first + p.count] for p in parameter.parts]
        if parameter.padding:
            rows.append(tensors[name])
        for shard in owners(name, shape, model, layout, layout.model_places()):
            part = part_of(torch.cat(rows), shard)
            for block in blocks_of(parameter, shard):
                columns = slice(None) if block.columns is None else slice(*block.columns)
                place = gathered[block.tensor][block.first : block.first + block.count]
                place = place if block.columns is None else place[:, columns]
                assert place.isnan().all(), f"{block.tensor} has an element twice"
                place.copy_(part[block.part_row : block.part_row + block.count])
                assert block.numel == place.numel()
    for name, tensor in tensors.items():
        assert torch.equal(gathered[name], tensor), name


def test_published_tensors_come_first_in_their_order_and_then_the_paddings() -> None:
    model = MODELS["llama31"]
    names = list(sources(model))
    assert names[:-2] == list(published(mapping(model)))
    assert names[-2:] == ["embedding.word_embeddings.weight", "output_layer.weight"]


@pytest.mark.parametrize("family", MODELS)
def test_sources_are_the_blocks_of_whole_parameters(family: str) -> None:
    model = MODELS[family]
    listed = [block for source in sources(model).values() for block in source.blocks]
    assert sorted(map(repr, listed)) == sorted(
        repr(block) for parameter in mapping(model) for block in blocks_of(parameter, WHOLE)
    )
    for name, source in sources(model).items():
        assert {block.tensor for block in source.blocks} == {name}


def test_a_part_that_begins_within_the_padding_has_only_padding() -> None:
    parameter = next(p for p in mapping(MODELS["llama31"]) if p.padding)
    layout = Layout(tensor=4)
    shard = shard_of(parameter.name, parameter.shape, layout, layout.place(3))
    first, last = blocks_of(parameter, shard)
    assert (first.tensor, first.first, first.count) == ("model.embed_tokens.weight", 192, 9)
    assert (last.tensor, last.first, last.count, last.part_row) == (parameter.name, 0, 55, 9)
    layout = Layout(tensor=8)
    shard = shard_of(parameter.name, parameter.shape, layout, layout.place(7))
    (only,) = blocks_of(parameter, shard)
    assert (only.tensor, only.first, only.count, only.part_row) == (parameter.name, 23, 32, 0)


def test_a_whole_parameter_has_one_block_for_each_of_its_sources() -> None:
    for parameter in mapping(compose(["model=llama32-1b"], None, {}).model):
        assert len(list(blocks_of(parameter, WHOLE))) == len(parameter.rows)

"""The parts of all ranks are the published tensors, once."""

from __future__ import annotations

import pytest
import torch

from quantexp.config.compose import compose
from quantexp.model.huggingface.blocks import blocks_of, sources
from quantexp.model.huggingface.mapping import mapping, published
from quantexp.model.layout import Layout
from quantexp.model.shards import WHOLE, shard_of
from tests.model.huggingface.layouts import LAYOUTS, MODELS, part_of


@pytest.mark.parametrize("case", LAYOUTS)
def test_blocks_of_the_ranks_make_every_published_tensor(case: str) -> None:
    """Parameters are concatenated rows of published tensors with distinct elements, and cut with plain indices."""
    family, layout = LAYOUTS[case]
    model = MODELS[family]
    parameters = {parameter.name: parameter for parameter in mapping(model)}
    by_name = sources(model, layout)
    tensors = {name: torch.rand(source.shape) for name, source in by_name.items()}
    for name, source in by_name.items():
        gathered = torch.full(source.shape, torch.nan)
        for rank, blocks in source.blocks.items():
            for block in blocks:
                parameter = parameters[block.parameter]
                rows = [tensors[p.tensor][p.first : p.first + p.count] for p in parameter.parts]
                if parameter.padding:
                    rows.append(tensors[parameter.name])
                shard = shard_of(parameter.name, parameter.shape, layout, layout.place(rank))
                part = part_of(torch.cat(rows), shard)
                columns = slice(None) if block.columns is None else slice(*block.columns)
                place = gathered[block.first : block.first + block.count]
                place = place if block.columns is None else place[:, columns]
                assert place.isnan().all(), f"{name} has an element twice"
                place.copy_(part[block.part_row : block.part_row + block.count])
                assert block.numel == place.numel()
        assert torch.equal(gathered, tensors[name]), name


def test_published_tensors_come_first_in_their_order_and_then_the_paddings() -> None:
    model = MODELS["llama31"]
    names = list(sources(model, Layout()))
    assert names[:-2] == list(published(mapping(model)))
    assert names[-2:] == ["embedding.word_embeddings.weight", "output_layer.weight"]


def test_the_lowest_of_the_ranks_with_equal_parts_counts() -> None:
    """Ranks 0 and 2 hold the first half of each expert's columns, ranks 1 and 3 the second."""
    model, layout = MODELS["deepseek_v2"], Layout(data=2, tensor=2, expert_tensor=2)
    source = sources(model, layout)["model.layers.1.mlp.experts.3.down_proj.weight"]
    assert list(source.blocks) == [0, 1]


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

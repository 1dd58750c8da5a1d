"""What a rank writes of the training state, without a training; `test_state_in_layouts` trains."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quantexp.model.huggingface.mapping import mapping
from quantexp.model.layout import Layout
from quantexp.model.pieces import Piece
from quantexp.model.shards import WHOLE, expert_of, holds, shard_of
from quantexp.schema import ModelConfig
from quantexp.training.megatron.state_shards import Held, written_pieces
from tests.model.huggingface.layouts import LAYOUTS, MODELS


def held_by(rank: int, model: ModelConfig, layout: Layout, distributed: bool) -> dict[str, Held]:
    """A rank's pieces; a distributed optimizer divides a part evenly over the ranks that hold the same one."""
    place, held = layout.place(rank), {}
    for parameter in mapping(model):
        name, shape = parameter.name, parameter.shape
        if not holds(name, model, layout, place):
            continue
        shard = shard_of(name, shape, layout, place)
        size = torch.Size(shard.shape(shape)).numel()
        index, number = place.data * layout.context + place.context, layout.data * layout.context
        if expert_of(name) is not None:
            index, number = place.expert_data, layout.expert_data
        if not distributed:
            index, number = 0, 1
        piece = Piece(shape, shard, size * index // number, size * (index + 1) // number)
        held[name] = Held(piece, torch.empty(0), None)
    return held


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *LAYOUTS.values(),
        ("llama32", Layout(data=2, pipeline=2, tensor=2)),
        ("llama32", Layout(data=3, context=2)),
        ("deepseek_v2", Layout(data=4, tensor=2, expert=2, expert_tensor=1)),
        ("deepseek_v2", Layout(data=4, pipeline=2, expert=2)),
    ],
    ids=str,
)
def test_ranks_together_write_every_element_once(
    family: str, layout: Layout, distributed: bool
) -> None:
    model = MODELS[family]
    written = {each.name: torch.zeros(each.shape).view(-1) for each in mapping(model)}
    for rank in range(layout.num_processes):
        held = held_by(rank, model, layout, distributed)
        for name, each in written_pieces(held, model, layout, rank, distributed).items():
            for run in each.piece.runs():
                written[name][run.whole : run.end] += 1
    assert {name for name, count in written.items() if not (count == 1).all()} == set()


def adam(steps: int, main: torch.Tensor, kind: str) -> Any:
    """An Adam that has made some steps: torch's own, or one that counts as the fused ones do, in its groups."""
    if kind == "torch":
        optimizer: Any = torch.optim.AdamW([main])
        for _ in range(steps):
            main.grad = torch.full_like(main, 0.5)
            optimizer.step()
        return optimizer
    moments = {"exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
    group = {"params": [main]} | ({"step": steps} if steps else {})
    return SimpleNamespace(state={main: moments} if steps else {}, param_groups=[group])


@pytest.mark.parametrize("kind", ["torch", "fused"])
def test_moments_and_steps_go_from_one_adam_to_another(kind: str) -> None:
    mains = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    piece = Piece((3,), WHOLE, 0, 3)
    before, after = (
        Held(piece, main, adam(steps, main, kind))
        for main, steps in zip(mains, (5, 0), strict=True)
    )
    assert (before.steps, after.steps) == (5, 0)
    assert list(after.tensors()) == ["main"]
    moments = {name: x for name, x in before.tensors().items() if name != "main"}
    after.set_moments({name: x.clone() for name, x in moments.items()}, before.steps)
    assert after.steps == 5
    for name, tensor in moments.items():
        assert torch.equal(after.tensors()[name], tensor)


def test_each_parameter_counts_its_own_steps() -> None:
    """One tensor for two parameters would count twice."""
    mains = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    optimizer: Any = torch.optim.AdamW(mains)
    held = [Held(Piece((3,), WHOLE, 0, 3), main, optimizer) for main in mains]
    for each in held:
        moments = {"exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
        each.set_moments(moments, 5)
        each.main.grad = torch.ones(3)
    optimizer.step()
    assert [each.steps for each in held] == [6, 6]

"""The gradients of an embedding, an output layer and a router, against autograd."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantexp.proof.draws import Moment
from quantexp.proof.layer_pass import Claims
from quantexp.proof.matrix_border import router_borders, table_borders

V, H, B = 96, 64, 2


class _Output(nn.Module):
    """As Megatron-Core's output layer, which may have no weight of its own."""

    def __init__(self, tied: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        own = None if tied is not None else nn.Parameter(torch.randn(V, H).to(dtype) * 0.1)
        self.weight, self.tied = own, [tied]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        weight = self.tied[0] if self.weight is None else self.weight
        assert weight is not None
        return nn.functional.linear(x, weight), None


def _found(
    dtype: torch.dtype,
    *,
    tied: bool,
    length: int = 32,
    kinds: int = V,
    scale: float = 1.0,
    change: Callable[[Any], object] = lambda chunk: None,
) -> list[str]:
    """What is reported of two micro-batches of a model that embeds, multiplies and takes a cross entropy."""
    torch.manual_seed(length + kinds)
    table = nn.Embedding(V, H, dtype=dtype)
    output = _Output(table.weight if tied else None, dtype)
    chunk = SimpleNamespace(
        embedding=SimpleNamespace(word_embeddings=table),
        output_layer=output,
        share_embeddings_and_output_weights=tied,
        pre_process=True,
        post_process=True,
    )
    found: list[str] = []
    now = [Moment(1, 1)]
    parameters = list({id(p): p for p in (*table.parameters(), *output.parameters())}.values())
    for parameter in parameters:
        parameter.main_grad = torch.zeros(parameter.shape)  # type: ignore[attr-defined]
    change(chunk)
    borders = list(table_borders(chunk, lambda: now[0], Claims(found.append), True))
    for border in borders:
        border.__enter__()
    for index in range(2):
        now[0] = Moment(1, 1, index, index)
        tokens = torch.randint(0, kinds, (B, length))
        x = table(tokens)
        logits = output(x)[0]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        if scale > 1:
            loss = loss + (x * torch.randn_like(x)).float().mean()
        (loss * scale).backward()
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.main_grad += parameter.grad  # type: ignore[attr-defined]
                parameter.grad = None
    for border in borders:
        border.__exit__(None)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("length", "kinds"), [(1, V), (32, V), (512, V), (512, 2)])
def test_gradients_of_autograd_are_right(
    dtype: torch.dtype, tied: bool, length: int, kinds: int
) -> None:
    assert _found(dtype, tied=tied, length=length, kinds=kinds) == []


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("power", range(20, 32, 2))
def test_sums_that_leave_fp16_on_the_way_are_not_accused(tied: bool, power: int) -> None:
    """A part of a sum may be infinite where the sum is not, or have another sign; so may one part of a tied weight."""
    assert _found(torch.float16, tied=tied, length=512, kinds=8, scale=2.0**power) == []


@pytest.mark.parametrize("tied", [True, False])
def test_other_gradients_are_named(tied: bool) -> None:
    def halve(chunk: Any) -> None:
        for weight in (chunk.embedding.word_embeddings.weight, chunk.output_layer.weight):
            if weight is not None:
                weight.register_hook(lambda g: g / 2)

    found = _found(torch.float32, tied=tied, change=halve)
    assert len(found) == (1 if tied else 2)
    assert all("are not those of its module's passes, in micro-batch 0" in each for each in found)


def test_a_tied_table_without_its_own_part_is_named() -> None:
    def detach(chunk: Any) -> None:
        chunk.embedding.word_embeddings.register_forward_hook(lambda m, a, y: y.detach())

    found = _found(torch.float32, tied=True, change=detach)
    assert "the gradient of the embedding did not come" in found[0]


def test_a_weight_whose_gradient_is_added_inside_of_the_product_is_left_out() -> None:
    def fuse(chunk: Any) -> None:
        vars(chunk.output_layer)["gradient_accumulation_fusion"] = True
        chunk.output_layer.weight.register_hook(torch.zeros_like)

    assert _found(torch.float32, tied=False, change=fuse) == []


class _Router(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, H).to(dtype))

    def gating(self, x: Tensor) -> Tensor:
        return x.float() @ self.weight.float().t()

    def forward(self, x: Tensor) -> Tensor:
        return self.gating(x).softmax(-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_gradient_of_a_router_is_that_of_its_logits(dtype: torch.dtype, sign: float) -> None:
    torch.manual_seed(1)
    layer = nn.Module()
    layer.router = _Router(dtype)
    layer.router.weight.register_hook(lambda g: sign * g)
    found: list[str] = []
    moment = Moment(1, 1)
    (border,) = router_borders("layer 0", layer, lambda: moment, Claims(found.append), False)
    plain = layer.router.gating
    with border:
        layer.router(torch.randn(64, B, H, dtype=dtype)).square().sum().backward()
    assert layer.router.gating == plain
    words = "the router's weight are not those of its module's passes"
    assert [words in each for each in found] == ([] if sign > 0 else [True])

"""The gradients of gains and biases, against autograd in every dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from quantexp.proof.draws import Moment
from quantexp.proof.layer_pass import Claims
from quantexp.proof.vector_border import VectorBorder, vector_borders

D = 64


class _Layer(nn.Module):
    """A norm, and a linear layer that adds its bias itself."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(D, eps=1e-5)
        self.linear_qkv = nn.Linear(D, D)
        vars(self.linear_qkv)["skip_bias_add"] = False
        self.to(dtype)


def _watched(
    layer: _Layer, inputs: list[Tensor], change: Callable[[Tensor], Tensor] | None = None
) -> list[str]:
    """What is reported of passes of a layer; `change` is made of the gradients before they are added."""
    found: list[str] = []
    now = [Moment(1, 1)]
    claims = Claims(found.append)
    borders: list[VectorBorder] = list(
        vector_borders("layer 0", layer, lambda: now[0], claims, True)
    )
    assert len(borders) == 2
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)  # type: ignore[attr-defined]
    for border in borders:
        border.__enter__()
    for index, x in enumerate(inputs):
        now[0] = Moment(1, 1, index, index)
        y = layer.linear_qkv(layer.input_layernorm(x))
        (y * torch.randn_like(y)).sum().backward()
        for parameter in layer.parameters():
            assert parameter.grad is not None
            own = parameter.grad if change is None else change(parameter.grad)
            parameter.main_grad += own  # type: ignore[attr-defined]
            parameter.grad = None
    for border in borders:
        border.__exit__(None)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 64, 4096])
@pytest.mark.parametrize("kinds", [1, 7, 4096])
def test_gradients_of_autograd_are_right_also_where_rows_repeat(
    dtype: torch.dtype, rows: int, kinds: int
) -> None:
    torch.manual_seed(rows + kinds)
    table = torch.randn(kinds, D, dtype=dtype) * 0.02
    inputs = [table[torch.randint(0, kinds, (rows, 1))] for _ in range(2)]
    assert _watched(_Layer(dtype), inputs) == []


@pytest.mark.parametrize("size", [1e-30, 1e-4, 1e18, 1e25, 1e37])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_any_size_are_not_accused(dtype: torch.dtype, size: float) -> None:
    """Squares of large rows leave float32; of such nothing is known."""
    torch.manual_seed(1)
    assert _watched(_Layer(dtype), [torch.randn(64, D, dtype=dtype) * size]) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_half_of_a_gradient_is_named(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    layer = _Layer(dtype)
    for parameter in (layer.input_layernorm.weight, layer.linear_qkv.bias):
        parameter.register_hook(lambda g: g / 2)
    found = _watched(layer, [torch.randn(4096, 1, D, dtype=dtype)])
    assert len(found) == 2
    assert any("the norm before attention's gain are not those of its" in each for each in found)
    assert any("linear_qkv's bias are not those of its" in each for each in found)


def test_what_is_not_added_to_the_main_gradient_is_named() -> None:
    torch.manual_seed(1)
    inputs = [torch.randn(32, 1, D) for _ in range(2)]
    found = _watched(_Layer(torch.float32), inputs, lambda g: g * 1.01)
    assert found
    assert all("are not added to the main gradient" in each for each in found)
    assert {each[-1] for each in found} == {"0"}

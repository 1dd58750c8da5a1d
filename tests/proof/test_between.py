"""The formulas between the modules: torch's and Megatron-Core's are within the bounds, others are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from torch import Tensor
from torch.nn import functional

from quantexp.proof.between import Activation, Norm, Rotation, total
from quantexp.proof.products import Reference, num_wrong

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Of activations and gradients: small as behind a loss scale of 1, and large as in a run that diverges.
SIZES = (1e-6, 1e-2, 1.0, 100.0)
EPS = 1e-5


def _random(*extents: int, dtype: torch.dtype, size: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*extents, generator=generator) * size).to(dtype)


def _require_bounds(own: Tensor, expected: Reference) -> None:
    """What was computed is right; the same with one element a tenth of the row's norm away is not."""
    assert num_wrong(own, expected) == 0
    other = own.clone().flatten(0, -2)
    other[3, 5] += 0.1 * other[3].float().norm().to(other.dtype)
    assert num_wrong(other.view(own.shape), expected) == 1


def _taken_back(
    function: Callable[[Tensor], Tensor], x: Tensor, size: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, its gradient, and that of x."""
    x = x.clone().requires_grad_()
    y = function(x)
    g = _random(*y.shape, dtype=y.dtype, size=size, seed=7)
    (gradient,) = torch.autograd.grad(y, x, g)
    return y.detach(), g, gradient


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_norm(size: float, dtype: torch.dtype) -> None:
    module = torch.nn.RMSNorm(96, EPS).to(dtype)
    module.weight.data = _random(96, dtype=dtype, size=0.5, seed=1) + 1
    x = _random(32, 96, dtype=dtype, size=size, seed=2)
    y, g, gradient = _taken_back(module, x, size)
    norm = Norm(x, module.weight.detach(), EPS)
    _require_bounds(y, norm.forward())
    if dtype is not torch.float16 or size >= 1e-2:
        _require_bounds(gradient, norm.back(g))
    assert num_wrong(gradient, norm.back(g)) == 0


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_activation(size: float, dtype: torch.dtype, *, is_gated: bool) -> None:
    def function(y: Tensor) -> Tensor:
        if not is_gated:
            return functional.gelu(y)
        gate, up = y.chunk(2, dim=-1)
        return functional.silu(gate) * up

    y = _random(32, 192, dtype=dtype, size=size, seed=3)
    x, g, gradient = _taken_back(function, y, 1.0)
    activation = Activation(y, functional.silu if is_gated else functional.gelu, is_gated)
    if dtype is not torch.float16 or size >= 1e-2:
        _require_bounds(x, activation.forward(dtype))
    assert num_wrong(x, activation.forward(dtype)) == 0
    _require_bounds(gradient, activation.back(g))
    factor = _random(32, 1, dtype=torch.float32, size=1.0, seed=4).abs()
    weighted = (x * factor).to(dtype)
    assert num_wrong(weighted, activation.forward(dtype, factor)) == 0


def test_a_row_that_overflowed_leaves_the_bounds_of_the_others() -> None:
    """Behind a large loss scale gradients of some tokens are infinite, and others' products with tiny activations lose
    what is below fp16's normal numbers.
    """
    y = _random(32, 192, dtype=torch.float16, size=1e-4, seed=3).requires_grad_()
    gate, up = y.chunk(2, dim=-1)
    g = _random(32, 96, dtype=torch.float16, size=1e3, seed=4)
    g[2, :90] = torch.inf
    (gradient,) = torch.autograd.grad(functional.silu(gate) * up, y, g)
    assert num_wrong(gradient, Activation(y.detach(), functional.silu, True).back(g)) == 0


@pytest.mark.parametrize("width", [32, 16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_rotation(dtype: torch.dtype, width: int, *, is_interleaved: bool) -> None:
    angles = torch.outer(torch.arange(48.0), 10000 ** -(torch.arange(0, width, 2) / width))
    whole = (
        torch.cat([angles, angles], -1) if not is_interleaved else angles.repeat_interleave(2, -1)
    )
    whole = whole[:, None, None]

    def function(t: Tensor) -> Tensor:
        return _apply_rotary_pos_emb_bshd(t, whole, is_interleaved)

    t = _random(48, 1, 4, 32, dtype=dtype, size=1.0, seed=5)
    y, g, gradient = _taken_back(function, t, 1e-3)
    rotation = Rotation(whole[:, 0], is_interleaved)
    _require_bounds(y[:, 0], rotation.forward(t[:, 0]))
    _require_bounds(gradient[:, 0], rotation.back(g[:, 0]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_of_latent_attention(dtype: torch.dtype) -> None:
    angles = torch.outer(torch.arange(48.0), 10000 ** -(torch.arange(0, 32, 2) / 32))
    whole = torch.cat([angles, angles], -1)[:, None, None]

    def function(t: Tensor) -> Tensor:
        return _apply_rotary_pos_emb_bshd(t, whole, multi_latent_attention=True, mscale=1.25)

    t = _random(48, 1, 4, 32, dtype=dtype, size=1.0, seed=5)
    y, g, gradient = _taken_back(function, t, 1e-3)
    rotation = Rotation(whole[:, 0], is_interleaved=False, is_latent=True, magnitude=1.25)
    _require_bounds(y[:, 0], rotation.forward(t[:, 0]))
    _require_bounds(gradient[:, 0], rotation.back(g[:, 0]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum(dtype: torch.dtype) -> None:
    parts = [_random(32, 96, dtype=dtype, size=size, seed=6) for size in (1.0, 0.1, 10.0)]
    _require_bounds(parts[0] + parts[1] + parts[2], total(*parts))

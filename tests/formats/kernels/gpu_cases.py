"""Cases for comparing the GPU kernels with the torch code: interpreted on a CPU, and compiled on a GPU."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.formats.families import quantise_flat, quantise_mx, tensor_scale
from quantexp.formats.layout import outer_axis_inner
from quantexp.formats.spec import QuantSpec, resolve
from quantexp.formats.types import Family, ScaleRule

from ..tensors import assert_same, every_value  # noqa: TID252

#: Calls a function of `kernels.gpu` in some environment; returns its result, or its arguments if it has none.
Call = Callable[..., Any]

#: Where the dev extra does not install Triton; elsewhere a missing Triton is a failure.
needs_triton = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"),
    reason="Triton is for Linux on x86-64",
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
MX = ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4_e2m1"]
RULES = [rule.value for rule in ScaleRule]
HIF8 = [
    resolve("hifp8", saturate=saturate, scaling=scaling, rounding=rounding)
    for saturate in (True, False)
    for scaling in ("none", "current", "exact")
    for rounding in ("away", "even")
]
#: Shapes and the axis of blocks: whole and short blocks, odd and even extents, one and more axes inside and outside.
SHAPES = [
    ((), 0),
    ((1,), 0),
    ((31,), 0),
    ((33,), 0),
    ((64,), 0),
    ((7, 32), 1),
    ((70, 96), 1),
    ((5, 70), 1),
    ((3, 37, 45), 2),
    ((3, 37, 45), 1),
    ((37, 3, 46), 0),
    ((2, 40, 300), 1),
    ((65, 1), 0),
    ((1, 65), 0),
    ((2, 1, 33), 1),
    ((0, 32), 1),
    ((32, 0), 0),
]
#: The same for both copies at once; the axis is that of the columns.
BOTH_SHAPES = [
    ((64, 64), 0),
    ((33, 47), 0),
    ((33, 46), 0),
    ((70, 300), 0),
    ((2, 37, 96), 1),
    ((37, 2, 96), 0),
    ((37, 3, 50), 0),
    ((3, 37, 2, 45), 1),
    ((1, 5), 0),
    ((5, 1), 0),
    ((0, 32), 0),
]


def spread(dtype: torch.dtype) -> Tensor:
    """Every value of a 16-bit dtype once, 32 x 2048; neighbours in a block of 32, either way, are 64 patterns apart.

    In bfloat16 that is half a binade, so that a block has values of every element's whole range, and smaller ones.
    """
    row, high, low, step = torch.meshgrid(
        *(torch.arange(n) for n in (32, 32, 2, 32)), indexing="ij"
    )
    patterns = high * 2048 + (row + step) % 32 * 64 + row * 2 + low
    return every_value(dtype)[patterns].view(32, 2048)


def mixed(dtype: torch.dtype) -> Tensor:
    """Every value of a 16-bit dtype in random order, 32 x 2048."""
    order = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(5))
    return every_value(dtype)[order].view(32, 2048)


def hard_float32(rows: int) -> Tensor:
    """Blocks of 32: random bits, and every binade from the subnormals to the largest, at and beside ties and ends."""
    generator = torch.Generator().manual_seed(6)
    bits = torch.randint(-(2**31), 2**31, (rows, 32), generator=generator).to(torch.int32)
    near = torch.randint(0, 256, (rows, 1), generator=generator)
    below = torch.randint(0, 20, (rows, 32), generator=generator)
    exponent = (near - below).clamp(0, 254)
    # mantissas whose last kept bits are random, followed by a half, or just less or just more
    mantissa = torch.randint(0, 16, (rows, 32), generator=generator) << 19
    mantissa += torch.randint(-1, 2, (rows, 32), generator=generator)
    sign = torch.randint(0, 2, (rows, 32), generator=generator) << 31
    ties = ((exponent << 23) + (mantissa & 0x7FFFFF)) | sign
    ties = torch.where(ties >= 1 << 31, ties - (1 << 32), ties).to(torch.int32)
    return torch.cat([bits, ties]).view(torch.float32)


def amax_at_ends() -> Tensor:
    """float32 blocks whose amax is a power of two times 1 or max / 2^emax, or next to either; and two of zeros."""
    largest = torch.tensor([1.0, 1.75, 1.5, 1.875, 2 - 2**-4, 2 - 2**-5, 2 - 2**-2, 2 - 2**-3])
    beside = torch.cat([largest.view(torch.int32) + step for step in (-1, 0, 1)]).view(
        torch.float32
    )
    exponents = torch.arange(-149, 128).double()
    amax = (beside.double()[None] * exponents.exp2()[:, None]).flatten().float()
    amax = amax[amax.isfinite()]
    x = amax[:, None] * torch.linspace(-1, 1, 32)[None]
    x[:, 5], x[:, 6], x[:, 7] = amax, 0.0, -0.0
    zeros = torch.zeros(2, 32)
    zeros[1] = -0.0
    return torch.cat([x, zeros])


def much_float32() -> Tensor:
    """The two above, 32 x 23008: as blocks along either axis."""
    x = torch.cat([amax_at_ends(), hard_float32(8192)])
    return x[: len(x) // 32 * 32].reshape(32, -1)


def noise(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Normal numbers of magnitudes that vary from block to block, with a few NaN, Inf and -0."""
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    x = (
        torch.randn(shape, generator=generator)
        * torch.randn(shape, generator=generator).mul(4).exp2()
    )
    flat = x.view(-1)
    flat[7::97], flat[3::89], flat[11::83] = torch.nan, -torch.inf, -0.0
    return x.to(dtype)


def mx(fmt: str, rule: str, rounding: str = "even") -> QuantSpec:
    return resolve(fmt, scale_rule=rule, rounding=rounding)


def reference(x: Tensor, options: QuantSpec, axis: int, scale: Tensor | None = None) -> Tensor:
    """The result of torch's own code, whichever kernels this machine has."""
    y = torch.empty_like(x)
    if options.fmt.family is Family.MX:
        extents = outer_axis_inner(x.shape, axis)
        quantise_mx(x.view(extents), y.view(extents), options)
    else:
        quantise_flat(x.view(-1), y.view(-1), options, scale)
    return y


def check(call: Call, x: Tensor, options: QuantSpec, axis: int, amax: Tensor | None = None) -> None:
    scale = tensor_scale(x, options, amax)
    poison = torch.full_like(x, 3.0)
    y = call("quantise", x, poison, options, axis, scale)[1]
    assert y.dtype == x.dtype
    assert_same(y, reference(x, options, axis, scale))


def check_both(call: Call, x: Tensor, options: QuantSpec, axis: int = 0) -> None:
    poison = torch.full_like(x, 3.0)
    _, columns, rows, *_ = call("quantise_both", x, poison, poison.clone(), options, axis)
    assert_same(columns, reference(x, options, axis))
    assert_same(rows, reference(x, options, x.ndim - 1))


def words(options: QuantSpec) -> str:
    """HiF8's options, for the name of a test."""
    saturates = "saturating" if options.saturate else "infinite"
    return f"{options.scaling}-{options.rounding}-{saturates}"

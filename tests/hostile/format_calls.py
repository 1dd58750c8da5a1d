"""Random calls of the functions of `quantexp.formats`, and the comparison of their results."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantexp.formats import (
    FORMATS,
    QuantSpec,
    decode,
    encode,
    finite_amax,
    hadamard,
    lies_on_grid,
    quantise,
    quantise_both,
    resolve,
    saturated,
    scales_of,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CHOICES: dict[str, tuple[Any, ...]] = {
    "block": (1, 2, 16, 32, 64),
    "scale_rule": ("floor", "rceil", "ceil", "even"),
    "rounding": ("even", "away"),
    "saturate": (True, False),
    "scaling": ("none", "current", "exact"),
    "pre_scale": (True, False),
}


@dataclass(frozen=True)
class Call:
    """A function of one tensor, for `repr` in a failure."""

    name: str
    spec: QuantSpec
    axis: int
    seed: int | None = None

    def __call__(self, x: Tensor) -> Any:
        return CALLS[self.name](x, self)


def _decoded(x: Tensor, call: Call) -> Tensor:
    codes, scales = encode(x, call.spec, axis=call.axis, seed=call.seed)
    return decode(codes, scales, call.spec, axis=call.axis)


def _both(x: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    return quantise_both(x, call.spec, axes=(call.axis, -1), seed=call.seed)


CALLS: dict[str, Callable[[Tensor, Call], Any]] = {
    "quantise": lambda x, call: quantise(x, call.spec, axis=call.axis, seed=call.seed),
    "quantise_both": _both,
    "encode": lambda x, call: encode(x, call.spec, axis=call.axis, seed=call.seed),
    "decode": _decoded,
    "finite_amax": lambda x, _: finite_amax(x),
    "scales_of": lambda x, call: scales_of(x, call.spec, axis=call.axis),
    "saturated": lambda x, call: saturated(x, call.spec, axis=call.axis),
    "lies_on_grid": lambda x, call: lies_on_grid(x, call.spec, axis=call.axis),
    "hadamard": lambda x, call: hadamard(x, axis=call.axis, block=32),
}
WITH_CODES = ("encode", "decode", "scales_of")


def any_call(case: random.Random, ndim: int, *names: str) -> Call:
    """A function with a format, random options and an axis."""
    name = case.choice(names or tuple(CALLS))
    fmt = case.choice([f for f in FORMATS if f != "bf16" or name not in WITH_CODES])
    options: dict[str, Any] = {
        option: case.choice(values)
        for option, values in CHOICES.items()
        if option in FORMATS[fmt].options and case.random() < 0.5
    }
    seed = None
    takes_seed = name in ("quantise", "quantise_both", "encode", "decode")
    if takes_seed and "seed" in FORMATS[fmt].options and case.random() < 0.2:
        options["rounding"], seed = "stochastic", case.randrange(2**64)
    axis = case.randrange(-max(ndim, 1), max(ndim, 1))
    return Call(name, resolve(fmt, **options), axis, seed)


def any_shape(case: random.Random, most: int = 70) -> tuple[int, ...]:
    """Up to four axes, some of one or no element."""
    extents = [0, 1, 1, 2, 3, 17, 32, 33, most]
    shape = tuple(case.choice(extents) for _ in range(case.randrange(5)))
    return shape if torch.Size(shape).numel() <= 1 << 16 else shape[:2]


def any_values(case: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Values of one magnitude, of all magnitudes, of subnormal size, or with NaN and Inf."""
    generator = torch.Generator().manual_seed(case.randrange(2**32))
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    kind = case.choice(("normal", "tiny", "wild", "special"))
    if kind == "tiny":
        x *= 2.0 ** case.randrange(-150, -110)
    elif kind == "wild":
        x *= torch.exp2(torch.randint(-149, 127, shape, generator=generator).double())
    result = x.to(dtype)
    if kind == "special" and result.numel():
        flat = result.view(-1)
        for value in (float("nan"), float("inf"), -float("inf"), -0.0):
            flat[case.randrange(flat.numel())] = value
    return result


def bits(result: Any) -> list[Tensor]:
    """The tensors of a result as bits; every NaN has the same."""
    return [_bits(leaf.detach()) for leaf in pytree.tree_leaves(result)]


def _bits(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x
    x = torch.where(x.isnan(), torch.full_like(x, float("nan")), x).contiguous()
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def assert_same_result(actual: Any, expected: Any, why: object) -> None:
    """Equal bit for bit, and in shape and dtype."""
    ours, theirs = bits(actual), bits(expected)
    assert len(ours) == len(theirs), why
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype, why
        assert torch.equal(a, b), why

"""Cases for the GPU kernel of `triton_panels`: interpreted on a CPU, and compiled on a GPU, against the torch code."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from quantexp.formats import (
    Format,
    Place,
    Transform,
    quantise,
    quantise_transformed,
    random_signs,
    resolve,
)
from quantexp.formats.definitions.definition import declared_format
from quantexp.formats.families import tensor_scale
from quantexp.formats.kernels import gpu, torch_alone
from quantexp.formats.layout import Draw
from quantexp.formats.spec import QuantSpec

from ..tensors import assert_same  # noqa: TID252
from .builds import wild
from .gpu_cases import Call
from .test_cpu_blocks import DECLARED, EVERY, SHIPPED, specs_of

CPU = torch.device("cpu")
#: The sides of blocks that are no powers of two, and what takes their place here.
_SIDES = {5: 8, 24: 32, 40: 64, 48: 64}
#: Formats with every kind and rule of scale, and every kind of element that the kernel rounds.
NAMES = [*EVERY, *SHIPPED, *DECLARED]
#: Whole and short blocks, odd and even extents, more and fewer than a tile.
SHAPES = [
    (),
    (1,),
    (31,),
    (1000,),
    (7, 100),
    (130, 17),
    (64, 1),
    (33, 2100),
    (5, 33, 3),
    (2, 2, 40, 8),
]


def declared(name: str) -> Format:
    """A format of `DECLARED` whose blocks have sides that are powers of two."""
    content = dict(DECLARED[name])
    block = content["block"]
    sides = [_SIDES.get(side, side) for side in (block if isinstance(block, list) else [block])]
    content["block"] = sides if isinstance(block, list) else sides[0]
    return declared_format(name, content)


def cases_of(name: str) -> list[tuple[QuantSpec, dict[str, Any]]]:
    """The options of a format that the kernel can do, with seed and offset; HiF8 to nearest has another kernel."""
    if name not in DECLARED:
        specs = [each for each in specs_of(name) if gpu.claims_spec(each[0])]
        return [each for each in specs if name != "hifp8" or each[1]]
    fmt, draw = declared(name), {"seed": 2**63 + 5, "offset": 2**40 + 3}
    return [
        (resolve(fmt, rounding=rounding), draw if rounding == "stochastic" else {})
        for rounding in ("even", "away", "stochastic")
    ]


#: Those of which the kernel writes both copies from one read.
BOTH = [
    name
    for name, (spec, _) in ((name, cases_of(name)[0]) for name in NAMES)
    if spec.fmt.block is not None and spec.fmt.across == 1 and spec.block <= 128
]


def has_axis(x: Tensor, spec: QuantSpec) -> bool:
    """Whether x has blocks of such a format."""
    return spec.fmt.across == 1 or x.ndim in (1, 2)


def check(
    call: Call,
    x: Tensor,
    spec: QuantSpec,
    axis: int,
    draw: dict[str, Any],
    place: Place | None = None,
    transform: Transform | None = None,
) -> None:
    """The kernel's result is the torch code's; after a transform, whose amax the kernel finds."""
    amax = None
    with torch_alone():
        if transform is None:
            expected = quantise(x, spec, axis=axis, place=place, **draw)
        else:
            expected = quantise_transformed(x, spec, transform, axis=axis, place=place, **draw)
    if transform is not None and spec.is_scaled:
        amax_bits = torch.zeros((), dtype=torch.int32)
        amax = call("raise_to_amax_of_transform", x, amax_bits, axis, transform)[1]
        amax = amax.view(torch.float32)
    scale = tensor_scale(x, spec, amax)
    drawn = Draw(draw["seed"], draw["offset"], place) if draw else None
    y = torch.full_like(x, 3.0)
    result = call("quantise_panels", x, y, None, spec, axis, scale, drawn, transform)
    assert_same(result[1], expected)


def check_both(call: Call, x: Tensor, spec: QuantSpec, axis: int) -> None:
    """Both copies are those of two calls; the first in the place of x."""
    with torch_alone():
        expected = [quantise(x, spec, axis=each) for each in (axis, -1)]
        scale = tensor_scale(x, spec, None)
    result = call("quantise_panels", x, x, torch.zeros_like(x), spec, axis, scale, None, None)
    for got, wanted in zip(result[1:3], expected, strict=True):
        assert_same(got, wanted)


def transforms(dtype: torch.dtype) -> list[tuple[Tensor, int, Transform]]:
    """Tensors with whole and short blocks of a transform, its axis, with random signs and without."""
    shapes = [(150, 40), (3, 64, 13), (1, 77)]
    return [
        (wild(dtype, *shape, spread=1.0), axis, Transform(block, signs, signs is not None))
        for shape, block in itertools.product(shapes, (2, 16, 128))
        for axis in range(len(shape))
        for signs in (None, random_signs(block, 7, 8, CPU))
    ]

"""The GPU kernel for blocks of any shape, scale and element against the torch code, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch

from quantexp.formats import Place, Transform
from quantexp.formats.definitions.definition import declared_format
from quantexp.formats.kernels import gpu
from quantexp.formats.spec import resolve

from ..tensors import every_value  # noqa: TID252
from . import panel_cases as cases
from .builds import wild
from .gpu_cases import Call, hard_float32, needs_triton
from .test_cpu_blocks import DECLARED

pytestmark = needs_triton
Interpreter = Callable[[str], AbstractContextManager[Call]]


@pytest.fixture(scope="module")
def call(triton_interpreter: Interpreter) -> Iterator[Call]:
    """Call a function of the kernel's module in the interpreter, which is quick if tiles are large."""
    with triton_interpreter("quantexp.formats.kernels.gpu_panels") as request:
        yield lambda *arguments, **more: request(*arguments, **{"_TILE": 1 << 16, **more})


@pytest.mark.parametrize("name", cases.NAMES)
def test_every_option_of_every_format(call: Call, name: str) -> None:
    x = wild(torch.bfloat16, 33, 132)
    for spec, draw in cases.cases_of(name):
        for axis in (0, 1):
            cases.check(call, x, spec, axis, draw)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("nvfp4", torch.bfloat16),
        ("fp8_128x128", torch.float16),
        ("fp8_e4m3", torch.float32),
        ("ceil of bf16", torch.float32),
    ],
)
def test_every_shape_and_axis(call: Call, name: str, dtype: torch.dtype) -> None:
    for shape in cases.SHAPES:
        x = wild(dtype, *shape)
        for spec, draw in (cases.cases_of(name)[0], cases.cases_of(name)[-1]):
            for axis in range(len(shape) or 1):
                if cases.has_axis(x, spec):
                    cases.check(call, x, spec, axis, draw)


@pytest.mark.parametrize("name", cases.NAMES)
def test_ties_and_ends_of_float32(call: Call, name: str) -> None:
    x = hard_float32(64)
    for spec, draw in (cases.cases_of(name)[0], cases.cases_of(name)[-1]):
        cases.check(call, x, spec, 1, draw)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", cases.NAMES)
def test_every_16_bit_value(call: Call, name: str, dtype: torch.dtype) -> None:
    for spec, draw in cases.cases_of(name):
        for shape, axis in (((-1, 256), 1), ((256, -1), 0)):
            cases.check(call, every_value(dtype).view(shape), spec, axis, draw)


@pytest.mark.parametrize(
    ("name", "dtype"), [("mxfp4", torch.float32), ("nvfp4", torch.bfloat16)], ids=str
)
def test_transforms_with_whole_and_short_blocks(call: Call, name: str, dtype: torch.dtype) -> None:
    for index, (x, axis, transform) in enumerate(cases.transforms(dtype)):
        spec, draw = cases.cases_of(name)[-1 if index % 2 else 0]
        cases.check(call, x, spec, axis, draw, transform=transform)


@pytest.mark.parametrize("name", cases.BOTH)
def test_both_copies(call: Call, name: str) -> None:
    spec, _ = cases.cases_of(name)[0]
    for shape, axis in [((130, 200), 0), ((64, 2, 72), 0), ((3, 37, 50), 1), ((2, 37, 3, 45), 1)]:
        cases.check_both(call, wild(torch.bfloat16, *shape), spec, axis)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "fp8_e4m3", "hifp8", "nvfp4_16x16"])
def test_a_part_takes_the_numbers_of_its_place(call: Call, name: str) -> None:
    """Also where its rows begin between two counters."""
    spec, draw = cases.cases_of(name)[-1]
    for start, shape in (((3, 5), (40, 60)), ((0, 998), (90, 3)), ((89, 0), (1, 1001))):
        for axis in (0, 1):
            x = wild(torch.bfloat16, *shape)
            cases.check(call, x, spec, axis, draw, Place((90, 1001), start))


def test_numbers_of_positions_beyond_32_bits(call: Call) -> None:
    spec, draw = cases.cases_of("mxfp4")[-1]
    place = Place((1 << 18, 1 << 18), ((1 << 17) + 1, (1 << 17) + 2))
    cases.check(call, wild(torch.bfloat16, 8, 64), spec, 1, draw, place)


@pytest.mark.parametrize(
    ("shape", "axis"), [((5, 40, 70), 1), ((200, 45), 0), ((3, 20, 45), 2), ((7000,), 0)]
)
def test_more_tiles_than_one(call: Call, shape: tuple[int, ...], axis: int) -> None:
    x, (spec, draw) = wild(torch.bfloat16, *shape), cases.cases_of("nvfp4")[-1]
    cases.check(lambda *arguments: call(*arguments, _TILE=512), x, spec, axis, draw)


def test_what_the_kernel_cannot_do_is_left_to_torch() -> None:
    """Sides of blocks that are no powers of two, and what no compiled code does."""
    for name, content in DECLARED.items():
        sides = content["block"] if isinstance(content["block"], list) else [content["block"]]
        is_claimed = all(side == "tensor" or side & (side - 1) == 0 for side in sides)
        assert gpu.claims_spec(resolve(declared_format(name, content))) is is_claimed, name
        assert gpu.claims_spec(resolve(cases.declared(name)))
    searched = {"element": "e2m1", "block": 16, "scale": "e4m3", "candidates": [6, 4]}
    assert not gpu.claims_spec(resolve(declared_format("it", searched)))
    assert not gpu.claims_spec(resolve("bf16"))
    assert not gpu.claims(torch.ones(8, 64), resolve("mxfp4"), Transform(16)), "not on a GPU"

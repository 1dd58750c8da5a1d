"""The Triton attention kernels against the torch tiles, in Triton's interpreter.

S is a float32 sum of 32 products on both sides, in different orders: its error is 32 2^-24 of its terms, and the
spacing of bfloat16 is 2^-8, so one score in some thousands is rounded to its other neighbour and changes its p by a
part in 2^7 or less. Where that decides a step of P's or dS's grid (2^-3 in e4m3, 2^-1 in e2m1), one element in 2^4 or
2^6 of those moves to the next: 2^-14 of all by 2^-3, or 2^-16 by 2^-1, at most 2^-9 in the root mean square. With 16
bits alone, the other neighbour for one element in 2^10 is 2^-13.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.quant import sites
from quantexp.quant.attention import tile_products, tiles
from quantexp.quant.attention.kernels.agreement import BOUND
from quantexp.quant.step_state import StepState, use_step_state

from .tiled_cases import (
    FULL_HIFP8,
    FULL_MXFP8,
    SCHEMES,
    Result,
    by_tiles,
    declared,
    documents,
    far,
    operands,
)

pytestmark = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"),
    reason="Triton is for Linux on x86-64",
)
NEAR = 2.0**-9
FULL_MXFP4 = tuple(word.replace("mxfp8", "mxfp4") for word in FULL_MXFP8)
#: Slots that are quantised alone, where the product's other operand need not be.
EXACT = (
    "quant=bf16",
    "quant.pv.fprop.P={format: hifp8, scaling: exact}",
    "quant.qk.dgrad_q.dS={format: hifp8, scaling: none, saturate: false}",
    "quant.qk.dgrad_k.dS={format: hifp8, scaling: exact, rounding: even}",
)
MIXED = (
    "quant=bf16",
    "quant.pv.fprop.P={format: mxfp8_e5m2, scale_rule: floor}",
    "quant.pv.dgrad_v.P={format: mxfp6_e2m3, scale_rule: ceil}",
    "quant.qk.dgrad_q.dS={format: mxfp6_e3m2, scale_rule: even}",
    "quant.qk.dgrad_k.dS={format: mxfp4, rounding: away}",
)
FORMATS = {
    "bf16": SCHEMES["bf16"],
    "mxfp8": FULL_MXFP8,
    "hifp8": FULL_HIFP8,
    "mxfp4, P again": SCHEMES["mxfp4, P again"],
    "hifp8, exact and unscaled": EXACT,
    "mx mixed": MIXED,
    "3/4 of what is whole": (
        "quant=bf16",
        "quant.pv.fprop.v={format: mxfp4, pre_scale: true}",
        "quant.pv.dgrad_p.dO={format: mxfp4, pre_scale: true}",
        "quant.pv.dgrad_v.dO={format: mxfp4, pre_scale: true}",
        "quant.qk.fprop.q={format: mxfp4, pre_scale: true}",
        "quant.qk.dgrad_q.k={format: mxfp4, pre_scale: true}",
        "quant.qk.dgrad_k.q={format: mxfp4, pre_scale: true}",
    ),
}
Call = Callable[..., Any]


@pytest.fixture(scope="module")
def call(
    triton_interpreter: Callable[[str], AbstractContextManager[Call]],
) -> Iterator[Call]:
    """Call a function of `interpreted` in the interpreter."""
    with triton_interpreter("tests.quant.attention.kernels.interpreted") as request:
        yield request


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tiles, "ROWS", 32)
    with use_step_state(StepState(1)) as state:
        state.begin(1, 0)
        yield


def some(dtype: torch.dtype, T: int, *, B: int = 1, H: int = 2, G: int = 1, E: int = 32) -> Any:
    """D 32."""
    q, k, v = operands(dtype, T, E=E)
    return [q[:, :B, :H], k[:, :B, :G], v[:, :B, :G]]


def near(ours: Result, theirs: Result) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert (one.double() - other.double()).norm() <= NEAR * other.double().norm()


#: The test of exact sums shows the same for these, bit for bit.
EXACT_TOO = ("bf16", "hifp8", "mxfp4, P again")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, id=name, marks=pytest.mark.slow if name in EXACT_TOO else [])
        for name, words in FORMATS.items()
    ],
)
def test_agrees_with_the_tiles_of_torch(call: Call, words: tuple[str, ...]) -> None:
    """70 tokens: neither a multiple of a tile nor of a block; two query heads share one key head."""
    precision, qkv = declared(*words), some(torch.bfloat16, 70)
    near(call("attention", (precision, qkv, None, (32, 32))), by_tiles(precision, qkv))


@pytest.mark.parametrize(
    "words", [pytest.param(FULL_MXFP8, marks=pytest.mark.slow), FULL_HIFP8], ids=["mxfp8", "hifp8"]
)
def test_agrees_in_float16(call: Call, words: tuple[str, ...]) -> None:
    precision, qkv = declared(*words), some(torch.float16, 40)
    near(call("attention", (precision, qkv, None, (32, 32))), by_tiles(precision, qkv))


@pytest.mark.parametrize(
    "sizes", [pytest.param((64, 32), marks=pytest.mark.slow), (32, 64)], ids=str
)
def test_tiles_may_be_of_any_size(call: Call, sizes: tuple[int, int]) -> None:
    precision, qkv = declared(*FULL_MXFP8), some(torch.bfloat16, 66)
    near(call("attention", (precision, qkv, None, sizes)), by_tiles(precision, qkv))


@pytest.mark.parametrize("T", [1, 31, 64])
def test_any_length_is_supported(call: Call, T: int) -> None:
    precision, qkv = declared(*FULL_HIFP8), some(torch.bfloat16, T, G=2)
    near(call("attention", (precision, qkv, None, (32, 32))), by_tiles(precision, qkv))


@pytest.mark.slow
def test_several_sequences_and_documents_and_narrower_value_heads(call: Call) -> None:
    """Separate documents in each sequence, then the same in both."""
    precision, qkv = declared(*FULL_MXFP8), some(torch.bfloat16, 40, B=2, E=20)
    causal = torch.ones(40, 40, dtype=torch.bool).triu(1)[None, None]
    for mask in (torch.cat([documents(40), causal]), documents(40)):
        ours = call("attention", (precision, qkv, mask, (32, 32)))
        near(ours, by_tiles(precision, qkv, mask))
        assert far(ours[0], by_tiles(precision, qkv)[0]) > 0.1


def test_no_key_need_be_hidden(call: Call) -> None:
    precision, qkv = declared(*FULL_MXFP8), some(torch.bfloat16, 40)
    mask = torch.zeros(1, 1, 40, 40, dtype=torch.bool)
    ours = call("attention", (precision, qkv, mask, (32, 32)))
    near(ours, by_tiles(precision, qkv, mask))


def whole_numbers(T: int, dtype: torch.dtype) -> list[Tensor]:
    """Two neighbouring tokens have a score of 819 between them, all others none: p is 1, or 1/2 twice, or 0.

    So everything is a multiple of 2^-3 below 2^10, and exact in float32 in any order. Of a width of 48, 6 elements
    belong to q only and 6 to k only; the width of values is 20.
    """
    generator = torch.Generator().manual_seed(7)

    def whole(*shape: int) -> Tensor:
        return torch.randint(-4, 5, shape, generator=generator)

    pair = 64 * torch.nn.functional.one_hot(torch.arange(T) // 2, 36)[:, None, None]
    q = torch.cat([pair.expand(T, 1, 2, 36), whole(T, 1, 2, 6), torch.zeros(T, 1, 2, 6)], dim=-1)
    k = torch.cat([pair, torch.zeros(T, 1, 1, 6), whole(T, 1, 1, 6)], dim=-1)
    return [x.to(dtype) for x in (q, k, whole(T, 1, 1, 20))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        (SCHEMES["bf16"], torch.bfloat16),
        (FULL_MXFP8, torch.bfloat16),
        (FULL_MXFP8, torch.float16),
        (FULL_HIFP8, torch.bfloat16),
        (SCHEMES["mxfp4, P again"], torch.bfloat16),
    ],
    ids=["bf16", "mxfp8", "mxfp8 in fp16", "hifp8", "mxfp4"],
)
def test_where_sums_are_exact_every_bit_is_the_same(
    call: Call, words: tuple[str, ...], dtype: torch.dtype
) -> None:
    precision, qkv = declared(*words), whole_numbers(70, dtype)
    ours = call("attention", (precision, qkv, None, (32, 32)), True)
    theirs = by_tiles(precision, qkv, is_whole=True)
    for name, one, other in zip(("o", "dq", "dk", "dv"), ours, theirs, strict=True):
        assert other.count_nonzero() > other.numel() / 100, name
        assert torch.equal(one, other), name


SLOTS = {
    "pv.fprop.P": (sites.FPROP_P, 0),
    "pv.dgrad_v.P": (sites.DGRAD_V_P, 3),
    "qk.dgrad_q.dS": (sites.DGRAD_Q_DS, 1),
    "qk.dgrad_k.dS": (sites.DGRAD_K_DS, 2),
}


@pytest.fixture(scope="module")
def ours_in_mxfp4(call: Call) -> Result:
    """The kernels' results for 70 tokens with every slot in mxfp4."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "ROWS", 32)
        with use_step_state(StepState(1)) as state:
            state.begin(1, 0)
            case = declared(*FULL_MXFP4), some(torch.bfloat16, 70)
            result: Result = call("attention", (*case, None, (32, 32)))
            return result


@pytest.mark.slow
@pytest.mark.parametrize("label", SLOTS)
def test_operand_in_the_working_dtype_or_along_the_other_axis_is_another_result(
    ours_in_mxfp4: Result, label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The differences that the tests above detect, and that the proof's bound detects.

    The format is mxfp4, as a scale changes a value of mxfp8 only if it is far below the largest of its block.
    """
    slot, which = SLOTS[label]
    precision, qkv = declared(*FULL_MXFP4), some(torch.bfloat16, 70)
    ours = ours_in_mxfp4[which]
    assert far(ours, by_tiles(precision, qkv)[which]) < NEAR
    without = declared(*FULL_MXFP4, f"quant.{label}.format=bf16")
    assert far(ours, by_tiles(without, qkv)[which]) > 2 * BOUND
    within = tile_products.TileProducts.quantised_tile

    def along_the_other(self: Any, each: Any, tile: Any, x: Tensor) -> Tensor:
        if each != slot:
            return within(self, each, tile, x)
        return within(self, each, tile, x.transpose(1, 2)).transpose(1, 2)

    monkeypatch.setattr(tile_products, "shares_read", lambda first, second: False)
    monkeypatch.setattr(tile_products.TileProducts, "quantised_tile", along_the_other)
    assert far(ours, by_tiles(precision, qkv)[which]) > 2 * BOUND


@pytest.mark.parametrize("words", [FULL_MXFP8, FULL_HIFP8], ids=["mxfp8", "hifp8"])
def test_watched_kernels_give_the_same_result(call: Call, words: tuple[str, ...]) -> None:
    case = declared(*words), some(torch.bfloat16, 40), None, (32, 32)
    for one, other in zip(call("watched_attention", case), call("attention", case), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["attn_weights", "grad_scores"])
def test_a_hook_gets_one_tensor_of_either_pass(call: Call, name: str) -> None:
    case = declared(*FULL_HIFP8), some(torch.bfloat16, 40), None, (32, 32)
    assert call("observed_attention", case, name) > 0


@pytest.mark.parametrize("label", SLOTS)
def test_a_watched_kernel_that_leaves_an_operand_in_the_working_dtype_fails(
    call: Call, label: str
) -> None:
    slot, which = SLOTS[label]
    name = ("o", "dq", "dk", "dv")[which]
    case = declared(*FULL_MXFP8), some(torch.bfloat16, 70), None, (32, 32)
    message = call("watched_attention", case, slot)
    assert (
        f"layer 0 attention: {name} of Triton's kernel is not that of the tiles of torch" in message
    )


@pytest.mark.slow
def test_the_benchmark_runs() -> None:
    root = Path(__file__).parents[4]
    sizes = {"tokens": 64, "heads": 2, "groups": 1, "repeats": 1, "widths": "48/32"}
    words = ["--device=cpu", *(f"--{name}={size}" for name, size in sizes.items())]
    command = [sys.executable, "-W", "ignore", str(root / "benchmarks/attention_gpu.py"), *words]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = process.stdout.splitlines()[1:]
    ways = ["plain", "fused", "tiles", "triton"]
    expected = [(scheme, way) for scheme in ("bf16", "FA_mxfp8") for way in ways]
    expected += [(scheme, way) for scheme in ("mxfp8", "hifp8") for way in ways if way != "fused"]
    assert [(line.split()[0], line.split()[2]) for line in lines] == expected

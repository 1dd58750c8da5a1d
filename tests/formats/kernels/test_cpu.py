"""The compiled kernel against the torch code, which `quantexp verify` and other tests compare with oracles."""

from __future__ import annotations

import itertools
import threading
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.formats import FORMATS, finite_amax, quantise
from quantexp.formats.families import tensor_scale
from quantexp.formats.kernels import cpu, torch_alone
from quantexp.formats.spec import resolve
from quantexp.formats.types import Family, ScaleRule

from .builds import DTYPES, assert_same_bits, by_torch, every_build, seeded, wild

MX = [name for name, fmt in FORMATS.items() if fmt.family is Family.MX]
#: Options of each format that change its arithmetic.
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {"scale_rule": rule.value}) for name in MX for rule in ScaleRule),
    *((name, {"rounding": "away"}) for name in MX),
    *(
        (name, {"scaling": scaling, "saturate": saturate, "rounding": rounding})
        for name in ("fp8_e4m3", "fp8_e5m2", "hifp8")
        for scaling in ("none", "current", "exact")
        for saturate in (True, False)
        for rounding in ("even", "away")
    ),
]
#: Bytes from which results bypass the caches, and some more.
STREAMED = 1 << 25


def all_patterns(dtype: torch.dtype) -> Tensor:
    """Every 16-bit value by magnitude, among neighbours; for float32 random bits in addition."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    if dtype != torch.float32:
        x = values.view(dtype)
        return x[x.float().abs().argsort(stable=True)]
    upper = values.view(torch.bfloat16).float()
    random = torch.randint(-(1 << 31), 1 << 31, (1 << 17,), generator=seeded(2))
    return torch.cat([upper[upper.abs().argsort(stable=True)], random.to(torch.int32).view(dtype)])


@lru_cache(maxsize=1)
def every_value(dtype: torch.dtype) -> list[tuple[Tensor, str, dict[str, Any], Tensor]]:
    """What torch makes of every value in every format; made once for all builds, which pytest runs in a row."""
    x = all_patterns(dtype)
    shuffled = x[torch.randperm(len(x), generator=seeded(3))]
    cases = [(x, name, options) for name, options in CASES]
    cases += [
        (values, name, {"scale_rule": rule, "block": block})
        for name, rule in itertools.product(MX, ScaleRule)
        for values, block in ((x, 1), (shuffled, 2), (shuffled, 32))
    ]
    return [(*case, by_torch(*case[:2], **case[2])) for case in cases]


@every_build
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_value_in_every_format_is_torchs(build: str, dtype: torch.dtype) -> None:
    """In blocks of neighbours in magnitude, alone in its block, next to another, and shuffled."""
    for x, name, options, expected in every_value(dtype):
        assert_same_bits(quantise(x, name, **options), expected)


@pytest.mark.parametrize("name", MX)
@pytest.mark.parametrize("rule", ScaleRule)
def test_float32_around_every_change_of_a_scale_is_torchs(name: str, rule: ScaleRule) -> None:
    """Amaxes one bit around powers of two and around thresholds of their mantissas, in every binade."""
    fields = torch.arange(256, dtype=torch.int64)[:, None] << 23
    mantissas = torch.tensor([0, 1 << 19, 1 << 20, 1 << 21, 3 << 21, 1 << 22, 3 << 20, 7 << 20])
    bits = (fields + mantissas)[..., None] + torch.arange(-2, 3)
    amaxes = bits.clamp(0, (1 << 31) - 1).flatten().to(torch.int32).view(torch.float32)
    below = torch.rand(len(amaxes), 31, generator=seeded(5))
    x = torch.cat([amaxes[:, None], amaxes[:, None] * below], dim=1)
    for values, axis in ((x, 1), (x.t().contiguous(), 0)):
        got = quantise(values, name, scale_rule=rule, axis=axis)
        assert_same_bits(got, by_torch(values, name, scale_rule=rule, axis=axis))
        if rule is not ScaleRule.FLOOR:
            assert got.isinf().any()


@every_build
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_shape_axis_and_block_is_torchs(build: str, dtype: torch.dtype) -> None:
    shapes = [(7, 100), (5, 33, 3), (1, 3000), (130, 17), (3, 70, 300), (64, 1), (2, 2, 40, 8)]
    for shape, block in itertools.product(shapes, (1, 8, 32, 64, 256)):
        x = wild(dtype, *shape)
        for axis in range(len(shape)):
            options: dict[str, Any] = {"axis": axis, "block": block, "scale_rule": "rceil"}
            expected = by_torch(x, "mxfp8", **options)
            assert_same_bits(quantise(x, "mxfp8", **options), expected)
            copy = x.clone()
            assert quantise(copy, "mxfp8", out=copy, **options) is copy
            assert_same_bits(copy, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("extra", [0, 40])
def test_large_tensors_on_two_threads_are_torchs(
    dtype: torch.dtype, extra: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`extra` moves rows off the multiples of 64 bytes that bypass the caches. hifp8 has no axis."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    x = wild(dtype, 1 << 12, (STREAMED >> 12) // dtype.itemsize + extra)
    for name, axis in (("mxfp8_e5m2", 0), ("mxfp8_e5m2", 1), ("hifp8", 0)):
        assert_same_bits(quantise(x, name, axis=axis), by_torch(x, name, axis=axis))


def test_a_result_off_the_multiples_of_64_bytes_is_written() -> None:
    x = wild(torch.bfloat16, STREAMED // 2)
    there = torch.empty(STREAMED // 2 + 1, dtype=x.dtype)
    for name in ("mxfp4", "hifp8"):
        quantise(x, name, out=there[1:])
        assert_same_bits(there[1:], by_torch(x, name))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_finite_magnitude_is_torchs(dtype: torch.dtype) -> None:
    largest = torch.tensor(torch.finfo(dtype).max, dtype=dtype)
    x = wild(dtype, 300, 700)
    for view in (
        x,
        x.t(),
        x[:, ::3],
        -x[3, 5:8],
        largest * -1,
        x[:0],
        x.new_full((40,), torch.nan),
    ):
        amax = finite_amax(view)
        with torch_alone():
            assert_same_bits(amax, finite_amax(view))
    assert finite_amax(largest * -1) == largest.float()


def test_a_scale_at_either_end_is_torchs() -> None:
    """A factor whose inverse is subnormal, and the other way round."""
    x = wild(torch.float32, 4096, spread=40.0)
    for amax, target in itertools.product(
        (2.0**-140, 2.0**-30, 2.0**120), (2.0**-60, 15.0, 2.0**60)
    ):
        for scaling in ("current", "exact"):
            options: dict[str, Any] = {
                "amax": torch.tensor(amax),
                "amax_target": target,
                "scaling": scaling,
            }
            for name in ("hifp8", "fp8_e5m2"):
                assert_same_bits(quantise(x, name, **options), by_torch(x, name, **options))


@pytest.mark.parametrize("name", ["bf16", "mxfp8"])
def test_unclaimed_cases_are_left_to_torch(name: str) -> None:
    x = wild(torch.float32, 40, 2048)
    options: dict[str, Any] = {"block": 1024} if name == "mxfp8" else {}
    assert not cpu.claims(x, resolve(name, **options))
    assert_same_bits(quantise(x, name, **options), by_torch(x, name, **options))


def test_tensors_without_memory_of_a_cpu_are_not_claimed() -> None:
    class Wrapped(torch.Tensor):
        pass

    options = resolve("mxfp8")
    assert cpu.claims(torch.ones(3), options)
    assert cpu.claims(torch.nn.Parameter(torch.ones(3)), options)
    assert not cpu.claims(torch.ones(3).as_subclass(Wrapped), options)
    assert not cpu.claims(torch.ones(3, device="meta"), options)


def test_two_threads_may_quantise_at_once() -> None:
    tensors = [wild(torch.bfloat16, 512, 512, seed=seed) for seed in range(2)]
    expected = [by_torch(x, "mxfp8") for x in tensors]
    results: list[list[Tensor]] = [[], []]

    def work(which: int) -> None:
        results[which] = [quantise(tensors[which], "mxfp8") for _ in range(40)]

    both = [threading.Thread(target=work, args=(which,)) for which in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    for which in range(2):
        assert len(results[which]) == 40
        for y in results[which]:
            assert_same_bits(y, expected[which])


def test_torchs_threads_share_the_work() -> None:
    functions = cpu.functions()
    assert functions is not None
    assert functions.shares_work


def test_autograd_detects_overwritten_tensors() -> None:
    x = torch.ones(64, requires_grad=True)
    saved = x * 2
    y = saved.square()
    with torch.no_grad():
        quantise(saved, "mxfp8", out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_scales_are_torchs_where_amax_is_compiled() -> None:
    x = wild(torch.bfloat16, 5000)
    options = resolve("hifp8", scaling="current")
    assert tensor_scale(x, options, None) == tensor_scale(
        x, options, x[x.isfinite()].abs().max().float()
    )

"""Which kernel is used where, and what is said where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quantexp import compiled
from quantexp.formats import quantise
from quantexp.formats.kernels import choice, cpu, gpu
from quantexp.formats.options import resolve

from .builds import DTYPES, assert_same_bits, by_torch, wild


@pytest.fixture(autouse=True)
def _forget() -> None:
    choice._of_device.cache_clear()


def test_a_cpu_has_the_compiled_kernel() -> None:
    assert choice.kernel_for(torch.ones(3), resolve("mxfp8")) is cpu
    assert choice.kernel_for_both(torch.ones(3, 3), resolve("mxfp8")) is cpu
    assert choice.kernel_for(torch.ones(3), resolve("nvfp4")) is None
    assert choice.kernel_for_both(torch.ones(3, 3), resolve("hifp8")) is None


def test_a_device_has_its_own() -> None:
    assert choice.kernel_for(torch.ones(3, device="meta"), resolve("mxfp8")) is None
    assert choice._of_device("cuda") is gpu


def test_without_a_compiler_torch_does_it_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    x = wild(torch.bfloat16, 40, 90)
    expected = quantise(x, "mxfp8")
    for cached in (cpu.functions, compiled.library):
        cached.cache_clear()
    monkeypatch.setenv(compiled.VARIABLE, "0")
    try:
        for _ in range(3):
            assert_same_bits(quantise(x, "mxfp8"), expected)
            assert quantise(x, "hifp8", scaling="current").isfinite().any()
        assert choice.kernel_for(x, resolve("mxfp8")) is None
    finally:
        for cached in (cpu.functions, compiled.library):
            cached.cache_clear()
    assert capsys.readouterr().err == (
        "cpu.c: not compiled, as QUANTEXP_COMPILE=0 says; tensors are quantised by torch, many times slower\n"
    )


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "hifp8", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_torch_code_may_write_over_its_input(name: str, dtype: torch.dtype) -> None:
    x = wild(dtype, 40, 90)
    for axis in (0, 1):
        held = x.clone()
        with choice.torch_alone():
            quantise(held, name, axis=axis, out=held)
        assert_same_bits(held, by_torch(x, name, axis=axis))


def test_another_header_is_compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "seven.c"
    source.write_text('#include "number.h"\nint seven(void) { return NUMBER; }\n')
    for number in (7, 8):
        (tmp_path / "number.h").write_text(f"#define NUMBER {number}\n")
        found = compiled.compiled(source).library
        assert found is not None
        assert found.seven() == number


def test_torch_compile_traces_the_torch_code() -> None:
    x = wild(torch.float32, 8, 64)
    traced = torch.compile(lambda v: quantise(v, "mxfp8"), backend="eager")
    assert_same_bits(traced(x), by_torch(x, "mxfp8"))

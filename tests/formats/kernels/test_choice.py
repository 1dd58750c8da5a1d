"""Which kernel is used, and the message if there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from quantexp import compiled
from quantexp.formats import kernels, quantise
from quantexp.formats.kernels import cpu, gpu
from quantexp.formats.spec import resolve

from .builds import DTYPES, assert_same_bits, by_torch, wild


def test_a_cpu_has_the_compiled_kernel() -> None:
    assert kernels.kernel_for(torch.ones(3), resolve("mxfp8")) is cpu
    assert kernels.kernel_for_both(torch.ones(3, 3), resolve("mxfp8")) is cpu
    assert kernels.kernel_for(torch.ones(3), resolve("bf16")) is None
    assert kernels.kernel_for_both(torch.ones(3, 3), resolve("hifp8")) is None


def test_other_devices_have_none() -> None:
    x = torch.ones(3, device="meta")
    assert kernels.kernel_for(x, resolve("mxfp8")) is None
    assert kernels.kernel_for_amax(x) is None


def test_a_gpu_has_the_triton_kernels_unless_there_is_an_obstacle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FakeTensorMode():
        x = torch.ones(3, 3, device="cuda")
    assert kernels.kernel_for(x, resolve("mxfp8")) is None, "it holds no values"
    monkeypatch.setattr(gpu, "reads", lambda x: True)
    assert kernels.kernel_for(x, resolve("mxfp8")) is gpu
    assert kernels.kernel_for_both(x, resolve("mxfp8")) is gpu
    assert kernels.kernel_for_amax(x) is gpu
    assert kernels.kernel_for(x, resolve("nvfp4", block=1024)) is None, "a block is too large"
    assert kernels.kernel_for_both(x, resolve("hifp8")) is None, "a scale of the tensor has no axis"
    with kernels.torch_alone():
        assert kernels.kernel_for(x, resolve("mxfp8")) is None


def test_without_a_compiler_torch_quantises_and_one_message_is_printed(
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
        assert kernels.kernel_for(x, resolve("mxfp8")) is None
    finally:
        for cached in (cpu.functions, compiled.library):
            cached.cache_clear()
    assert capsys.readouterr().err == (
        "cpu.c: not compiled, as QUANTEXP_COMPILE=0 says; tensors are quantised by torch, many times slower\n"
    )


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "hifp8", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_torch_code_may_overwrite_its_input(name: str, dtype: torch.dtype) -> None:
    x = wild(dtype, 40, 90)
    for axis in (0, 1):
        copy = x.clone()
        with kernels.torch_alone():
            quantise(copy, name, axis=axis, out=copy)
        assert_same_bits(copy, by_torch(x, name, axis=axis))


def test_another_header_is_compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "seven.c"
    source.write_text('#include "number.h"\nint seven(void) { return NUMBER; }\n')
    for number in (7, 8):
        (tmp_path / "number.h").write_text(f"#define NUMBER {number}\n")
        library = compiled.compiled(source).library
        assert library is not None
        assert library.seven() == number


def test_torch_compile_calls_the_same_kernel() -> None:
    x = wild(torch.float32, 8, 64)
    traced = torch.compile(lambda v: quantise(v, "mxfp8"), backend="eager", fullgraph=True)
    assert_same_bits(traced(x), by_torch(x, "mxfp8"))

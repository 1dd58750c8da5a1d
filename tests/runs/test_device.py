"""The device in a run's identity."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from quantexp.runs import device
from quantexp.runs.device import device_class, multiplies_natively
from quantexp.schema import LauncherConfig, Precision


@pytest.mark.parametrize(
    ("gpus", "kind", "name"), [(0, None, "cpu"), (2, None, "cuda"), (2, "h100", "cuda (h100)")]
)
def test_device_of_a_job_is_its_request(gpus: int, kind: str | None, name: str) -> None:
    launcher = LauncherConfig(kind="slurm", gpus_per_node=gpus, gpu_type=kind)
    assert device_class(launcher) == name


def test_without_a_driver_the_device_is_known_without_torch() -> None:
    script = (
        "import ctypes, sys\n"
        "def absent(name): raise OSError(name)\n"
        "ctypes.CDLL = absent\n"
        "from quantexp.runs.device import device_class\n"
        "from quantexp.schema import LauncherConfig\n"
        "print(device_class(LauncherConfig()), 'torch' in sys.modules)\n"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert process.stdout == "cpu False\n", process.stderr


@pytest.mark.parametrize(("available", "name"), [(True, "NVIDIA H200"), (False, "cpu")])
def test_with_a_driver_torch_names_the_device(
    monkeypatch: pytest.MonkeyPatch, available: bool, name: str
) -> None:
    monkeypatch.setattr("quantexp.runs.device.ctypes.CDLL", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert device_class(LauncherConfig()) == name


def test_the_quick_look_at_the_processor_agrees_with_torch() -> None:
    multiplies_natively.cache_clear()
    assert multiplies_natively(Precision.fp32)
    for precision, supported in (
        (Precision.bf16, torch.ops.mkldnn._is_mkldnn_bf16_supported),
        (Precision.fp16, torch.ops.mkldnn._is_mkldnn_fp16_supported),
    ):
        assert multiplies_natively(precision) is supported()


def native_under(setup: str, **environment: str) -> str:
    script = (
        f"import sys\n{setup}\n"
        "from quantexp.runs.device import multiplies_natively\n"
        "from quantexp.schema import Precision\n"
        "print(multiplies_natively(Precision.bf16), 'torch' in sys.modules)\n"
    )
    limits = dict.fromkeys(device.LIMITS, "") | environment
    process = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, **limits},
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


@pytest.mark.skipif(not device._has_avx512(), reason="a processor with AVX-512")
def test_where_the_processor_has_avx512_torch_is_not_imported() -> None:
    assert native_under("") == "True False"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86")
def test_a_limit_on_instructions_counts() -> None:
    assert native_under("", ONEDNN_MAX_CPU_ISA="AVX2") == "False True"


def test_a_torch_without_onednn_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends, "mkldnn", SimpleNamespace(is_available=lambda: False))
    monkeypatch.setattr(device, "_has_avx512", lambda: False)
    multiplies_natively.cache_clear()
    try:
        assert not multiplies_natively(Precision.bf16)
    finally:
        multiplies_natively.cache_clear()


@pytest.mark.parametrize(
    ("flags", "has"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512bw avx512dq avx512vl", True),
        ("flags\t\t: fpu avx2 avx512f", False),
        ("Features\t: fp asimd bf16", False),
    ],
)
def test_avx512_is_read_from_linux(flags: str, has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.Path, "read_text", lambda self: f"processor\t: 0\n{flags}\n")  # type: ignore[attr-defined]
    assert device._has_avx512() is has


def test_without_linux_avx512_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(self: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(device.Path, "read_text", absent)  # type: ignore[attr-defined]
    assert device._has_avx512() is False

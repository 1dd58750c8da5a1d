"""The device class of a run, which is part of its identity, and the CPU's support for low-precision products."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

from quantexp.schema import LauncherConfig, Precision

#: CPU flags that torch's bf16 matrix products need on x86, as /proc/cpuinfo spells them.
_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
#: Each of these variables limits the instructions that oneDNN, torch's matrix library, may use.
LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")


def device_class(launcher: LauncherConfig) -> str:
    """`cpu`, or the GPU's name; for a job of a cluster, `cuda` with the requested GPU type."""
    if not launcher.is_local:
        if not launcher.gpus_per_node:
            return "cpu"
        return f"cuda ({launcher.gpu_type})" if launcher.gpu_type else "cuda"
    if not has_driver():
        return "cpu"
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def has_driver() -> bool:
    """Whether a GPU driver is installed; if not, `device_class` need not import torch, which takes a second."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Path("/dev/kfd").exists()
    return True


@cache
def multiplies_natively(precision: Precision) -> bool:
    """Whether torch has a native kernel for matrix products of this precision on this machine's CPU.

    Without one, `quantexp.quant.products` multiplies in fp32.
    """
    if precision is Precision.fp32:
        return True
    if precision is Precision.bf16 and not any(map(os.environ.get, LIMITS)) and _has_avx512():
        return True  # saves the import of torch, which takes a second
    import torch

    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    supported = {
        Precision.bf16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        Precision.fp16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return bool(supported[precision]())


def _has_avx512() -> bool:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith("flags")), "")
    return set(flags.split()) >= _AVX512

"""The device of a rank: its name, memory in use and peak throughput.

The peak is the denominator of model FLOPs utilisation (MFU, arXiv 2204.02311): dense bfloat16 or float16 matrix
products with float32 accumulation, TFLOP/s, from NVIDIA's data sheets. Emulated quantisation multiplies in the working
dtype, so the same peak applies to every scheme. Other devices and float32, whose peak depends on settings, have none.
"""

from __future__ import annotations

import psutil
import torch

from quantexp.schema import Precision

#: Parts of `torch.cuda.get_device_name`, the most specific first.
_PEAK_TFLOPS = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("GH200", 990.0),
    ("H200 NVL", 835.0),
    ("H200", 989.0),
    ("H100 NVL", 835.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),
    ("A100", 312.0),
    ("L40S", 362.0),
    ("L4", 121.0),
    ("A10", 125.0),
)


def device_name(device: torch.device) -> str:
    """`cpu`, or the GPU's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def memory_gb(device: torch.device) -> float:
    """Memory in units of 1e9 bytes: on a GPU the peak allocation; on a CPU the current resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return float(psutil.Process().memory_info().rss) / 1e9


def peak_tflops(name: str, precision: Precision) -> float | None:
    """The peak of a device by its name; None if unknown."""
    if precision is Precision.fp32:
        return None
    padded_name = f" {name.replace('-', ' ')} "
    for part, peak in _PEAK_TFLOPS:
        if f" {part} " in padded_name:
            return peak
    return None

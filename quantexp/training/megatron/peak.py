"""What a GPU could do at most, for the share of it that a training uses (model FLOPs utilisation, arXiv 2204.02311).

Dense matrix products of bfloat16 and float16 with float32 accumulation, TFLOP/s, from NVIDIA's data sheets. Emulated
quantisation multiplies in the working dtype, so this is the peak that counts in every scheme. Other devices have none
here, and neither has float32, whose peak depends on settings.
"""

from __future__ import annotations

from quantexp.schema import Precision

#: Parts of `torch.cuda.get_device_name`, the more special first.
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


def peak_tflops(device_name: str, precision: Precision) -> float | None:
    """The peak of a device by its name; None where it is not known."""
    if precision is Precision.fp32:
        return None
    words = f" {device_name.replace('-', ' ')} "
    for part, peak in _PEAK_TFLOPS:
        if f" {part} " in words:
            return peak
    return None

"""Peak throughput by torch's device names."""

from __future__ import annotations

import pytest

from quantexp.schema import Precision
from quantexp.training.megatron.device import peak_tflops


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA GH200 480GB", 990.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L40", None),
        ("NVIDIA A10G", None),
        ("cpu", None),
    ],
)
def test_peak_is_that_of_the_data_sheet_or_none(name: str, peak: float | None) -> None:
    assert peak_tflops(name, Precision.bf16) == peak_tflops(name, Precision.fp16) == peak
    assert peak_tflops(name, Precision.fp32) is None

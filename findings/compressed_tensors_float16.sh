#!/usr/bin/env bash
# compressed-tensors 0.20.1, torch 2.13.0, CPU: small fp16 weights are zero in NVFP4 and MXFP8; in bf16 they are not.
#
# Guess: fp16 and bf16 weights give the same values, but for rounding.
# Seen: normal weights, 64 x 64, relative error of the quantised tensor:
#   format   standard deviation   float32   bf16    fp16
#   NVFP4    0.02                 0.095     0.095   0.095
#   NVFP4    0.01                 0.095     0.095   0.124
#   NVFP4    0.001                0.095     0.095   1: every weight is 0
#   MXFP8    0.00001              0.026     0.026   1: every weight is 0
#   Scales are computed in the dtype of the weight. NVFP4's global scale, 2688 / amax, is Inf in fp16 for amax below
#   0.041; 1 takes its place, and the block scales underflow in E4M3. MXFP8's scale underflows, and 1 takes its place.
# Why it matters: 0.04 is an ordinary amax of a weight matrix. Calibrate on bf16 or float32 weights.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6' 'compressed-tensors==0.20.1'
"$environment/bin/python" -W ignore - <<'END'
import torch
from compressed_tensors.quantization import QuantizationArgs, fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

nvfp4 = QuantizationArgs(
    num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn
)
mxfp8 = QuantizationArgs(
    num_bits=8, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8, zp_dtype=torch.uint8
)


def relative_error(kind: QuantizationArgs, weight: torch.Tensor) -> float:
    groups = weight.view(64, -1, kind.group_size)
    whole = generate_gparam(weight.min(), weight.max()) if kind is nvfp4 else None
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), kind, global_scale=whole)
    rounded = fake_quantize(weight, scale, zero, kind, global_scale=whole)
    return ((rounded.float() - weight.float()).norm() / weight.float().norm()).item()


torch.manual_seed(0)
normal = torch.randn(64, 64)
for kind, deviation, of_most, of_half in (
    (nvfp4, 0.02, 0.095, 0.095),
    (nvfp4, 0.01, 0.095, 0.124),
    (nvfp4, 0.001, 0.095, 1.0),
    (mxfp8, 0.00001, 0.026, 1.0),
):
    dtypes = torch.float32, torch.bfloat16, torch.float16
    errors = [relative_error(kind, (normal * deviation).to(dtype)) for dtype in dtypes]
    print(kind.num_bits, "bits, deviation", deviation, "float32, bf16, fp16:", errors)
    # The errors are statistics of 4096 draws, and the rounding to 16 bits changes some draws.
    for error, expected in zip(errors, (of_most, of_most, of_half), strict=True):
        assert abs(error - expected) < 0.002
END

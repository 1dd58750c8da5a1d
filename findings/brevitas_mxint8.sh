#!/usr/bin/env bash
# brevitas 0.13.4, torch 2.13.0, CPU: MXInt8Weight clips each block at half of its range.
#
# Guess: MXINT8 of the OCP specification, whose elements reach 1.98 times the scale: the most precise MX format.
# Seen: the elements end at 127/128 of the scale, and the scale is still 2^floor(log2(amax)). A block with amax 7.9 is
#       clipped at 3.97. Normal weights have a relative error of 0.165; by the specification it is 0.008.
#       MXInt8WeightMSE, which searches a scale with a small error, has 0.165 too, MXFloat8e4m3Weight 0.030.
# Why it matters: a comparison of formats finds integers five times worse than E4M3, where they are three times better.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6' 'brevitas==0.13.4'
"$environment/bin/python" -W ignore - <<'END'
import torch
from brevitas.nn import QuantLinear
from brevitas.quant.mx_quant_ocp import MXFloat8e4m3Weight, MXInt8Weight, MXInt8WeightMSE


def quantised(kind: type, weight: torch.Tensor) -> torch.Tensor:
    linear = QuantLinear(weight.shape[1], weight.shape[0], bias=False, weight_quant=kind)
    linear.weight.data = weight.clone()
    with torch.no_grad():
        return linear.eval().quant_weight().value


def by_specification(weight: torch.Tensor) -> torch.Tensor:
    blocks = weight.view(-1, 32)
    scale = torch.exp2(blocks.abs().amax(-1, keepdim=True).log2().floor())
    return ((blocks / scale * 64).round().clamp(-128, 127) / 64 * scale).view_as(weight)


block = torch.tensor([[7.9, 5.0, 3.0, 1.0] * 8])
print("of 7.9, 5, 3, 1:", quantised(MXInt8Weight, block)[0, :4].tolist())
assert quantised(MXInt8Weight, block)[0, :4].tolist() == [3.96875, 3.96875, 3.0, 1.0]
torch.manual_seed(0)
weight = torch.randn(64, 64)
tensors = {
    "MXInt8Weight": quantised(MXInt8Weight, weight),
    "MXInt8WeightMSE": quantised(MXInt8WeightMSE, weight),
    "specification": by_specification(weight),
    "MXFloat8e4m3Weight": quantised(MXFloat8e4m3Weight, weight),
}
errors = {name: ((tensor - weight).norm() / weight.norm()).item() for name, tensor in tensors.items()}
print(errors)
assert errors["MXInt8Weight"] == errors["MXInt8WeightMSE"] > 0.1
assert errors["specification"] < 0.01
assert 0.02 < errors["MXFloat8e4m3Weight"] < 0.04
END

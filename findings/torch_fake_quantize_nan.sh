#!/usr/bin/env bash
# torch 2.13.0, CPU: what NaN and Inf become under quantisation to int8 differs from function to function, and none is
# NaN.
#
# Guess: fake quantisation keeps NaN, and Inf becomes the largest value.
# Seen, with the range -12.8 to 12.7: fake_quantize_per_tensor_affine gives -12.8 for NaN;
#       fake_quantize_per_channel_affine gives -12.8 for NaN and for Inf, and 12.7 for 1e10; quantize_per_tensor gives 12.7
#       for NaN.
# Why it matters: behind a quantiser a gradient that was NaN or Inf is an ordinary number, of either sign.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6'
"$environment/bin/python" -W ignore - <<'END'
import math

import torch

x = torch.tensor([math.nan, math.inf, -math.inf, 1e10])
tensor = torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127)
zero = torch.zeros(1, dtype=torch.int32)
channel = torch.fake_quantize_per_channel_affine(x[None], torch.tensor([0.1]), zero, 0, -128, 127)[0]
quantised = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize()
print("NaN, Inf, -Inf, 1e10 per tensor", tensor.tolist(), "per channel", channel.tolist(), "qint8", quantised.tolist())
low, high = -12.8, 12.7
for own, expected in (
    (tensor, [low, high, low, high]),
    (channel, [low, low, low, high]),
    (quantised, [high, high, low, high]),
):
    torch.testing.assert_close(own, torch.tensor(expected))
END

#!/usr/bin/env bash
# torchao 0.18.0, optimum-quanto 0.2.7, torch 2.13.0, CPU: float8 weights of a row of zeros are NaN.
#
# Guess: zero, as with int8.
# Seen: a linear layer with a row of ones and a row of zeros. Zeros stay 0 with torchao's Int8WeightOnlyConfig and
#       quanto's qint8; with Float8WeightOnlyConfig, qfloat8_e4m3fn and qfloat8_e5m2 they are NaN: 0 divided by a scale
#       of 0. A row of 1e-30 is right.
# Why it matters: pruned channels, padded vocabulary rows and projections that start at zero are such rows, and one NaN
#       spreads over all logits.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6' 'torchao==0.18.0' 'optimum-quanto==0.2.7'
"$environment/bin/python" -W ignore - <<'END'
import math

import optimum.quanto as quanto
import torch
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_


def linear(value: float) -> torch.nn.Linear:
    """Two rows: of ones and of `value`."""
    layer = torch.nn.Linear(128, 2, bias=False)
    layer.weight.data[0], layer.weight.data[1] = 1, value
    return layer


def of_torchao(kind: type, value: float = 0.0) -> float:
    layer = linear(value)
    quantize_(layer, kind())
    assert abs(layer.weight.dequantize()[0, 0].item() - 1) < 0.01
    return layer.weight.dequantize()[1, 0].item()


def of_quanto(kind: quanto.qtype, value: float = 0.0) -> float:
    layer = quanto.QLinear.from_module(linear(value), weights=kind)
    layer.freeze()
    assert abs(layer.weight.dequantize()[0, 0].item() - 1) < 0.01
    return layer.weight.dequantize()[1, 0].item()


print("int8:", of_torchao(Int8WeightOnlyConfig), of_quanto(quanto.qint8))
assert of_torchao(Int8WeightOnlyConfig) == of_quanto(quanto.qint8) == 0
seen = {
    "torchao": of_torchao(Float8WeightOnlyConfig),
    "quanto e4m3": of_quanto(quanto.qfloat8_e4m3fn),
    "quanto e5m2": of_quanto(quanto.qfloat8_e5m2),
}
print("float8:", seen)
assert all(map(math.isnan, seen.values()))
for small in (of_torchao(Float8WeightOnlyConfig, 1e-30), of_quanto(quanto.qfloat8_e4m3fn, 1e-30)):
    assert abs(small / 1e-30 - 1) < 0.01
END

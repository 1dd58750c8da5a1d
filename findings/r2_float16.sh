#!/usr/bin/env bash
# scikit-learn 1.9.1, torchmetrics 1.9.0, torch 2.13.0: R^2 of float16 predictions is 1 where it should be 0.1.
#
# Guess: both compute in float64 or float32: scikit-learn converts its inputs, torchmetrics keeps float32 states.
# Seen: 100 targets with the standard deviation 27 and predictions that are off by 25 at each: R^2 in float64 is 0.14,
#       with float16 arrays exactly 1 in both libraries. The sum of squares around the mean overflows to Inf in
#       float16, and the error divided by Inf is 0. With larger errors both are NaN.
# Why it matters: a fit of fp16 quantities looks perfect when it is worthless. The dtype of torchmetrics' state, and of
#       its result, is float32.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6' 'scikit-learn==1.9.1' 'torchmetrics==1.9.0'
"$environment/bin/python" -W ignore - <<'END'
import numpy as np
import torch
from sklearn.metrics import r2_score
from torchmetrics import R2Score

target = np.repeat([-27.0, 27.0], 50)
prediction = target + np.tile([25.0, -25.0], 50)


def of_torchmetrics(dtype: torch.dtype) -> torch.Tensor:
    metric = R2Score()
    metric.update(torch.tensor(prediction, dtype=dtype), torch.tensor(target, dtype=dtype))
    return metric.compute()


exact, half = (r2_score(target, prediction), r2_score(target.astype(np.float16), prediction.astype(np.float16)))
print("scikit-learn, float64:", exact, "float16:", half)
print("torchmetrics, float32:", of_torchmetrics(torch.float32), "float16:", of_torchmetrics(torch.float16))
assert 0.1 < exact < 0.2
assert half == 1
assert abs(of_torchmetrics(torch.float32).item() - exact) < 1e-5
assert of_torchmetrics(torch.float16).item() == 1
assert of_torchmetrics(torch.float16).dtype == torch.float32
END

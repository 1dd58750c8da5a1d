#!/usr/bin/env bash
# torch 2.13.0: an AveragedModel of bf16 weights with an exponential average never moves.
#
# Guess: it moves: the average is kept in float32, or is at least rounded only where it is read.
# Seen: with decay 0.999 and weights that go from 1 to 2, the average of float32 weights is 1.632 after 1000 steps;
#       that of bf16 weights is 1.
# Why it matters: the average has the dtype of the model, and 0.001 of a difference is below half of a last bit of
# bf16.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6'
"$environment/bin/python" -W ignore - <<'END'
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def averaged(dtype: torch.dtype) -> float:
    model = torch.nn.Linear(4, 4, bias=False).to(dtype)
    model.weight.data.fill_(1.0)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    average.update_parameters(model)
    model.weight.data.fill_(2.0)
    for _ in range(1000):
        average.update_parameters(model)
    return average.module.weight[0, 0].item()


seen = averaged(torch.float32), averaged(torch.bfloat16)
print("after 1000 steps, float32 and bf16:", *seen)
assert abs(seen[0] - 1.6323) < 1e-3
assert seen[1] == 1.0
END

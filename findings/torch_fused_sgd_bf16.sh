#!/usr/bin/env bash
# torch 2.13.0, CPU: torch.optim.SGD(fused=True) does not change bf16 or fp16 parameters.
#
# Guess: the fused step computes in float32 and rounds once, so it differs from the plain step in the last bit.
# Seen: of 1001 parameters 992, all that fill whole vectors, keep their value; only the last 9 are updated. fp32 is
#       right, and so are fused Adam and Adagrad in bf16.
# Why it matters: training runs without an error, with almost all parameters frozen.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6'
"$environment/bin/python" -W ignore - <<'END'
import torch


def changed(kind: type[torch.optim.Optimizer], dtype: torch.dtype) -> int:
    """Number of 1001 parameters that one step with a gradient of 1 changes."""
    parameter = torch.nn.Parameter(torch.ones(1001, dtype=dtype))
    optimizer = kind([parameter], lr=0.25, fused=True)
    parameter.grad = torch.ones(1001, dtype=dtype)
    optimizer.step()
    return int((parameter != 1).sum())


for dtype in (torch.bfloat16, torch.float16, torch.float32):
    print("SGD", dtype, changed(torch.optim.SGD, dtype))
assert changed(torch.optim.SGD, torch.bfloat16) == 9
assert changed(torch.optim.SGD, torch.float16) == 9
assert changed(torch.optim.SGD, torch.float32) == 1001
assert changed(torch.optim.Adam, torch.bfloat16) == 1001
assert changed(torch.optim.Adagrad, torch.bfloat16) == 1001
END

#!/usr/bin/env bash
# torch 2.13.0, CPU: SGD(fused=True) leaves bf16 and fp16 parameters as they are.
#
# Guess: the same update as fused=False, except for rounding.
# Seen: 40 parameters of 0 with gradients of 1, lr = 0.1, one step. In float32 all become -0.1. In bf16 and fp16
#       fused=False moves all, fused=True only the last 8, those that do not fill a vector register. There is no error
#       and no warning. Adam, AdamW and Adagrad with fused=True move all.
# Why it matters: the loss stays where it was, as if the format rounded every update away.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6'
"$environment/bin/python" -W ignore - <<'END'
import torch


def moved(kind: type[torch.optim.Optimizer], dtype: torch.dtype, fused: bool) -> list[bool]:
    """Which of 40 parameters one step changes."""
    parameter = torch.nn.Parameter(torch.zeros(40, dtype=dtype))
    parameter.grad = torch.ones(40, dtype=dtype)
    kind([parameter], lr=0.1, fused=fused).step()
    return (parameter < 0).tolist()


for dtype in (torch.float32, torch.bfloat16, torch.float16):
    plain, fused = (moved(torch.optim.SGD, dtype, choice) for choice in (False, True))
    print(dtype, "parameters that SGD moves:", sum(plain), "fused:", sum(fused))
    assert all(plain)
    assert all(fused) if dtype == torch.float32 else not any(fused[:32])
    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
        assert all(moved(kind, dtype, True))
END

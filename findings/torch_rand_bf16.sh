#!/usr/bin/env bash
# torch 2.13.0, CPU: torch.rand in bf16 returns 0 for the numbers that are near 1.
#
# Guess: multiples of 2^-8 in [0, 1), as many random bits as bf16 has, each equally likely.
# Seen: the float32 number is rounded to bf16, and what rounds to 1 becomes 0. So 0 has the probability 1/512, while the
#       next smallest numbers, below 2^-20, come once in a million. The mean is 0.498. fp16: 0 has 1/4096.
# Why it matters: -log(u) is Inf for 0.2% of bf16 numbers, and stochastic rounding that compares a fraction with such
#       noise rounds up where the fraction is almost 0.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6'
"$environment/bin/python" -W ignore - <<'END'
import torch

torch.manual_seed(0)
u = torch.rand(1_000_000, dtype=torch.bfloat16).float()
torch.manual_seed(0)
full = torch.rand(1_000_000)
zeros = u == 0
print("zeros", zeros.float().mean().item(), "smallest other", u[~zeros].min().item(), "mean", u.double().mean().item())
assert abs(zeros.float().mean().item() - 1 / 512) < 2e-4
assert u[~zeros].min() < 2**-20
rounded = full.to(torch.bfloat16).float()
assert torch.equal(u, rounded.where(rounded < 1, 0))
assert full[zeros].min() > 0.998
torch.manual_seed(0)
half = torch.rand(1_000_000, dtype=torch.float16)
assert abs((half == 0).float().mean().item() - 1 / 4096) < 1e-4
END

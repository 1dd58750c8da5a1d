#!/usr/bin/env bash
# torch 2.13.0, CPU: a bf16 tensor times a float32 scalar tensor is not commutative.
#
# Guess: x * s and s * x compute in float32 and round once to bf16, with s not rounded before.
# Seen: with s = torch.tensor(0.1), x * s is that. s * x first rounds s to bf16, and so do x + s and x - s: 192 of 1000
#       products differ.
# Why it matters: scales are float32 scalar tensors, and scale * x is another number than x * scale.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6'
"$environment/bin/python" -W ignore - <<'END'
import torch

torch.manual_seed(0)
x = torch.randn(1000).to(torch.bfloat16)
s = torch.tensor(0.1)
once = (x.float() * s).to(torch.bfloat16)
twice = (x.float() * s.to(torch.bfloat16).float()).to(torch.bfloat16)
print("s * x differs from x * s in", int((s * x != x * s).sum()), "of 1000")
assert torch.equal(x * s, once)
assert torch.equal(s * x, twice)
assert not torch.equal(once, twice)
assert torch.equal(x / s, (x.float() / s).to(torch.bfloat16))
assert torch.equal(x + s, x + s.to(torch.bfloat16))
assert torch.equal(x - s, x - s.to(torch.bfloat16))
assert not torch.equal(x + s, (x.float() + s).to(torch.bfloat16))
END

#!/usr/bin/env bash
# torchao 0.18.0: AdamW8bit and AdamWFp8 move rarely used embedding rows by thousands of learning rates.
#
# Guess: 8-bit states follow AdamW, as those of bitsandbytes do; AdamW4bit is the coarser one.
# Seen: an embedding of 256 rows of 64, three rows with a gradient in each of 200 steps, learning rate 0.001. The
#       largest parameter: AdamW 0.039, bitsandbytes' AdamW8bit 0.038, torchao's AdamW4bit 0.032, AdamW8bit 190,
#       AdamWFp8 430. The second moment rounds to 0 where it is small against its block of 256 elements, while the first
#       moment does not, and the step is their quotient, with eps = 1e-8. The 4-bit second moment has no code for zero.
# Why it matters: the divergence looks like one of the number format under test. States of fewer than 4096 elements, or
#       of a count not divisible by 256, are not quantised, so that a tiny model does not show it. These
#       optimizers need a C compiler.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
export TORCHINDUCTOR_CACHE_DIR="$environment/cache"
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6' 'torchao==0.18.0' 'bitsandbytes==0.50.2'
"$environment/bin/python" -W ignore - <<'END'
import bitsandbytes
import torch
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8


def largest(kind: type[torch.optim.Optimizer]) -> float:
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.zeros(256, 64))
    optimizer = kind([parameter], lr=1e-3, weight_decay=0.0)
    for _ in range(200):
        parameter.grad = torch.zeros(256, 64)
        parameter.grad[torch.randint(0, 256, (3,))] = torch.randn(3, 64)
        optimizer.step()
    return parameter.abs().max().item()


kinds = {
    "AdamW": torch.optim.AdamW,
    "bitsandbytes": bitsandbytes.optim.AdamW8bit,
    "torchao 4bit": AdamW4bit,
    "torchao 8bit": AdamW8bit,
    "torchao fp8": AdamWFp8,
}
seen = {name: largest(kind) for name, kind in kinds.items()}
print(seen)
for name in ("AdamW", "bitsandbytes", "torchao 4bit"):
    assert seen[name] < 0.06, name
for name in ("torchao 8bit", "torchao fp8"):
    assert seen[name] > 1, name
END

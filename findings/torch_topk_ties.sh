#!/usr/bin/env bash
# torch 2.13.0, CPU: which of equal values topk returns depends on the number of values.
#
# Guess: the lowest indices, as argmax, max and jax.lax.top_k.
# Seen: top 2 of n equal values: n = 8: [6, 5]; 16: [10, 11]; 64: [42, 43]; 128 and more: [0, 1]. jax: always [0, 1].
#       With normal logits in bf16, 3.7% of the tokens have a tie between the eighth and the ninth of 64 experts.
# Why it matters: a router whose logits were computed in bf16 sends these tokens to other experts than JAX, or than a
#       reference that takes the lowest index.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6' 'jax==0.10.2'
"$environment/bin/python" -W ignore - <<'END'
import jax
import numpy as np
import torch

seen = {n: torch.topk(torch.ones(n, dtype=torch.bfloat16), 2).indices.tolist() for n in (8, 16, 64, 128, 256)}
print(seen)
assert seen == {8: [6, 5], 16: [10, 11], 64: [42, 43], 128: [0, 1], 256: [0, 1]}
for n in seen:
    assert int(torch.ones(n).argmax()) == 0
    assert int(torch.ones(n).max(0).indices) == 0
    assert jax.lax.top_k(np.ones(n, np.float32), 2)[1].tolist() == [0, 1]
torch.manual_seed(0)
logits = torch.randn(4096, 64).to(torch.bfloat16)
values = logits.sort(descending=True).values
ties = (values[:, 7] == values[:, 8]).float().mean().item()
print("tokens with a tie at the border of the top 8 of 64 experts:", ties)
assert 0.03 < ties < 0.045
END

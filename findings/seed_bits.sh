#!/usr/bin/env bash
# torch 2.13.0 (CPU), jax 0.10.2: a seed has 32 bits; the upper half of a larger one is ignored.
#
# Guess: torch.manual_seed takes 64 bits, as it says, and different seeds give different numbers.
# Seen: seeds 1 and 1 + 2^32 give the same numbers with torch's CPU generator, and the same key with jax.random.key
#       (without jax_enable_x64). numpy.random.default_rng distinguishes them; numpy.random.seed refuses the larger one.
# Why it matters: seeds of the form (name or rank) * 2^32 + base are all the same seed, so that "independent" runs are
#       copies; of seeds from a 64-bit hash only 32 bits count.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6' 'jax==0.10.2'
"$environment/bin/python" -W ignore - <<'END'
import jax
import numpy as np
import torch

small, large = 1, 1 + 2**32
first = torch.randn(8, generator=torch.Generator().manual_seed(small))
second = torch.randn(8, generator=torch.Generator().manual_seed(large))
keys = [jax.random.key_data(jax.random.key(seed)) for seed in (small, large)]
print("torch equal:", torch.equal(first, second), "jax keys:", *keys)
assert torch.equal(first, second)
assert (keys[0] == keys[1]).all()
assert not np.array_equal(np.random.default_rng(small).random(8), np.random.default_rng(large).random(8))
try:
    np.random.seed(large)
except ValueError as error:
    print("numpy.random.seed:", error)
else:
    raise SystemExit("numpy.random.seed accepts 1 + 2^32")
END

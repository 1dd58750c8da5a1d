#!/usr/bin/env bash
# jax 0.10.2, CPU: jnp.histogram of bf16 or fp16 values counts in their dtype, and stops at 256 or 2048.
#
# Guess: counts are integers, or float32: 1000 equal values give 1000.
# Seen: 1000 equal bf16 values give 256, 5000 equal fp16 values 2048, without a warning. With float32 the same call
#       gives 1000 and 5000. jnp.bincount with bf16 weights gives 256 too.
# Why it matters: histograms of activations and gradients are of bf16 tensors with millions of elements.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'jax==0.10.2' 'numpy==2.4.6' 'ml_dtypes==0.6.0'
"$environment/bin/python" -W ignore - <<'END'
import jax.numpy as jnp


def counts(n: int, dtype: jnp.dtype) -> list[float]:
    return [float(count) for count in jnp.histogram(jnp.ones(n, dtype), bins=4)[0]]


seen = {
    "bf16": counts(1000, jnp.bfloat16),
    "fp16": counts(5000, jnp.float16),
    "float32": counts(5000, jnp.float32),
    "bincount": [float(jnp.bincount(jnp.zeros(1000, int), weights=jnp.ones(1000, jnp.bfloat16))[0])],
}
print(seen)
assert sum(seen["bf16"]) == 256
assert sum(seen["fp16"]) == 2048
assert sum(seen["float32"]) == 5000
assert seen["bincount"] == [256.0]
END

#!/usr/bin/env bash
# jax 0.10.2, CPU: jnp.sum and jnp.mean of float8 accumulate in float8's own precision.
#
# Guess: they accumulate in float32 and round once, as for bfloat16: 100 ones give 96, and the mean of 1000 is 1.
# Seen: 100 ones in float8_e4m3fn sum to 64, in float8_e5m2 to 32. The mean of 1000 ones in float8_e4m3fn is NaN: the
#       sum overflows. jnp.dot of the same 100 ones is 96. bfloat16: the sum of 1000 ones is 1000, the mean 1.
# Why it matters: statistics of a quantised tensor need .astype(jnp.float32) or dtype=jnp.float32.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'jax==0.10.2' 'numpy==2.4.6' 'ml_dtypes==0.6.0'
"$environment/bin/python" -W ignore - <<'END'
import jax.numpy as jnp

e4m3 = jnp.ones(100, jnp.float8_e4m3fn)
seen = {
    "sum e4m3": e4m3.sum(),
    "sum e5m2": jnp.ones(100, jnp.float8_e5m2).sum(),
    "dot e4m3": jnp.dot(e4m3, e4m3),
    "mean e4m3": jnp.ones(1000, jnp.float8_e4m3fn).mean(),
    "sum bf16": jnp.ones(1000, jnp.bfloat16).sum(),
    "mean bf16": jnp.ones(1000, jnp.bfloat16).mean(),
    "sum e4m3 in float32": e4m3.sum(dtype=jnp.float32),
}
print({name: float(value) for name, value in seen.items()})
assert seen["sum e4m3"] == 64
assert seen["sum e5m2"] == 32
assert seen["dot e4m3"] == 96
assert jnp.isnan(seen["mean e4m3"])
assert seen["sum bf16"] == 1000
assert seen["mean bf16"] == 1
assert seen["sum e4m3 in float32"] == 100
END

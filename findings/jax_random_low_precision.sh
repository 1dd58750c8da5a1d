#!/usr/bin/env bash
# jax 0.10.2, CPU: random numbers of a narrow dtype are computed from that dtype's uniform numbers, not rounded from
# float32's.
#
# Guess: jax.random.normal of float8_e4m3fn is an error, or a normal number rounded to it.
# Seen: a hundred thousand draws have 8 different values, the largest 1.25; normal numbers that are rounded have more
#       than 70 and reach 4. In bf16 there are 128 values, the largest 2.5; jax.random.logistic of bf16 has the mean -0.68
#       instead of 0; jax.random.bernoulli with a bf16 probability of 0.001 is true 0.0077 of the time.
# Why it matters: noise for dithering, dropout and initial weights is not what its name says: draw in float32, then
# cast.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'jax==0.10.2' 'numpy==2.4.6' 'ml_dtypes==0.6.0'
"$environment/bin/python" -W ignore - <<'END'
import jax
import jax.numpy as jnp
import numpy as np

key = jax.random.key(0)


def values(x: jax.Array) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


narrow = values(jax.random.normal(key, (100_000,), jnp.float8_e4m3fn))
rounded = values(jax.random.normal(key, (100_000,)).astype(jnp.float8_e4m3fn))
half = values(jax.random.normal(key, (1_000_000,), jnp.bfloat16))
logistic = values(jax.random.logistic(key, (1_000_000,), jnp.bfloat16))
rare = values(jax.random.bernoulli(key, jnp.bfloat16(0.001), (1_000_000,)))
print("normal in E4M3:", np.unique(narrow).tolist())
print("float32's in E4M3:", len(np.unique(rounded)), "values up to", rounded.max())
print("normal in bf16:", len(np.unique(half)), "values up to", half.max())
print("logistic in bf16, mean:", logistic.mean(), "bernoulli(0.001), share:", rare.mean())
assert len(np.unique(narrow)) == 8
assert narrow.max() == 1.25
assert len(np.unique(rounded)) > 70
assert rounded.max() >= 4
assert len(np.unique(half)) == 128
assert half.max() < 2.6
assert logistic.mean() < -0.6
assert 0.007 < rare.mean() < 0.009
END

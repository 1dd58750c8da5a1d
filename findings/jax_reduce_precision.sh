#!/usr/bin/env bash
# jax 0.10.2, CPU: lax.reduce_precision(x, 4, 3) has no subnormal numbers, and ends at 240.
#
# Guess: 4 bits of exponent and 3 of mantissa give the numbers of E4M3, subnormals included, with an Inf in the place of
#        its last binade.
# Seen: everything below 2^-6 becomes 0: 2^-7, 2^-8 and 2^-9, which are E4M3 numbers. 256 and more become Inf. A cast to
#       float8_e4m3fn keeps all of them up to 448. With (5, 2) E5M2's subnormals are lost as well.
# Why it matters: reduce_precision is a usual way to emulate float8, and here the smallest gradients vanish.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'jax==0.10.2' 'numpy==2.4.6' 'ml_dtypes==0.6.0'
"$environment/bin/python" -W ignore - <<'END'
import jax.numpy as jnp
import numpy as np
from jax import lax

x = jnp.asarray([2.0**-9, 2.0**-8, 2.0**-7, 2.0**-6, 240, 256, 448], jnp.float32)
reduced = np.asarray(lax.reduce_precision(x, 4, 3))
cast = np.asarray(x.astype(jnp.float8_e4m3fn).astype(jnp.float32))
print("reduce_precision", reduced, "cast", cast)
assert np.array_equal(reduced, np.float32([0, 0, 0, 2**-6, 240, np.inf, np.inf]))
assert np.array_equal(cast, np.asarray(x))
small = jnp.asarray([2.0**-16, 2.0**-15, 2.0**-14], jnp.float32)
reduced = np.asarray(lax.reduce_precision(small, 5, 2))
print("E5M2", reduced)
assert np.array_equal(reduced, np.float32([0, 0, 2**-14]))
END

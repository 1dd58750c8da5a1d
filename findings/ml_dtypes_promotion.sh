#!/usr/bin/env bash
# ml_dtypes 0.6.0: bfloat16 times 2.5 is float32, and float8 plus float4 is float4.
#
# Guess: a Python number does not change the dtype (numpy 2, JAX), and two formats promote to one that holds both.
# Seen: a bfloat16 array times 2.5 is float32, times 3 it is bfloat16; np.clip(x, -448.0, 448.0) is float32 as well.
#       float4_e2m1fn with float8_e4m3fn is float4_e2m1fn: 0 + 96 is 6. float8_e4m3fn with float8_e5m2 is float32.
# Why it matters: emulated bf16 arithmetic silently continues in float32, and a sum of float8 and float4 saturates at 6.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'numpy==2.4.6' 'ml_dtypes==0.6.0'
"$environment/bin/python" -W ignore - <<'END'
import ml_dtypes
import numpy as np

bf16 = np.ones(1, ml_dtypes.bfloat16)
assert (bf16 * 2.5).dtype == np.float32
assert (bf16 * 3).dtype == ml_dtypes.bfloat16
assert np.clip(bf16, -448.0, 448.0).dtype == np.float32
assert (np.ones(1, np.float16) * 2.5).dtype == np.float16
fp4 = np.zeros(1, ml_dtypes.float4_e2m1fn)
e4m3 = np.full(1, 96, np.float32).astype(ml_dtypes.float8_e4m3fn)
e5m2 = np.ones(1, np.float32).astype(ml_dtypes.float8_e5m2)
print("0 in float4 + 96 in float8:", fp4 + e4m3, (fp4 + e4m3).dtype)
assert (fp4 + e4m3).dtype == ml_dtypes.float4_e2m1fn
assert float((fp4 + e4m3)[0]) == 6.0
assert (e4m3 + e5m2).dtype == np.float32
END

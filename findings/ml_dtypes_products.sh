#!/usr/bin/env bash
# ml_dtypes 0.6.0, numpy 2.4.6: a @ b is float32, np.dot(a, b) has the dtype of its operands.
#
# Guess: both are the same product, in the same dtype.
# Seen, for 1000 ones times 1000 ones:
#                      a @ b         np.dot, np.inner    sum        mean
#   bfloat16           1000 float32  1000 bfloat16       256        0.256
#   float8_e4m3fn      1000 float32  NaN                 16         0.0156
#   float4_e2m1fn      1000 float32  6                   4          0
#   np.average with weights of one, which is a quotient of two sums, gives 1.
# Why it matters: a reference product written with np.dot rounds and overflows, the same one with @ does not.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'numpy==2.4.6' 'ml_dtypes==0.6.0'
"$environment/bin/python" -W ignore - <<'END'
import ml_dtypes
import numpy as np

for name, dot, total in (("bfloat16", 1000, 256), ("float8_e4m3fn", np.nan, 16), ("float4_e2m1fn", 6, 4)):
    ones = np.ones(1000, getattr(ml_dtypes, name))
    product = ones @ ones
    print(name, product, product.dtype, np.dot(ones, ones), ones.sum(), ones.mean())
    assert product.dtype == np.float32
    assert product == 1000
    assert np.dot(ones, ones).dtype == np.inner(ones, ones).dtype == ones.dtype
    assert np.array_equal(float(np.dot(ones, ones)), dot, equal_nan=True)
    assert np.array_equal(float(np.inner(ones, ones)), dot, equal_nan=True)
    assert ones.sum() == total
    assert ones.mean() < 0.3
    assert np.average(ones, weights=ones) == 1
END

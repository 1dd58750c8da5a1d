#!/usr/bin/env bash
# ml_dtypes 0.6.0: numpy's functions that treat NaN apart do not see the NaN of bfloat16 and float8.
#
# Guess: np.testing.assert_array_equal takes NaN as equal to NaN, as it does for float16 and float32.
# Seen: for bfloat16, float8_e4m3fn and float8_e5m2 assert_array_equal(x, x) fails if x has a NaN, while
#       assert_allclose(x, x) and np.array_equal(x, x, equal_nan=True) pass. np.nansum and np.nanmean are NaN, and
#       np.nan_to_num returns the NaN; np.nanmax skips it.
# Why it matters: a test of equality fails on equal bits, and a cleaned tensor still has its NaN. Compare the bytes, or
#       cast to float32.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'numpy==2.4.6' 'ml_dtypes==0.6.0'
"$environment/bin/python" -W ignore - <<'END'
import ml_dtypes
import numpy as np

for dtype in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
    x = np.float32([1, np.nan]).astype(dtype)
    try:
        np.testing.assert_array_equal(x, x)
    except AssertionError:
        equal = False
    else:
        equal = True
    np.testing.assert_allclose(x, x)
    assert np.array_equal(x, x, equal_nan=True)
    assert np.isnan(x[1])
    print(dtype.__name__, "assert_array_equal passes:", equal, "nansum", np.nansum(x), "nan_to_num", np.nan_to_num(x))
    ordinary = dtype is np.float16
    assert equal == ordinary
    assert np.isnan(np.float32(np.nansum(x))) != ordinary
    assert np.isnan(np.float32(np.nanmean(x))) != ordinary
    assert np.isnan(np.nan_to_num(x).astype(np.float32)).any() != ordinary
    assert float(np.nanmax(x)) == 1
END

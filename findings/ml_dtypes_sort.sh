#!/usr/bin/env bash
# ml_dtypes 0.6.0: numpy does not sort an array that contains NaN, and np.unique returns values more than once.
#
# Guess: NaN is sorted to the end, and np.unique returns one NaN, as for float16 and float32.
# Seen: np.sort of bfloat16 [3, 1, NaN, 2, 0] leaves NaN in its place and sorts only around it; np.unique of
#       [1, NaN, 2, NaN, 1, 2] returns six values. The same holds for float8_e4m3fn. argmax and max see the NaN.
# Why it matters: medians, quantiles and counts of distinct codes of a captured tensor with one NaN are wrong without a
#       warning. Cast to float32 first, or count the bytes.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'numpy==2.4.6' 'ml_dtypes==0.6.0'
"$environment/bin/python" -W ignore - <<'END'
import ml_dtypes
import numpy as np

for dtype in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
    ordered = np.sort(np.float32([3, 1, np.nan, 2, 0]).astype(dtype)).astype(np.float32)
    distinct = np.unique(np.float32([1, np.nan, 2, np.nan, 1, 2]).astype(dtype)).astype(np.float32)
    print(dtype.__name__, "sort", ordered, "unique", distinct)
    if dtype is np.float16:
        assert np.array_equal(ordered, [0, 1, 2, 3, np.nan], equal_nan=True)
        assert len(distinct) == 3
    else:
        assert not np.isnan(ordered[-1])
        assert len(distinct) == 6
END

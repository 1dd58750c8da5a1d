#!/usr/bin/env bash
# ml_dtypes 0.6.0: a cast from float64 rounds twice, first to float32.
#
# Guess: the cast to float8_e4m3fn rounds the float64 itself, as numpy's cast to float16 does.
# Seen: 1.0625 + 2^-40 lies above the middle of 1 and 1.125 and becomes 1, not 1.125. The same holds for bfloat16 and
#       float8_e5m2. numpy's float16 rounds once.
# Why it matters: reference values computed in float64 and cast by ml_dtypes are wrong next to ties; cast them to
#       float32 by rounding to odd, or stay in float32.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'numpy==2.4.6' 'ml_dtypes==0.6.0'
"$environment/bin/python" -W ignore - <<'END'
import ml_dtypes
import numpy as np

above_a_tie = {
    ml_dtypes.float8_e4m3fn: 1 + 2**-4 + 2**-40,
    ml_dtypes.float8_e5m2: 1 + 2**-3 + 2**-40,
    ml_dtypes.bfloat16: 1 + 2**-8 + 2**-40,
    np.float16: 1 + 2**-11 + 2**-40,
}
for dtype, value in above_a_tie.items():
    result = float(np.float64(value).astype(dtype))
    print(dtype.__name__, result)
    assert (result == 1.0) == (dtype is not np.float16)
END

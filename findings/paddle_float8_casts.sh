#!/usr/bin/env bash
# paddlepaddle 3.3.1, CPU: casts to float8 turn values at the edge of the range into NaN or Inf, and all larger ones,
# Inf too, into the largest number.
#
# Guess: float8_e4m3fn gives NaN from 465 on, as ml_dtypes does; float8_e5m2 gives Inf from 61440 on.
# Seen: E4M3 gives NaN for 465 and 479, and 448 for 480, 1000, Inf and NaN. E5M2 gives Inf for 61440 and 65535, and
#       57344 for 65536 and Inf; its NaN stays NaN.
# Why it matters: a check of quantised tensors for NaN or Inf finds a slight overflow and misses a large one.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'paddlepaddle==3.3.1' 'numpy==2.4.6'
"$environment/bin/python" -W ignore - <<'END'
import math

import numpy as np
import paddle

values = [448.0, 464.0, 465.0, 479.0, 480.0, 1000.0, math.inf, math.nan, 60000.0, 61440.0, 65535.0, 65536.0]
x = paddle.to_tensor(np.array(values, np.float32))
e4m3, e5m2 = (x.astype(f"float8_{name}").astype("float32").tolist() for name in ("e4m3fn", "e5m2"))
print("value, E4M3, E5M2:", *zip(values, e4m3, e5m2, strict=True), sep="\n")
assert e4m3[:2] == [448.0, 448.0]
assert all(map(math.isnan, e4m3[2:4]))
assert e4m3[4:] == [448.0] * 8
assert e5m2[8:] == [57344.0, math.inf, math.inf, 57344.0]
assert e5m2[6] == 57344.0
assert math.isnan(e5m2[7])
END

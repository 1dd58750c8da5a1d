#!/usr/bin/env bash
# numpy 2.4.6: np.linalg.norm and np.var of float16 compute squares in float16, while np.mean adds in float32.
#
# Guess: norm of 100 values of 300 in float16 is 3000, which float16 holds.
# Seen: it is Inf. np.var of 1000 equal values 40000 is Inf, although np.mean is 40000. np.sum of 5000 ones is 5000,
#       but along the first axis of a [5000, 3] array 2048.
# Why it matters: norms and variances of captured fp16 tensors are Inf where nothing overflowed: cast first.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'numpy==2.4.6'
"$environment/bin/python" -W ignore - <<'END'
import numpy as np

flat = np.full(1000, 40000, np.float16)
seen = {
    "norm": np.linalg.norm(np.full(100, 300, np.float16)),
    "mean": flat.mean(),
    "variance": flat.var(),
    "sum": np.ones(5000, np.float16).sum(),
    "sum along the first axis": np.ones((5000, 3), np.float16).sum(0)[0],
}
print({name: float(value) for name, value in seen.items()})
assert np.isinf(seen["norm"])
assert seen["mean"] == 40000
assert np.isinf(seen["variance"])
assert seen["sum"] == 5000
assert seen["sum along the first axis"] == 2048
END

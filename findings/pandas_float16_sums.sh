#!/usr/bin/env bash
# pandas 3.1.1, numpy 2.4.6, ml_dtypes 0.6.0: a float16 column sums to float64, each of its groups to float16.
#
# Guess: the sum of a group has the dtype and the accuracy of the sum of a column, and a mean divides a sum in float64.
# Seen: 1000 values of 40000 in float16: Series.sum is 4e7 in float64, groupby.sum Inf in float16, groupby.mean 40000.
#       5000 ones: Series.cumsum ends at 2048, groupby.cumsum at 5000 (float32). 5000 ones in ml_dtypes' bfloat16:
#       Series.mean is 0.0512 and has the dtype float64.
# Why it matters: a table of fp16 or bf16 values changes its totals when it is grouped by layer, and a dtype of float64
#       does not say in which format the sum was formed.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'numpy==2.4.6' 'pandas==3.1.1' 'ml_dtypes==0.6.0'
"$environment/bin/python" -W ignore - <<'END'
import ml_dtypes
import numpy as np
import pandas as pd

large = pd.DataFrame({"layer": 0, "value": np.full(1000, 40000, np.float16)})
groups = large.groupby("layer")["value"]
print("sum:", large["value"].sum(), "by layer:", groups.sum()[0], "mean by layer:", groups.mean()[0])
assert large["value"].sum() == 4e7
assert large["value"].sum().dtype == np.float64
assert np.isinf(groups.sum()[0])
assert groups.sum().dtype == np.float16
assert groups.mean()[0] == 40000
ones = pd.DataFrame({"layer": 0, "value": np.ones(5000, np.float16)})
running = ones["value"].cumsum().iloc[-1], ones.groupby("layer")["value"].cumsum().iloc[-1]
print("cumulative sum of 5000 ones:", running)
assert running == (2048, 5000)
mean = pd.Series(np.ones(5000, ml_dtypes.bfloat16)).mean()
print("mean of bfloat16 ones:", mean, mean.dtype)
assert mean.dtype == np.float64
assert abs(mean - 0.0512) < 1e-6
END

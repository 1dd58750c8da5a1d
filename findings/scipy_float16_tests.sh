#!/usr/bin/env bash
# scipy 1.17.1, numpy 2.4.6: scipy.stats computes a t test of float16 values in float16.
#
# Guess: in float64, as numpy's mean and most of scipy's functions take float16 to a wider dtype inside.
# Seen: for two samples of 1000 values around 100, p is 0.163 for float16 and 0.381 for the same values in float64.
#       The standard error of a mean, sem, of 1000 values around 100 is Inf. scipy does not warn.
# Why it matters: metrics that were logged in half precision are compared with a wrong p.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'scipy==1.17.1' 'numpy==2.4.6'
"$environment/bin/python" -W ignore - <<'END'
import numpy as np
from scipy import stats

draw = np.random.default_rng(0)
a, b = ((draw.standard_normal(1000) + 100).astype(np.float16) for _ in range(2))
half, double = stats.ttest_ind(a, b), stats.ttest_ind(a.astype(float), b.astype(float))
errors = stats.sem(a), stats.sem(a.astype(float))
print("p in float16 and in float64:", half.pvalue, double.pvalue, "standard errors:", *errors)
assert abs(half.pvalue - 0.163) < 0.001
assert abs(double.pvalue - 0.381) < 0.001
assert np.isinf(errors[0])
assert abs(errors[1] - 0.0309) < 0.0001
END

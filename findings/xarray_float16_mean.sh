#!/usr/bin/env bash
# xarray 2026.9.0, numpy 2.4.6: the mean of float16 ones is 0.41 with xarray and np.nanmean, 1 with np.mean.
#
# Guess: a mean that skips NaN is np.mean where there is no NaN, and np.mean adds float16 in float32.
# Seen: ones of shape [5000, 3], along the first axis: np.mean 1, np.nanmean and DataArray.mean 0.41. 1000 values of
#       40000: np.mean and DataArray.mean(skipna=False) 40000, np.nanmean and DataArray.mean Inf. np.std of the ones
#       along the first axis is 0.45.
# Why it matters: skipna is xarray's default for floats, so that a mean over time steps of captured fp16 tensors is
#       wrong with no warning, by a factor that depends on their number.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'numpy==2.4.6' 'xarray==2026.9.0'
"$environment/bin/python" -W ignore - <<'END'
import numpy as np
import xarray as xr

ones, large = np.ones((5000, 3), np.float16), np.full((1000, 1), 40000, np.float16)
for values in (ones, large):
    array = xr.DataArray(values, dims=("step", "column"))
    print(
        "np.mean",
        values.mean(0)[0],
        "np.nanmean",
        np.nanmean(values, 0)[0],
        "xarray",
        array.mean("step").values[0],
        "skipna=False",
        array.mean("step", skipna=False).values[0],
        "np.std",
        values.std(0)[0],
    )
    assert values.mean(0)[0] == array.mean("step", skipna=False).values[0] == values[0, 0]
    assert np.array_equal(np.nanmean(values, 0), array.mean("step").values)
assert abs(np.nanmean(ones, 0)[0] - 0.41) < 0.01
assert np.isinf(np.nanmean(large, 0)[0])
assert abs(ones.std(0)[0] - 0.45) < 0.01
END

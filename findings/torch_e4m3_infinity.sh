#!/usr/bin/env bash
# torch 2.13.0, CPU: a cast of Inf to float8_e4m3fn gives the finite value 448.
#
# Guess: E4M3 has no Inf, so Inf becomes NaN, as in ml_dtypes and in torch before its casts saturated.
# Seen: torch gives 448 for Inf and for 1000; ml_dtypes 0.6.0 gives NaN for both. NaN stays NaN.
#       float8_e5m2 keeps Inf, and float8_e8m0fnu makes it NaN.
# Why it matters: a search for NaN and Inf in the quantised tensor does not find a gradient that has overflowed.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6' 'ml_dtypes==0.6.0'
"$environment/bin/python" -W ignore - <<'END'
import ml_dtypes
import numpy as np
import torch

values = [float("inf"), -float("inf"), 1000.0, float("nan")]
e4m3 = torch.tensor(values).to(torch.float8_e4m3fn).float()
peer = np.float32(values).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
e5m2 = torch.tensor(values).to(torch.float8_e5m2).float()
e8m0 = torch.tensor(values[:1]).to(torch.float8_e8m0fnu).float()
print("torch e4m3fn", e4m3.tolist(), "ml_dtypes e4m3fn", peer.tolist())
print("torch e5m2", e5m2.tolist(), "torch e8m0 of Inf", e8m0.item())
assert e4m3[:3].tolist() == [448.0, -448.0, 448.0]
assert e4m3[3].isnan()
assert np.isnan(peer).all()
assert e5m2[:2].isinf().all()
assert e8m0.isnan().all()
END

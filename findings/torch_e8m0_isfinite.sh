#!/usr/bin/env bash
# torch 2.13.0, CPU: torch.isfinite of an E8M0 NaN is True.
#
# Guess: False, as for float8_e5m2, or "not implemented", as for float8_e4m3fn.
# Seen: a tensor of float8_e8m0fnu made of 1, NaN and Inf: isnan gives [False, True, True], isfinite
#       [True, True, True].
# Why it matters: torch.isfinite(scales).all() accepts the scales of blocks that contained NaN or Inf. E8M0 has no Inf:
#       look with isnan, or for the code 255.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6'
"$environment/bin/python" -W ignore - <<'END'
import math

import torch

values = torch.tensor([1.0, math.nan, math.inf])
scales = values.to(torch.float8_e8m0fnu)
print("codes:", scales.view(torch.uint8).tolist())
print("isnan:", scales.isnan().tolist(), "isfinite:", scales.isfinite().tolist())
assert scales.view(torch.uint8).tolist() == [127, 255, 255]
assert scales.isnan().tolist() == [False, True, True]
assert scales.isfinite().tolist() == [True, True, True]
assert scales.float().isfinite().tolist() == [True, False, False]
assert values.to(torch.float8_e5m2).isfinite().tolist() == [True, False, False]
try:
    values.to(torch.float8_e4m3fn).isfinite()
except NotImplementedError as error:
    print("float8_e4m3fn:", error)
else:
    raise AssertionError("isfinite works for float8_e4m3fn")
END

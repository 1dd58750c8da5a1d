#!/usr/bin/env bash
# pychop 0.6.2: a number up to twice the largest one of the format becomes zero.
#
# Guess: what is above the largest number becomes Inf, or the largest number.
# Seen: in fp16 (5 exponent bits, 10 of the fraction) 65520 becomes 65536, which fp16 does not have; 65536 to 131071
#       become 0; from 131072 on Inf. With 4 and 3 bits (largest 240) 448 becomes 0. NumPy's and torch's backends agree.
# Why it matters: a simulated training in which the largest activations are zero does not look broken.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'pychop==0.6.2' 'torch==2.13.0' 'numpy==2.4.6'
"$environment/bin/python" -W ignore - <<'END'
import math

import numpy as np
import pychop
import torch

values = [65504.0, 65520.0, 65536.0, 100000.0, 131071.0, 131072.0]
pychop.backend("numpy")
in_numpy = np.asarray(pychop.Chop(exp_bits=5, sig_bits=10, rmode=1)(np.array(values))).tolist()
narrow = np.asarray(pychop.Chop(exp_bits=4, sig_bits=3, rmode=1)(np.array([240.0, 448.0, 512.0]))).tolist()
pychop.backend("torch")
in_torch = pychop.Chop(exp_bits=5, sig_bits=10, rmode=1)(torch.tensor(values, dtype=torch.float64)).tolist()
print(dict(zip(values, in_numpy, strict=True)), narrow)
assert in_numpy == in_torch == [65504.0, 65536.0, 0.0, 0.0, 0.0, math.inf]
assert narrow == [240.0, 0.0, math.inf]
END

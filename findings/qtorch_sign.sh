#!/usr/bin/env bash
# qtorch 0.3.0, torch 2.13.0, CPU: float_quantize with 8 exponent and 23 mantissa bits changes the sign.
#
# Guess: that is float32, so that nothing changes. Below it Inf and NaN stay, or Inf becomes the largest number.
# Seen: float_quantize(x, exp=8, man=23, rounding="nearest") is -x; with man=22 it is x. E4M3 reaches 480, E5M2 114688
#       and fp16 131008, because the highest exponent holds numbers; NaN becomes this largest number as well.
# Why it matters: a sweep over mantissa widths ends with float32 as its baseline, and this one diverges. A NaN gradient
#       continues as a large positive number. QPyTorch needs a C++ compiler.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
export TORCH_EXTENSIONS_DIR="$environment/extensions"
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6' 'qtorch==0.3.0' 'ninja==1.13.0' 'setuptools==84.2.1'
PATH="$environment/bin:$PATH" "$environment/bin/python" -W ignore - <<'END'
import math

import torch
from qtorch.quant import float_quantize


def quantised(values: list[float], exp: int, man: int) -> list[float]:
    return float_quantize(torch.tensor(values), exp=exp, man=man, rounding="nearest").tolist()


plain = [1.0, -1.5, 448.0]
print("man=22:", quantised(plain, 8, 22), "man=23:", quantised(plain, 8, 23))
assert quantised(plain, 8, 22) == plain
assert quantised(plain, 8, 23) == [-value for value in plain]
for exp, man, largest in ((4, 3, 480.0), (5, 2, 114688.0), (5, 10, 131008.0)):
    seen = quantised([1e6, math.inf, math.nan], exp, man)
    print("exp", exp, "man", man, "1e6, Inf, NaN:", seen)
    assert seen == [largest] * 3
END

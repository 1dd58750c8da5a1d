#!/usr/bin/env bash
# bitsandbytes 0.50.2, torch 2.13.0, CPU: in 8-bit blocks NaN becomes -0.993 of the block's largest value.
#
# Guess: the block is NaN, as it is with the 4-bit formats of the same library.
# Seen: a block with NaN, 1, 0.5 and zeros: quantize_blockwise and back gives -0.993, 1, 0.50 and about 0. A block with
#       Inf becomes Inf everywhere, except at the Inf, which becomes -Inf. quantize_4bit (nf4, fp4) gives NaN.
# Why it matters: a NaN that enters an 8-bit state is an ordinary number one step later, so that a search for NaN after
#       the step finds nothing, and an overflow has the wrong sign.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6' 'bitsandbytes==0.50.2'
"$environment/bin/python" -W ignore - <<'END'
import math

import torch
from bitsandbytes import functional


def round_trip(first: float) -> list[float]:
    block = torch.zeros(256)
    block[:3] = torch.tensor([first, 1.0, 0.5])
    return functional.dequantize_blockwise(*functional.quantize_blockwise(block)).tolist()


print("NaN:", round_trip(math.nan)[:4], "Inf:", round_trip(math.inf)[:4])
assert not any(math.isnan(value) for value in round_trip(math.nan))
assert abs(round_trip(math.nan)[0] + 0.993) < 0.001
assert round_trip(math.nan)[1] == 1
assert round_trip(math.inf) == [-math.inf] + [math.inf] * 255
for kind in ("nf4", "fp4"):
    block = torch.ones(64)
    block[0] = math.nan
    assert functional.dequantize_4bit(*functional.quantize_4bit(block, blocksize=64, quant_type=kind)).isnan().all()
END

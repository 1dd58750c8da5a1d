#!/usr/bin/env bash
# gguf 0.19.0, mlx 0.32.4 (CPU): MXFP4 rounds ties toward zero, and a block with a NaN becomes a block of zeros.
#
# Guess: the rules of the OCP specification: the scale is 2^(floor(log2(amax)) - 2), ties go to the even code, NaN gives
#        the scale NaN, as with torchao.
# Seen:
#                                  gguf               mlx                ml_dtypes' cast
#   0.75, 1.75, 2.5, 3.5, 5        0.5, 1.5, 2, 3, 4  0.5, 1.5, 2, 3, 4  1, 2, 2, 4, 4
#   0.5 in a block of amax 6.1     0.5                0
#   one NaN among 31 ones          32 zeros           32 zeros
#   mlx's mxfp8 makes 32 times 896 of the last block, its affine mode with 8 bits 32 ones: the NaN is gone.
# Why it matters: both tools differ from the specification where a value is a tie, as many bf16 weights are, and from
#       each other where amax is more than 1.5 times a power of two. NaN does not show in a quantised file.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'gguf==0.19.0' 'mlx[cpu]==0.32.4' 'ml_dtypes==0.6.0' 'numpy==2.4.6'
"$environment/bin/python" -W ignore - <<'END'
import math

import ml_dtypes
import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType, quants


def of_gguf(block: list[float]) -> list[float]:
    kind = GGMLQuantizationType.MXFP4
    return quants.dequantize(quants.quantize(np.array(block, np.float32), kind), kind).tolist()


def of_mlx(block: list[float], mode: str = "mxfp4", bits: int = 4) -> list[float]:
    parts = mx.quantize(mx.array([block]), group_size=32, bits=bits, mode=mode)
    return mx.dequantize(*parts, group_size=32, bits=bits, mode=mode).astype(mx.float32)[0].tolist()


ties = [6.0, 5.0, 3.5, 2.5, 1.75, 0.75, 0.0, 0.0] * 4
even = np.array(ties[:6]).astype(ml_dtypes.float4_e2m1fn).astype(float).tolist()
print("ties", ties[:6], "gguf", of_gguf(ties)[:6], "mlx", of_mlx(ties)[:6], "even", even)
assert even == [6.0, 4.0, 4.0, 2.0, 2.0, 1.0]
assert of_gguf(ties)[:6] == of_mlx(ties)[:6] == [6.0, 4.0, 3.0, 2.0, 1.5, 0.5]
large = [7.9] + [1.0] * 31
print("amax 7.9: gguf", of_gguf(large)[0], "mlx", of_mlx(large)[0])
assert (of_gguf(large)[0], of_mlx(large)[0]) == (6.0, 8.0)
for amax, expected in ((5.9, (0.5, 0.5)), (6.1, (0.5, 0.0))):
    assert (of_gguf([amax] + [0.5] * 31)[1], of_mlx([amax] + [0.5] * 31)[1]) == expected
diverged = [math.nan] + [1.0] * 31
print("NaN: gguf", set(of_gguf(diverged)), "mlx", set(of_mlx(diverged)), "mxfp8", set(of_mlx(diverged, "mxfp8", 8)))
assert set(of_gguf(diverged)) == set(of_mlx(diverged)) == {0.0}
assert set(of_mlx(diverged, "mxfp8", 8)) == {896.0}
assert set(of_mlx(diverged, "affine", 8)) == {1.0}
END

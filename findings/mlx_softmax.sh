#!/usr/bin/env bash
# mlx 0.32.4, CPU: bf16 probabilities of mx.softmax sum to 3.9 along the last axis and to 1 along the first.
#
# Guess: every softmax adds in float32 and sums to 1 but for rounding, as mx.sum, torch and JAX do; so does a mean.
# Seen: the softmax of 1000 equal bf16 logits is 1/256 for each: the sum stops at 256. Of a [1000, 4] array along axis 0
#       it is 1/1000, with precise=True as well, and mx.fast.scaled_dot_product_attention is right. fp16: 5000
#       probabilities sum to 2.44. mx.mean of 1000 values of 300 is Inf in fp16, although mx.sum of 1000 ones is 1000.
#       mx.arange(0, 1000, 1, dtype=mx.bfloat16) stops at 256.
# Why it matters: attention, routers and losses that are written out with mx.softmax or nn.softmax are too large by a
#       factor that grows with the length.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'mlx[cpu]==0.32.4'
"$environment/bin/python" -W ignore - <<'END'
import math

import mlx.core as mx

mx.set_default_device(mx.cpu)


def total(probabilities: mx.array) -> float:
    return probabilities.astype(mx.float32).sum(0).max().item()


for dtype, count, last in ((mx.bfloat16, 1000, 3.90625), (mx.float16, 5000, 2.44140625)):
    logits = mx.zeros(count, dtype=dtype)
    sums = {
        "last axis": total(mx.softmax(logits)),
        "first axis": total(mx.softmax(mx.zeros((count, 4), dtype=dtype), axis=0)),
        "precise": total(mx.softmax(logits, precise=True)),
    }
    print(dtype, sums)
    assert abs(sums["last axis"] - last) < 1e-3
    # One rounding of each probability: half a last bit of bf16.
    assert abs(sums["first axis"] - 1) < 2.0**-8
    assert abs(sums["precise"] - 1) < 2.0**-8
    keys, values = mx.zeros((1, 1, count, 64), dtype=dtype), mx.ones((1, 1, count, 64), dtype=dtype)
    assert mx.fast.scaled_dot_product_attention(keys[:, :, :1], keys, values, scale=1.0)[0, 0, 0, 0].item() == 1
    assert mx.ones(count, dtype=dtype).sum().item() == count
mean = mx.mean(mx.full((1000,), 300, dtype=mx.float16)).item()
counted = mx.arange(0, 1000, 1, dtype=mx.bfloat16).max().item()
print("mean of 300 in fp16:", mean, "largest of arange(0, 1000) in bf16:", counted)
assert math.isinf(mean)
assert counted == 256
END

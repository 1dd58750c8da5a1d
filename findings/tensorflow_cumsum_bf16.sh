#!/usr/bin/env bash
# tensorflow 2.21.0 (tensorflow-cpu): tf.cumsum of bf16 and fp16 adds in that dtype, and stops at 256 or 2048.
#
# Guess: it accumulates in float32, as tf.reduce_sum does (and torch.cumsum): 1000 ones end at 1000.
# Seen: 1000 ones in bf16 end at 256, 5000 in fp16 at 2048; tf.reduce_sum gives 1000 and 5000. The gradient of a bias
#       in bf16 (tf.nn.bias_add) over 1000 rows of ones is 256 too.
# Why it matters: the gradient of a bias is a sum over all tokens: under mixed precision that keeps bf16 it is cut
# off.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
export TF_CPP_MIN_LOG_LEVEL=3
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'tensorflow-cpu==2.21.0'
"$environment/bin/python" -W ignore - <<'END'
import tensorflow as tf


def last(n: int, dtype: tf.DType) -> tuple[float, float]:
    ones = tf.ones(n, dtype)
    return tuple(float(tf.cast(x, tf.float32)) for x in (tf.cumsum(ones)[-1], tf.reduce_sum(ones)))


bias = tf.Variable(tf.zeros(1, tf.bfloat16))
with tf.GradientTape() as tape:
    total = tf.reduce_sum(tf.nn.bias_add(tf.ones((1000, 1), tf.bfloat16), bias))
gradient = float(tf.cast(tape.gradient(total, bias)[0], tf.float32))
seen = last(1000, tf.bfloat16), last(5000, tf.float16)
print("cumsum and sum of 1000 in bf16, of 5000 in fp16:", *seen, "gradient of a bias:", gradient)
assert seen == ((256.0, 1000.0), (2048.0, 5000.0))
assert gradient == 256.0
END

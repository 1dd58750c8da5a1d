#!/usr/bin/env bash
# torch 2.13.0 (CPU), ml_dtypes 0.6.0, onnx 1.23.2: a cast of float32 to E8M0 has three meanings.
#
# Guess: each rounds to the nearest power of two, ties to the even code (3 becomes 2), clamps to 2^-127 and 2^127, and
#        makes NaN only of NaN and of negative numbers.
# Seen, by default:
#                0        1.25     3        3e38     -1
#   torch        2^-127   1        4        NaN      1
#   ml_dtypes    NaN      1        4        NaN      NaN
#   onnx         2^-127   2        4        2^127    1
#   Ties go up in all. onnx rounds up unless round_mode says otherwise, and even the exact 2^-127 becomes 2^-126.
#   In ml_dtypes the sum of an E8M0 array is NaN, whatever it contains, because the sum starts at 0.
# Why it matters: the scale of a block of zeros is 2^-127 or NaN, and scales of 1.25 differ by a factor of 2.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6' 'ml_dtypes==0.6.0' 'onnx==1.23.2'
"$environment/bin/python" -W ignore - <<'END'
import ml_dtypes
import numpy as np
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

values = np.float32([0, 1.25, 3, 3e38, -1, 2**-127])
nan = float("nan")


def onnx_cast(x: np.ndarray) -> np.ndarray:
    nodes = [
        helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT8E8M0),
        helper.make_node("Cast", ["y"], ["z"], to=TensorProto.FLOAT),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None]) for name in "xz"]
    graph = helper.make_graph(nodes, "cast", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=12)
    return ReferenceEvaluator(model).run(None, {"x": x})[0]


seen = {
    "torch": torch.from_numpy(values).to(torch.float8_e8m0fnu).float().numpy(),
    "ml_dtypes": values.astype(ml_dtypes.float8_e8m0fnu).astype(np.float32),
    "onnx": onnx_cast(values),
}
expected = {
    "torch": [2**-127, 1, 4, nan, 1, 2**-127],
    "ml_dtypes": [nan, 1, 4, nan, nan, 2**-127],
    "onnx": [2**-127, 2, 4, 2**127, 1, 2**-126],
}
for name, result in seen.items():
    print(name, result)
    assert np.array_equal(result, np.float32(expected[name]), equal_nan=True), name
total = np.ones(4, ml_dtypes.float8_e8m0fnu).sum()
print("sum of four ones in ml_dtypes:", total)
assert np.isnan(np.float32(total))
END

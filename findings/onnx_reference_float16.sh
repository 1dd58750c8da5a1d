#!/usr/bin/env bash
# onnx 1.23.2, onnxruntime 1.32.0, CPU: the reference evaluator normalises in float16, the specification in float32.
#
# Guess: the reference follows stash_type = 1, the default, which says that the statistics are float32.
# Seen, for 1 x 10000 values of 100 and 300 in float16:
#                           ReferenceEvaluator   onnxruntime
#   LayerNormalization      NaN                  -1 and 1
#   RMSNormalization        0                    0.447 and 1.342
#   ReduceMean of 1000 x 40000: Inf and 40000. ReduceMean of [5000, 3] ones along axis 0: 0.41 and 1.
# Why it matters: a backend is compared with this evaluator. In float16 the evaluator is the one that is wrong: cast the
#       model to float32 for the comparison.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'onnx==1.23.2' 'onnxruntime==1.32.0' 'numpy==2.4.6'
"$environment/bin/python" -W ignore - <<'END'
import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator


def both(operator: str, values: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the reference and of onnxruntime; `second` is the scale, or the axes."""
    place = helper.make_tensor_value_info("x", TensorProto.FLOAT16, values.shape)
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT16, None)
    node = helper.make_node(operator, ["x", "second"], ["y"])
    graph = helper.make_graph([node], "g", [place], [result], [numpy_helper.from_array(second, "second")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return ReferenceEvaluator(model).run(None, {"x": values})[0], session.run(None, {"x": values})[0]


values = np.repeat(np.array([100, 300], np.float16), 5000)[None]
for operator, nan, ends in (("LayerNormalization", True, [-1.0, 1.0]), ("RMSNormalization", False, [0.447, 1.342])):
    reference, backend = both(operator, values, np.ones(10000, np.float16))
    print(operator, "reference:", reference[0, [0, -1]], "onnxruntime:", backend[0, [0, -1]])
    assert np.isnan(reference).all() if nan else not reference.any()
    assert np.allclose(backend[0, [0, -1]], ends, atol=1e-3)
reference, backend = both("ReduceMean", np.full((1, 1000), 40000, np.float16), np.array([1]))
print("ReduceMean of 40000:", reference.item(), backend.item())
assert (reference.item(), backend.item()) == (np.inf, 40000)
reference, backend = both("ReduceMean", np.ones((5000, 3), np.float16), np.array([0]))
print("ReduceMean of ones along axis 0:", reference[0, 0], backend[0, 0])
assert reference[0, 0] < 0.5
assert backend[0, 0] == 1
END

#!/usr/bin/env bash
# onnxruntime 1.32.0, CPU: Cast to FLOAT8E5M2 with saturate=0 makes NaN of finite numbers.
#
# Guess: what rounds beyond 57344 becomes Inf, as in onnx's reference implementation, ml_dtypes and torch.
# Seen: 61440, a tie, to 65535 become NaN; 65536 and more become Inf. onnx 1.23.2 gives Inf from 61440 on.
# Why it matters: a comparison of overflow rates, Inf against NaN, depends on the runtime.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'numpy==2.4.6' 'onnx==1.23.2' 'onnxruntime==1.32.0'
"$environment/bin/python" -W ignore - <<'END'
import numpy as np
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

values = np.float32([57344, 61439, 61440, 62000, 65535, 65536, 70000, np.inf])
nodes = [
    helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT8E5M2, saturate=0),
    helper.make_node("Cast", ["y"], ["z"], to=TensorProto.FLOAT),
]
ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None]) for name in "xz"]
graph = helper.make_graph(nodes, "cast", ends[:1], ends[1:])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
options = onnxruntime.SessionOptions()
options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
runtime = session.run(None, {"x": values})[0]
reference = ReferenceEvaluator(model).run(None, {"x": values})[0]
print("onnxruntime", runtime, "onnx", reference)
assert np.isnan(runtime[2:5]).all()
assert np.isinf(runtime[5:]).all()
assert np.isinf(reference[2:]).all()
assert (runtime[:2] == 57344).all()
END

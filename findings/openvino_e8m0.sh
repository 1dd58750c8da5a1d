#!/usr/bin/env bash
# openvino 2026.4.1, CPU: what a conversion gives depends on whether it is done when the model is compiled or when it
# runs.
#
# Guess: f8e8m0 of 0 is its smallest value, 2^-127, in both; a conversion to f16 and back rounds in both.
# Seen: of an input, f8e8m0 gives 2^-127 for 0 and -Inf; of a constant, the same conversions give 0. A conversion of
#       an input to f16 and back does nothing: 65536 stays 65536 and 1e-9 stays 1e-9. Of a constant it gives Inf and 0.
# Why it matters: a scale of zero, or a rounding that was written into a graph, is there for weights and not for
# activations.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'openvino==2026.4.1' 'numpy==2.4.6'
"$environment/bin/python" -W ignore - <<'END'
import math

import numpy as np
import openvino as ov
import openvino.opset15 as op

values = np.array([0.0, -math.inf, 65536.0, 1e-9], np.float32)


def converted(kind: str, source: ov.Node) -> ov.Node:
    return op.convert(op.convert(source, kind), "f32")


def run(kind: str) -> tuple[list[float], list[float]]:
    """Of an input and of a constant."""
    compiled = {"INFERENCE_PRECISION_HINT": "f32"}
    place = op.parameter([len(values)], np.float32)
    model = ov.Core().compile_model(ov.Model([converted(kind, place)], [place]), "CPU", compiled)
    folded = ov.Core().compile_model(ov.Model([converted(kind, op.constant(values))], []), "CPU", compiled)
    return model([values])[0].tolist(), folded([])[0].tolist()


for kind in ("f8e8m0", "f16"):
    print(kind, "of", values.tolist(), "as an input and as a constant:", *run(kind))
of_input, of_constant = run("f8e8m0")
assert of_input[:2] == [2.0**-127, 2.0**-127]
assert of_constant[:2] == [0.0, 0.0]
of_input, of_constant = run("f16")
assert of_input[2:] == values[2:].tolist()
assert of_constant[2:] == [math.inf, 0.0]
END

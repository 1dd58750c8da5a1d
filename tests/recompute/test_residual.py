"""The residual stream, from the branches' captured tensors alone.

    resid_mid = before + proj's output      resid_post = resid_mid + fc2's output

in one rounding to bf16, bit for bit (no dropout, no bias), and each branch reads the stream after its RMSNorm, whose
weights are 1 at first. In the backward pass an addition passes its gradient to both sides unchanged, and the stream
adds the norm's gradient of the branch:

    grad_resid_mid = grad_resid_post + norm'(fc1's grad_input)

The norm is torch's, which rounds its steps to bf16 (2^-8 relative each, at most): relative to the norm of the whole, a
few of them stay below TOLERANCE; a missing branch would deviate by at least four times that, which is tested too.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from quantexp.runs.paths import RunDir
from quantexp.schema import Experiment

from .captured import Array, read_capture
from .grids import rounded

TOLERANCE = 2.0**-6


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_the_stream_and_its_gradient_are_the_sums_of_the_branches(
    run_tiny: Callable[..., RunDir], tiny: Callable[..., Experiment], recompute: str
) -> None:
    words = ["quant=FA_linear_mxfp4", "capture.residual=true", f"training.recompute={recompute}"]
    run = run_tiny(*words, "capture.stop_after_capture=true", "model.init_std=0.15")
    modules = {(m.layer, m.name): m for m in read_capture(run.tensors)}
    epsilon = tiny(*words).model.norm_epsilon
    stream = modules[0, "residual"].forward("resid_pre")
    gradient = modules[0, "residual"].backward("grad_resid_pre")
    assert "resid_pre" not in {name for _, name in modules[1, "residual"].tensors}
    for layer in (0, 1):
        residual = modules[layer, "residual"]
        assert (residual.layer_type, residual.formats) == ("residual", {})
        for enters, leaves, state in (("qkv", "proj", "resid_mid"), ("fc1", "fc2", "resid_post")):
            entry, exit_ = modules[layer, enters], modules[layer, leaves]
            assert _distance(entry.forward("input"), _norm(stream, epsilon)) < TOLERANCE
            after, grad_after = residual.forward(state), residual.backward(f"grad_{state}")
            assert np.array_equal(rounded(stream + exit_.forward("output"), "bfloat16"), after)
            assert np.array_equal(exit_.backward("grad_output"), grad_after)
            branch = _norm_gradient(stream, entry.backward("grad_input"), epsilon)
            assert _distance(gradient, grad_after + branch) < TOLERANCE
            assert _distance(gradient, grad_after) > 4 * TOLERANCE, "the branch counts"
            stream, gradient = after, grad_after


def _norm(x: Array, epsilon: float) -> Array:
    result: Array = x / _rms(x, epsilon)
    return result


def _norm_gradient(x: Array, g: Array, epsilon: float) -> Array:
    y = _norm(x, epsilon)
    result: Array = (g - y * (g * y).mean(-1, keepdims=True)) / _rms(x, epsilon)
    return result


def _rms(x: Array, epsilon: float) -> Array:
    result: Array = np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
    return result


def _distance(a: Array, b: Array) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))

"""Products that quantise the forward copy again, and gradients in the domain of its transform, against float64.

The oracle is the formula of Quartet (arXiv 2505.14669, algorithm 1), written out in numpy:

    y = X W^T, X = Q(x H), W = Q(w H)     dx = ((Q(g) Q(W)) M_x) H^T     dw = ((Q(g^T) Q(X)) M_w) H^T

with Q along the axis that each product reduces, and M zero where x H, or w H, lies beyond 6 in units of its scale.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantexp.config.compose import compose
from quantexp.quant.linear import clipped_input, dgrad, fprop, wgrad
from quantexp.quant.multiply import clipped_gradient, turned_back
from quantexp.quant.precision import ModuleId, ModulePrecision, precision_map
from quantexp.quant.sites import DGRAD_W, FPROP_W, WGRAD_X
from quantexp.quant.step_state import StepState, use_step_state

Array = NDArray[np.float64]
#: The positive values of E2M1.
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
TRANSFORM = "hadamard: deterministic, hadamard_block: 32"
CLIPPED = f"{{x: {{{TRANSFORM}, clip_gradient: true}}, w: {{{TRANSFORM}, clip_gradient: true}}}}"


@pytest.fixture(autouse=True)
def _state() -> Iterator[None]:
    with use_step_state(StepState(1, 1, 0)):
        yield


def declared(*words: str) -> ModulePrecision:
    experiment = compose(["training=fast", "training.precision=fp32", *words], None, {})
    return precision_map(experiment.model, experiment.quant)[ModuleId(0, "fc1")]


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    """x [64, 1, 96], w [160, 96] and g [64, 1, 160] with some large elements, in float32."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((64, 1, 96), (160, 96), (64, 1, 160))
    x, w, g = (torch.randn(shape, generator=generator) ** 3 for shape in shapes)
    return x, w, g


def mxfp4(x: Array, part: float = 1.0) -> tuple[Array, NDArray[np.bool_]]:
    """A part of x in blocks of 32 along its last axis by the rule floor, ties to even, and what lies beyond 6."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    scale = 2.0 ** (np.frexp(np.abs(blocks).max(-1, keepdims=True))[1] - 3.0)
    v = part * np.abs(blocks) / scale
    distance = np.abs(np.minimum(v, 6)[..., None] - GRID)
    nearest = distance == distance.min(-1, keepdims=True)
    even = np.array([1, 0, 1, 0, 1, 0, 1, 0], dtype=bool)  # every other code has an even mantissa
    index = np.where(nearest.sum(-1) > 1, (nearest & even).argmax(-1), nearest.argmax(-1))
    return (np.sign(blocks) * GRID[index] * scale).reshape(x.shape), (v > 6).reshape(x.shape)


def walsh(extent: int, c: float) -> Array:
    """c times the 32 x 32 Walsh-Hadamard matrix, on the diagonal."""
    h = np.ones((1, 1))
    for _ in range(5):
        h = np.block([[h, h], [h, -h]])
    return np.kron(np.eye(extent // 32), h).astype(np.float64) * c


def close(ours: Tensor, theirs: Array) -> None:
    """A float32 sum of 160 terms, and 32 in the transform, err by less than 1e-6 of the largest result."""
    got = ours.double().numpy().reshape(theirs.shape)
    assert np.abs(got - theirs).max() < 1e-6 * np.abs(theirs).max()


def test_quartets_products_are_those_of_its_formula() -> None:
    precision = declared("quant=linear_mxfp4", f"quant.linear={{of: forward, fprop: {CLIPPED}}}")
    x, w, g = tensors()
    y = fprop(precision, x, w)
    dx = clipped_input(precision, dgrad(precision, g, w), x, None)
    dx = turned_back(precision, DGRAD_W, dx)
    dw = clipped_gradient(precision, FPROP_W, wgrad(precision, g, x), w)
    dw = turned_back(precision, WGRAD_X, dw)

    X, W, G = (t.double().numpy().reshape(-1, t.shape[-1]) for t in (x, w, g))
    # 2^-3 of the left and 2^-2 of the right operand: together 1/32.
    (X_q, over_x), (W_q, over_w) = mxfp4(X @ walsh(96, 2.0**-3)), mxfp4(W @ walsh(96, 2.0**-2))
    assert 0.001 < over_x.mean() < 0.2
    close(y, X_q @ W_q.T)
    product = mxfp4(G)[0] @ mxfp4(W_q.T.copy())[0].T
    close(dx, np.where(over_x, 0, product) @ walsh(96, 2.0**-3))
    product = mxfp4(G.T.copy())[0] @ mxfp4(X_q.T.copy())[0].T
    close(dw, np.where(over_w, 0, product) @ walsh(96, 2.0**-2))


def test_gradients_by_the_copies_themselves_are_transformed_back() -> None:
    """As QuEST (arXiv 2502.05003) trains: the backward products in high precision, from the forward's copies."""
    again = "{g: {format: bf16}, w: {format: reuse}}", "{g: {format: bf16}, x: {format: reuse}}"
    slots = f"{{fprop: {CLIPPED}, dgrad: {again[0]}, wgrad: {again[1]}}}"
    precision = declared("quant=linear_mxfp4", f"quant.linear={slots}")
    x, w, g = tensors()
    dx = clipped_input(precision, dgrad(precision, g, w), x, None)
    dw = clipped_gradient(precision, FPROP_W, wgrad(precision, g, x), w)
    X, W, G = (t.double().numpy().reshape(-1, t.shape[-1]) for t in (x, w, g))
    (X_q, over_x), (W_q, over_w) = mxfp4(X @ walsh(96, 2.0**-3)), mxfp4(W @ walsh(96, 2.0**-2))
    close(turned_back(precision, DGRAD_W, dx), np.where(over_x, 0, G @ W_q) @ walsh(96, 2.0**-3))
    product = np.where(over_w, 0, G.T @ X_q)
    close(turned_back(precision, WGRAD_X, dw), product @ walsh(96, 2.0**-2))


def test_copy_without_a_transform_is_quantised_along_the_other_axis() -> None:
    precision = declared("quant=linear_mxfp4", "quant.linear.of=forward")
    x, w, g = tensors()
    X, W, G = (t.double().numpy().reshape(-1, t.shape[-1]) for t in (x, w, g))
    close(dgrad(precision, g, w), mxfp4(G)[0] @ mxfp4(mxfp4(W)[0].T.copy())[0].T)
    close(wgrad(precision, g, x), mxfp4(G.T.copy())[0] @ mxfp4(mxfp4(X)[0].T.copy())[0].T)
    dx = dgrad(precision, g, w)
    assert turned_back(precision, DGRAD_W, dx) is dx


def test_both_parts_of_a_copy_that_is_scaled_twice_are_compensated() -> None:
    precision = declared(
        *("quant=linear_mxfp4", "quant.linear.of=forward", "quant.linear.fprop.w.pre_scale=true"),
        "quant.linear.dgrad.w.pre_scale=0.8",
    )
    _, w, g = tensors()
    W, G = (t.double().numpy().reshape(-1, t.shape[-1]) for t in (w, g))
    W_q = mxfp4(mxfp4(W, 0.75)[0].T.copy(), 0.8)[0].T
    close(dgrad(precision, g, w), mxfp4(G)[0] @ W_q / (0.75 * 0.8))


def test_copy_in_the_working_precision_is_the_tensor_in_high_precision() -> None:
    precision = declared(
        "quant=linear_mxfp4", "quant.linear.of=forward", "quant.linear.fprop.w.format=bf16"
    )
    _, w, g = tensors()
    W, G = (t.double().numpy().reshape(-1, t.shape[-1]) for t in (w, g))
    close(dgrad(precision, g, w), mxfp4(G)[0] @ mxfp4(W.T.copy())[0].T)

"""What parts take out of an operand, and products of sums of parts: rational arithmetic, and the papers' formulas.

The formulas are computed in float64 from operands that other tests verify: those of `quantexp.formats.quantise`.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from quantexp.formats import quantise
from quantexp.formats.spec import Part, QuantSpec, get_format
from quantexp.formats.types import Axis, Take
from quantexp.proof.arithmetic.parts import part_of
from quantexp.quant.attention.call import AttentionCall
from quantexp.quant.attention.plain import scores
from quantexp.quant.linear import dgrad, fprop, wgrad
from quantexp.quant.parts import take_part
from quantexp.quant.precision import ModuleId, ModulePrecision
from quantexp.quant.sites import Site
from quantexp.quant.slots import resolve_site
from quantexp.schema import (
    LinearDgrad,
    LinearFprop,
    LinearSite,
    LinearWgrad,
    QkFprop,
    QkSite,
    Slot,
)
from quantexp.schema import Part as PartConfig

HIGH = QuantSpec(get_format("bf16"))
WEIGHT = QuantSpec(get_format("bf16"), weight=True)
MEAN = PartConfig("mean", "tokens", format="bf16")


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def wide(*shape: int, seed: int = 2) -> Tensor:
    """Signed numbers over all exponents of float32 and of bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-140, 120, shape, generator=generator)
    return torch.ldexp(torch.rand(shape, generator=generator) - 0.5, exponents)


def to_float32(number: Fraction) -> float:
    """The nearest float32, by way of the nearest float64."""
    return float(np.float32(float(number)))


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 96, 1000])
def test_mean_is_the_rational_mean_rounded(num_tokens: int) -> None:
    x = (normal(num_tokens, 2, 5) * 3 + 1).bfloat16().float()
    means = take_part(x, Part(Take.MEAN, HIGH, Axis.TOKENS))
    for channel in range(5):
        numbers = [Fraction(float(v)) for v in x[..., channel].flatten()]
        assert set(means[..., channel].flatten().tolist()) == {
            to_float32(sum(numbers, Fraction(0)) / len(numbers))
        }


def test_no_order_of_tokens_changes_a_mean_or_a_choice() -> None:
    x, order = wide(257, 33), torch.randperm(257, generator=torch.Generator().manual_seed(3))
    for part in (
        Part(Take.MEAN, HIGH, Axis.TOKENS),
        Part(Take.CHANNELS, HIGH, Axis.TOKENS, number=5),
        Part(Take.ELEMENTS, HIGH, share=0.05),
    ):
        assert torch.equal(take_part(x, part)[order], take_part(x[order], part))


def test_channels_are_those_of_the_largest_norm() -> None:
    x = normal(64, 3, 20)
    x[..., 7] *= 9
    x[..., 2] *= 8
    y = take_part(x, Part(Take.CHANNELS, HIGH, Axis.TOKENS, number=2))
    assert y.abs().sum((0, 1)).nonzero().flatten().tolist() == [2, 7]
    assert torch.equal(y[..., [2, 7]], x[..., [2, 7]])


def test_channels_of_a_weight_lie_along_either_axis() -> None:
    w = normal(12, 20)
    w[3] *= 50
    w[:, 5] *= 40
    columns = take_part(w, Part(Take.CHANNELS, WEIGHT, Axis.OUTPUT_WIDTH, number=1))
    assert columns.abs().sum(0).nonzero().flatten().tolist() == [5]
    rows = take_part(w, Part(Take.CHANNELS, WEIGHT, Axis.INPUT_WIDTH, number=1))
    assert rows.abs().sum(1).nonzero().flatten().tolist() == [3]


def test_elements_are_those_of_the_largest_magnitude_and_of_equal_ones_all() -> None:
    x = torch.tensor([[1.0, -4.0, 3.0], [4.0, 0.5, -3.0]])
    for number, magnitudes in ((1, {4.0}), (2, {4.0}), (3, {4.0, 3.0}), (50, {4.0, 3.0, 1.0, 0.5})):
        y = take_part(x, Part(Take.ELEMENTS, HIGH, number=number))
        assert set(y.abs().flatten().tolist()) - {0.0} == magnitudes


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_that_are_not_finite_make_one_mean_nan_and_no_channel(number: float) -> None:
    x = normal(8, 4)
    x[2, 1] = number
    means = take_part(x, Part(Take.MEAN, HIGH, Axis.TOKENS))
    assert means[0].isnan().tolist() == [False, True, False, False]
    assert not take_part(x, Part(Take.CHANNELS, HIGH, Axis.TOKENS, number=1)).any()


@pytest.mark.parametrize("shape", [(64, 2, 24), (1, 1, 24), (7, 24), (0, 24)])
@pytest.mark.parametrize("kind", ["normal", "wide", "zero", "nan", "inf", "equal"])
def test_integers_of_the_proof_take_the_same(shape: tuple[int, ...], kind: str) -> None:
    x = wide(*shape) if kind == "wide" else normal(*shape)
    if kind in ("zero", "equal"):
        x = torch.full_like(x, 0.0 if kind == "zero" else -3.0)
    elif kind in ("nan", "inf") and x.numel():
        x.view(-1)[x.numel() // 2] = float(kind)
    parts = [
        *(Part(Take.MEAN, HIGH, axis) for axis in (Axis.TOKENS, Axis.INPUT_WIDTH)),
        *(Part(Take.CHANNELS, HIGH, axis, share=0.2) for axis in (Axis.TOKENS, Axis.INPUT_WIDTH)),
        *(Part(Take.ELEMENTS, HIGH, number=n) for n in (1, 3, 10**9)),
    ]
    for part in parts:
        torch.testing.assert_close(
            part_of(x, part, is_weight=False), take_part(x, part), rtol=0, atol=0, equal_nan=True
        )
    for axis in (Axis.INPUT_WIDTH, Axis.OUTPUT_WIDTH):
        w, part = x.reshape(-1, 24), Part(Take.CHANNELS, WEIGHT, axis, number=2)
        torch.testing.assert_close(
            part_of(w, part, is_weight=True), take_part(w, part), rtol=0, atol=0, equal_nan=True
        )


def module(**products: object) -> ModulePrecision:
    site = LinearSite(format="mxfp8", **products)  # type: ignore[arg-type]
    return ModulePrecision(ModuleId(0, "fc1"), resolve_site(Site.LINEAR, site))


def q8(x: Tensor, axis: int) -> Tensor:
    return quantise(x.float(), "mxfp8", axis=axis, scale_rule="rceil").double()


def assert_is(y: Tensor, exact: Tensor, magnitudes: Tensor, num_terms: int) -> None:
    """One rounding to bf16 of a float32 sum, each addition of which errs by at most 2^-24 of what is added."""
    slack = 2.0**-8 * exact.abs() + 2 * num_terms * 2.0**-24 * magnitudes
    assert ((y.double() - exact).abs() <= slack).all()


def test_averis_is_the_product_of_the_remainder_and_that_of_the_mean() -> None:
    """y = 1 (mu W^T) + Q(X - 1 mu) Q(W)^T, with the means of all tokens (arXiv 2603.10444)."""
    x, w = (normal(32, 2, 64) + 5 * normal(64)).bfloat16(), normal(40, 64, seed=2).bfloat16()
    y = fprop(module(fprop=LinearFprop(x=Slot(parts=[MEAN]))), x, w)
    mu = x.double().mean((0, 1)).float().bfloat16()
    rest, right = q8(x.float() - mu.float(), -1), q8(w, -1).t()
    exact = mu.double() @ right + rest @ right
    assert_is(y, exact, mu.double().abs() @ right.abs() + rest.abs() @ right.abs(), 128)
    plain = q8(x, -1) @ right
    assert (y.double() - plain).abs().max() > (y.double() - exact).abs().max() * 4


def test_averis_gradients_have_means_of_their_own() -> None:
    """dX = Q(G - mu) W + mu W, dW = G^T X of sums of both operands."""
    g, x = (
        (normal(32, 2, n, seed=s) + 4 * normal(n, seed=s)).bfloat16() for n, s in ((40, 1), (64, 2))
    )
    w, split = normal(40, 64, seed=3).bfloat16(), Slot(parts=[MEAN])
    precision = module(dgrad=LinearDgrad(g=split), wgrad=LinearWgrad(g=split, x=split))
    mu_g, mu_x = (each.double().mean((0, 1)).float().bfloat16() for each in (g, x))
    rest, right = q8(g.float() - mu_g.float(), -1), q8(w, 0)
    exact = rest @ right + mu_g.double() @ right
    magnitudes = rest.abs() @ right.abs() + mu_g.double().abs() @ right.abs()
    assert_is(dgrad(precision, g, w), exact, magnitudes, 80)
    g_r, x_r = (q8(each.float() - mu.float(), 0) for each, mu in ((g, mu_g), (x, mu_x)))
    sums = [
        [each.reshape(64, -1), mu.double().expand(64, -1)]
        for each, mu in ((g_r, mu_g), (x_r, mu_x))
    ]
    pairs = [(a, b) for a in sums[0] for b in sums[1]]
    exact = torch.stack([a.t() @ b for a, b in pairs]).sum(0)
    magnitudes = torch.stack([a.abs().t() @ b.abs() for a, b in pairs]).sum(0)
    assert_is(wgrad(precision, g, x), exact, magnitudes, 256)


def test_hot_channels_of_the_error_are_added_back() -> None:
    """X ~ Q(X) + the error of some channels, and so W (arXiv 2602.02047)."""
    x, w = normal(48, 64).bfloat16(), normal(40, 64, seed=2).bfloat16()
    x[:, 9] *= 30
    hot = PartConfig("channels", "tokens", number=1, from_error=True, format="bf16")
    y = fprop(module(fprop=LinearFprop(x=Slot(parts=[hot]))), x, w)
    error = x.double() - q8(x, -1)
    channel = int((error**2).sum(0).argmax())
    left = q8(x, -1)
    left[:, channel] += error[:, channel].bfloat16().double()
    right = q8(w, -1).t()
    assert_is(y, left @ right, left.abs() @ right.abs(), 128)


def test_outliers_are_rounded_apart_from_their_blocks() -> None:
    """Elements of the largest magnitude in 8 bits, all others in 4 under scales without them (arXiv 2605.20402)."""
    x, w = normal(48, 64).bfloat16(), normal(40, 64, seed=2).bfloat16()
    x[5, 3], x[17, 40] = 90.0, -77.0
    part = PartConfig("elements", number=2, format="mxfp8")
    site = LinearSite(format="mxfp4", fprop=LinearFprop(x=Slot(parts=[part])))
    y = fprop(ModulePrecision(ModuleId(0, "fc1"), resolve_site(Site.LINEAR, site)), x, w)
    outliers = torch.where(x.abs() > 50, x.float(), 0.0)
    apart = q8(outliers, -1)
    rest = quantise(x.float() - apart.float(), "mxfp4", axis=-1).double()
    right = quantise(w.float(), "mxfp4", axis=-1).double().t()
    exact = apart @ right + rest @ right
    assert_is(y, exact, apart.abs() @ right.abs() + rest.abs() @ right.abs(), 128)


def test_a_key_without_its_mean_gives_the_same_probabilities() -> None:
    """softmax(q (k - mean)^T) = softmax(q k^T), with the mean of each sequence and head (arXiv 2410.02367)."""
    q, k = normal(24, 2, 2, 32).bfloat16(), (normal(24, 2, 1, 32, seed=2) + 8).bfloat16()
    k[:, 1] += 3
    taken_k = take_part(k.float(), Part(Take.MEAN, None, Axis.KEYS))
    for sequence in range(2):
        mean = k[:, sequence].double().mean(0).float()
        assert torch.equal(taken_k[:, sequence], mean.expand(24, 1, 32))
    site = QkSite("mxfp8", fprop=QkFprop(k=Slot(parts=[PartConfig("mean", "keys", format="none")])))
    plain, smooth = (
        ModulePrecision(ModuleId(0, "attention"), resolve_site(Site.QK, each))
        for each in (QkSite("mxfp8"), site)
    )
    exact = torch.einsum("tbhd,sbgd->bhts", q.double(), k.double()).softmax(-1).flatten(0, 1)
    errors = [
        (scores(AttentionCall(each, 1.0), q, k).double().softmax(-1) - exact).abs().max()
        for each in (smooth, plain)
    ]
    assert errors[0] < errors[1] / 2
    expected = q8(k.float() - taken_k.bfloat16().float(), -1)[:, 0, 0]
    S = scores(AttentionCall(smooth, 1.0), q, k)[0]
    left = q8(q, -1)[:, 0, 0]
    assert_is(S, left @ expected.t(), left.abs() @ expected.abs().t(), 32)


def test_a_second_part_is_taken_of_what_the_first_leaves() -> None:
    x = (normal(16, 32) + 3).bfloat16()
    outlier = PartConfig("elements", number=1, format="mxfp8")
    w = torch.eye(32).bfloat16()
    site = LinearSite(fprop=LinearFprop(x=Slot("mxfp4", parts=[MEAN, outlier])))
    y = fprop(ModulePrecision(ModuleId(0, "fc1"), resolve_site(Site.LINEAR, site)), x, w)
    mean = x.double().mean(0).float().bfloat16().float()
    rest = x.float() - mean
    apart = q8(torch.where(rest.abs() == rest.abs().max(), rest, 0.0), -1).float()
    last = quantise(rest - apart, "mxfp4", axis=-1)
    assert torch.equal(y, (mean.double() + apart.double() + last.double()).bfloat16())

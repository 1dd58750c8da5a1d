"""The product that compensates pre-scaling by 3/4."""

from __future__ import annotations

import pytest
import torch

from quantexp.formats import resolve
from quantexp.quant.multiply import multiply, post_scale
from quantexp.quant.precision import ModuleId
from quantexp.quant.product_context import ProductContext, current_product
from quantexp.quant.sites import Product, Site

CONTEXT = ProductContext(ModuleId(0, "fc1"), Site.LINEAR, Product.FPROP)
PLAIN = resolve("mxfp4_e2m1")
SCALED = resolve("mxfp4_e2m1", pre_scale=True)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def test_each_scaled_operand_counts() -> None:
    assert post_scale(PLAIN, PLAIN) == 1.0
    assert post_scale(SCALED, PLAIN) == 4 / 3
    assert post_scale(SCALED, SCALED) == pytest.approx(16 / 9, rel=1e-15)
    part = resolve("nvfp4", pre_scale=16 / 17)
    assert post_scale(part, SCALED) == pytest.approx(17 / 12, rel=1e-15)


@pytest.mark.parametrize(
    ("a", "b"),
    [((5, 32), (32, 7)), ((4, 3, 32), (32, 7)), ((4, 5, 32), (4, 32, 7))],
)
@pytest.mark.parametrize("scale", [1.0, 4 / 3, 16 / 9])
def test_the_scale_is_applied_before_the_one_rounding(
    a: tuple[int, ...], b: tuple[int, ...], scale: float
) -> None:
    """Rounding is monotone: the result lies between the roundings of the possible float32 sums.

    32 additions and a factor err by at most 34 2^-23 of the sum of magnitudes.
    """
    x, w = normal(*a), normal(*b)
    y = multiply(CONTEXT, x, w, scale)
    exact = scale * (x.double() @ w.double())
    slack = 34 * 2.0**-23 * scale * (x.double().abs() @ w.double().abs())
    assert y.shape == exact.shape
    assert (y >= (exact - slack).bfloat16()).all()
    assert (y <= (exact + slack).bfloat16()).all()


def test_the_product_is_announced_only_during_its_call() -> None:
    multiply(CONTEXT, normal(4, 32), normal(32, 4))
    assert current_product() is None

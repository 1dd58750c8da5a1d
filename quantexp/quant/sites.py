"""Sites, their matrix products, and each product's two operands.

A product multiplies a left by a right operand and reduces over one axis; blocks run along that axis:

    linear  fprop   y  = x   w^T   over the input width      qk  fprop    S  = q    k^T  over head_dim
            dgrad   dx = g   w     over the output width         dgrad_q  dq = dS   k    over keys
            wgrad   dw = g^T x     over tokens                   dgrad_k  dk = dS^T q    over queries
    pv      fprop   o  = P   v     over keys
            dgrad_p dP = dO  v^T   over head_dim
            dgrad_v dv = P^T dO    over queries

The configuration (`quant.linear.wgrad.g`) and the precision map use these names.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Site(Enum):
    """Where a scheme may quantise."""

    LINEAR = "linear"
    QK = "qk"
    PV = "pv"


class Product(Enum):
    """One of the matrix products of a site."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"
    DGRAD_Q = "dgrad_q"
    DGRAD_K = "dgrad_k"
    DGRAD_P = "dgrad_p"
    DGRAD_V = "dgrad_v"


@dataclass(frozen=True)
class ProductShape:
    """A product's left and right operand, and the axis that both reduce over."""

    left: str
    right: str
    axis: str


PRODUCTS: dict[Site, dict[Product, ProductShape]] = {
    Site.LINEAR: {
        Product.FPROP: ProductShape("x", "w", "input_width"),
        Product.DGRAD: ProductShape("g", "w", "output_width"),
        Product.WGRAD: ProductShape("g", "x", "tokens"),
    },
    Site.QK: {
        Product.FPROP: ProductShape("q", "k", "head_dim"),
        Product.DGRAD_Q: ProductShape("dS", "k", "keys"),
        Product.DGRAD_K: ProductShape("dS", "q", "queries"),
    },
    Site.PV: {
        Product.FPROP: ProductShape("P", "v", "keys"),
        Product.DGRAD_P: ProductShape("dO", "v", "head_dim"),
        Product.DGRAD_V: ProductShape("P", "dO", "queries"),
    },
}

#: Operands that carry a gradient: the amax target of hifp8 is 224 for them instead of 15.
GRADIENTS = frozenset({"g", "dS", "dO"})


def slots_of(site: Site) -> list[tuple[Product, str]]:
    """The six (product, operand) slots of a site, forward first."""
    return [
        (product, operand)
        for product, shape in PRODUCTS[site].items()
        for operand in (shape.left, shape.right)
    ]

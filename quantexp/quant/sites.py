"""Sites, their matrix products, and each product's two operands.

A product multiplies a left by a right operand and reduces over one axis; blocks run along that axis:

    linear  fprop   y  = x   w^T   over the input width      qk  fprop    S  = q    k^T  over head_dim
            dgrad   dx = g   w     over the output width         dgrad_q  dq = dS   k    over keys
            wgrad   dw = g^T x     over tokens                   dgrad_k  dk = dS^T q    over queries
    pv      fprop   o  = P   v     over keys
            dgrad_p dP = dO  v^T   over head_dim
            dgrad_v dv = P^T dO    over queries
    output  the products of linear, of the output layer; a tied embedding looks up rows of fprop's w

A norm has no matrix product. Its gain w and its result y, in blocks along their width, are slots of `fprop`, too:

    norm    fprop   y  = x / rms(x) * w

The configuration (`quant.linear.wgrad.g`) and the precision map use these names.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import NamedTuple

from quantexp.formats.spec import QuantSpec
from quantexp.formats.types import Axis


class Site(Enum):
    """Where a scheme may quantise."""

    LINEAR = "linear"
    QK = "qk"
    PV = "pv"
    OUTPUT = "output"
    NORM = "norm"

    __hash__ = (
        object.__hash__
    )  # Enum's is a function in Python, and slots are the keys of many dictionaries


class Product(Enum):
    """One of the matrix products of a site, the lookup of a tied embedding, or the forward pass of a norm."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"
    DGRAD_Q = "dgrad_q"
    DGRAD_K = "dgrad_k"
    DGRAD_P = "dgrad_p"
    DGRAD_V = "dgrad_v"
    LOOKUP = "lookup"

    __hash__ = object.__hash__


class Operand(StrEnum):
    """One operand of a product."""

    X = "x"
    W = "w"
    G = "g"
    Q = "q"
    K = "k"
    DS = "dS"
    P = "P"
    V = "v"
    DO = "dO"
    Y = "y"


class Slot(NamedTuple):
    """One operand of one product; `linear.wgrad.g` as text."""

    site: Site
    product: Product
    operand: Operand

    def __str__(self) -> str:
        return f"{self.site.value}.{self.product.value}.{self.operand}"

    @property
    def shape(self) -> ProductShape:
        """The operands and the axis of its product; a lookup has one operand."""
        return _LOOKUP if self.product is Product.LOOKUP else PRODUCTS[self.site][self.product]

    @property
    def axis(self) -> Axis:
        """The axis that its product reduces over."""
        return self.shape.axis

    @property
    def dim(self) -> int:
        """The dimension of that axis in the captured tensor."""
        return captured_dim(self.operand, self.axis)

    @property
    def is_left(self) -> bool:
        """Whether it is the left operand of its product."""
        return self.operand is self.shape.left


@dataclass(frozen=True)
class ProductShape:
    """A product's left and right operand, and the axis that both reduce over."""

    left: Operand
    right: Operand
    axis: Axis


_LOOKUP = ProductShape(Operand.W, Operand.W, Axis.INPUT_WIDTH)
_LINEAR = {
    Product.FPROP: ProductShape(Operand.X, Operand.W, Axis.INPUT_WIDTH),
    Product.DGRAD: ProductShape(Operand.G, Operand.W, Axis.OUTPUT_WIDTH),
    Product.WGRAD: ProductShape(Operand.G, Operand.X, Axis.TOKENS),
}
PRODUCTS: dict[Site, dict[Product, ProductShape]] = {
    Site.LINEAR: _LINEAR,
    Site.QK: {
        Product.FPROP: ProductShape(Operand.Q, Operand.K, Axis.HEAD_DIM),
        Product.DGRAD_Q: ProductShape(Operand.DS, Operand.K, Axis.KEYS),
        Product.DGRAD_K: ProductShape(Operand.DS, Operand.Q, Axis.QUERIES),
    },
    Site.PV: {
        Product.FPROP: ProductShape(Operand.P, Operand.V, Axis.KEYS),
        Product.DGRAD_P: ProductShape(Operand.DO, Operand.V, Axis.HEAD_DIM),
        Product.DGRAD_V: ProductShape(Operand.P, Operand.DO, Axis.QUERIES),
    },
    Site.OUTPUT: _LINEAR,
    Site.NORM: {Product.FPROP: ProductShape(Operand.Y, Operand.W, Axis.WIDTH)},
}

#: Operands that carry a gradient: the amax target of hifp8 is 224 for them instead of 15.
GRADIENTS = frozenset({Operand.G, Operand.DS, Operand.DO})

#: The dimension of each axis in an operand as it is captured, where it is not the first.
_DIMS: dict[Axis, dict[Operand, int]] = {
    Axis.INPUT_WIDTH: {Operand.X: -1, Operand.W: -1},
    Axis.OUTPUT_WIDTH: {Operand.G: -1},
    Axis.TOKENS: {},
    Axis.HEAD_DIM: {Operand.Q: -1, Operand.K: -1, Operand.V: -1, Operand.DO: -1},
    Axis.KEYS: {Operand.P: -1, Operand.DS: -1},
    Axis.QUERIES: {Operand.P: -2, Operand.DS: -2},
    Axis.WIDTH: {Operand.Y: -1, Operand.W: -1},
}


def captured_dim(operand: Operand, axis: Axis) -> int:
    """The dimension of an axis in an operand as it is captured.

    Linear: x, g are tokens .. width, w is output width, input width. Attention: q, k, v, dO are tokens, sequences,
    heads, head_dim; P, dS are sequences, heads, queries, keys. Norms: w is width, y is tokens .. width.
    """
    return _DIMS[axis].get(operand, 0)


def dim_of(operand: Operand, spec: QuantSpec) -> int:
    """The dimension of an operand, as the products take it, that its blocks run along.

    It is that of the captured tensor, except that dO is [heads, queries, head_dim].
    """
    assert spec.axis is not None, "of a slot"
    is_by_head = operand is Operand.DO and spec.axis is Axis.QUERIES
    return -2 if is_by_head else captured_dim(operand, spec.axis)


def slots_of(site: Site) -> list[Slot]:
    """The slots of a site, six of products or two of a norm, forward first."""
    return [slot for product in PRODUCTS[site] for slot in operands_of(site, product)]


def operands_of(site: Site, product: Product) -> tuple[Slot, Slot]:
    """The slots of a product's left and right operand."""
    return _OPERANDS[site, product]


_OPERANDS = {
    (site, product): (Slot(site, product, shape.left), Slot(site, product, shape.right))
    for site, products in PRODUCTS.items()
    for product, shape in products.items()
}
FPROP_X, FPROP_W = operands_of(Site.LINEAR, Product.FPROP)
DGRAD_G, DGRAD_W = operands_of(Site.LINEAR, Product.DGRAD)
WGRAD_G, WGRAD_X = operands_of(Site.LINEAR, Product.WGRAD)
FPROP_Q, FPROP_K = operands_of(Site.QK, Product.FPROP)
DGRAD_Q_DS, DGRAD_Q_K = operands_of(Site.QK, Product.DGRAD_Q)
DGRAD_K_DS, DGRAD_K_Q = operands_of(Site.QK, Product.DGRAD_K)
FPROP_P, FPROP_V = operands_of(Site.PV, Product.FPROP)
DGRAD_P_DO, DGRAD_P_V = operands_of(Site.PV, Product.DGRAD_P)
DGRAD_V_P, DGRAD_V_DO = operands_of(Site.PV, Product.DGRAD_V)
LOOKUP_W = Slot(Site.OUTPUT, Product.LOOKUP, Operand.W)
NORM_Y, NORM_W = operands_of(Site.NORM, Product.FPROP)

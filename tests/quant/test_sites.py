"""The table of design.md, written out."""

from __future__ import annotations

from quantexp.formats import Axis
from quantexp.quant import sites
from quantexp.quant.sites import (
    GRADIENTS,
    PRODUCTS,
    Operand,
    Product,
    ProductShape,
    Site,
    slots_of,
)


def test_products_operands_and_axes_are_the_designs() -> None:
    table = {
        site.value: {
            product.value: (shape.left, shape.right, shape.axis)
            for product, shape in products.items()
        }
        for site, products in PRODUCTS.items()
    }
    linear = {
        "fprop": ("x", "w", "input_width"),
        "dgrad": ("g", "w", "output_width"),
        "wgrad": ("g", "x", "tokens"),
    }
    assert table == {
        "linear": linear,
        "output": linear,
        "qk": {
            "fprop": ("q", "k", "head_dim"),
            "dgrad_q": ("dS", "k", "keys"),
            "dgrad_k": ("dS", "q", "queries"),
        },
        "pv": {
            "fprop": ("P", "v", "keys"),
            "dgrad_p": ("dO", "v", "head_dim"),
            "dgrad_v": ("P", "dO", "queries"),
        },
        "norm": {"fprop": ("y", "w", "width")},
    }


def test_every_site_of_products_has_six_slots_forward_first() -> None:
    for site in Site:
        slots = slots_of(site)
        assert len(set(slots)) == (2 if site is Site.NORM else 6)
        assert [slot.product for slot in slots[:2]] == [Product.FPROP, Product.FPROP]
    assert [str(slot) for slot in slots_of(Site.QK)[2:]] == [
        "qk.dgrad_q.dS",
        "qk.dgrad_q.k",
        "qk.dgrad_k.dS",
        "qk.dgrad_k.q",
    ]


def test_every_slot_has_a_name() -> None:
    """`FPROP_X`: its product and its operand, which no two slots share but those of the output layer."""
    for site in (Site.LINEAR, Site.QK, Site.PV):
        for slot in slots_of(site):
            assert getattr(sites, f"{slot.product.name}_{slot.operand.name}") == slot


def test_gradients_are_the_operands_of_the_backward_pass() -> None:
    operands = {slot.operand for site in Site for slot in slots_of(site)}
    assert operands - GRADIENTS == {"x", "w", "q", "k", "P", "v", "y"}


def test_shape_is_a_value() -> None:
    assert PRODUCTS[Site.LINEAR][Product.FPROP] == ProductShape(
        Operand.X, Operand.W, Axis.INPUT_WIDTH
    )

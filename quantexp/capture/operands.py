"""The quantised operands of the products: names and dimensions of their captured tensors.

An operand is quantised along the axis that its product reduces over, so a tensor has one quantised form for each
product that it enters. The form is named after the tensor and the product, and its block scales after the form:

    input            input_fprop, input_wgrad                     input_fprop_scale
    grad_output      grad_output_dgrad, grad_output_wgrad         grad_output_dgrad_scale
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quantexp.formats import Hadamard, QuantSpec, Rounding
from quantexp.formats.types import Family
from quantexp.quant.precision import ModulePrecision
from quantexp.quant.sites import Operand, Product, Site, Slot, captured_dim, slots_of

SCALE = "_scale"

#: Operand -> the captured tensor.
SOURCES = {
    Operand.X: "input",
    Operand.W: "weight",
    Operand.G: "grad_output",
    Operand.Q: "query",
    Operand.K: "key",
    Operand.DS: "grad_scores",
    Operand.P: "attn_weights",
    Operand.V: "value",
    Operand.DO: "grad_output",
    Operand.Y: "output",
}


#: exp(S - m) in place of P in the forward product.
EXPONENTIALS = "exp_scores"


def source_name(slot: Slot, spec: QuantSpec) -> str:
    """The captured tensor that a slot quantises."""
    return EXPONENTIALS if spec.softmax.unnormalised else SOURCES[slot.operand]


@dataclass(frozen=True)
class QuantisedOperand:
    """One quantised operand of a product."""

    slot: Slot
    spec: QuantSpec

    @property
    def source(self) -> str:
        """The captured tensor that is quantised."""
        return source_name(self.slot, self.spec)

    @property
    def tensor(self) -> str:
        """The name of the quantised values."""
        return f"{self.source}_{self.slot.product.value}"

    @property
    def key(self) -> str:
        """The key in the metadata's `formats`."""
        return slot_key(self.slot)

    @property
    def operation(self) -> str:
        """The pass of its product."""
        return operation_of(self.slot.product)

    @property
    def block(self) -> int | None:
        """Elements that share a block scale; None without scales of blocks of one row."""
        has_rows = self.spec.fmt.block is not None and self.spec.fmt.across == 1
        return self.spec.scale_block if has_rows else None

    def dim(self, ndim: int) -> int:
        """The dimension of the captured tensor that the product reduces over; the tensor has `ndim` dimensions."""
        assert self.spec.axis is not None, "of a slot"
        return captured_dim(self.slot.operand, self.spec.axis) % ndim

    @property
    def once(self) -> bool:
        """Whether the operand is the same in every micro-batch of an iteration, on every rank."""
        drawn = any(
            spec.rounding is Rounding.STOCHASTIC or spec.hadamard is Hadamard.RANDOM
            for spec in self.spec.chain
        )
        return self.source == "weight" and not drawn


def quantised_operand(slot: Slot, spec: QuantSpec) -> QuantisedOperand | None:
    """The quantised operand of a slot; None in the working precision, for a reused forward copy and a sum of parts."""
    is_none = not spec.quantised or spec.reuse or spec.parts
    return None if is_none else QuantisedOperand(slot, spec)


def first_quantised(
    precision: ModulePrecision, operation: str, tensor: str
) -> QuantisedOperand | None:
    """The operand of the first product that quantises a captured tensor; None without one.

    A weight is that of the products of its pass. Formats of the user's own code are left out, and slots that quantise
    the forward copy.
    """
    for slot, spec in precision.slots.items():
        operand = quantised_operand(slot, spec)
        if operand is None or operand.source != tensor or spec.of is not None:
            continue
        if spec.fmt.family is Family.PYTHON:
            continue
        if tensor != "weight" or operand.operation == operation:
            return operand
    return None


def slot_key(slot: Slot) -> str:
    """`fprop.x` for linear, `qk.fprop.q` for attention."""
    return str(slot).removeprefix(f"{Site.LINEAR.value}.")


def operation_of(product: Product) -> str:
    """The pass of a product."""
    return "forward" if product is Product.FPROP else "backward"


def is_replaced(precision: ModulePrecision, operation: str, tensor: str) -> bool:
    """Whether every product that a tensor enters multiplies one quantised form of it.

    A weight that is listed for both passes counts separately for each pass.
    """
    specs = [
        spec
        for slot, spec in precision.slots.items()
        if source_name(slot, spec) == tensor
        and (tensor != "weight" or operation_of(slot.product) == operation)
    ]
    return bool(specs) and all(spec.quantised and not spec.parts for spec in specs)


def source_of(tensor: str) -> str:
    """The source tensor of an operand or its scales; any other tensor is its own source."""
    return _SOURCE_OF.get(tensor.removesuffix(SCALE), tensor)


_SOURCE_OF = {
    f"{SOURCES[slot.operand]}_{slot.product.value}": SOURCES[slot.operand]
    for site in Site
    for slot in slots_of(site)
} | {f"{EXPONENTIALS}_{Product.FPROP.value}": EXPONENTIALS}
#: The names of all quantised operands.
OPERAND_TENSORS = tuple(_SOURCE_OF)


def scale_shape(shape: tuple[int, ...], dim: int, block: int) -> tuple[int, ...]:
    """The shape of the block scales: one scale for each block."""
    return (*shape[:dim], -(-shape[dim] // block), *shape[dim + 1 :])


def scale_sample(
    sample: dict[str, Any] | None, shape: tuple[int, ...], dim: int, block: int
) -> dict[str, Any] | None:
    """The block scales of a sample of the values, as in the metadata."""
    if sample is None:
        return None
    indices = sample["indices"]
    if sample["axis"] == dim:
        indices = sorted({index // block for index in indices})
    return {**sample, "indices": indices, "shape": list(scale_shape(shape, dim, block))}

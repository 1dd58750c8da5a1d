"""Which attention modules torch's fused kernel can multiply as declared. Needs no torch, for the configuration's
checks.

The kernel multiplies the same q, k and v forward and backward, and keeps S, P, dP and dS in float32 internally. A
quantised forward operand must therefore be reused in the backward pass (`reuse`), and every other slot must keep the
working precision.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantexp.errors import ConfigError
from quantexp.model.decoder import ATTENTION
from quantexp.quant.label import factor_words
from quantexp.quant.precision import Entry, ModulePrecision, declared_maps
from quantexp.quant.sites import Operand, Product
from quantexp.schema import ModelConfig, QuantConfig


def obstacles(precision: ModulePrecision) -> Iterator[Entry]:
    """The slots of an attention that the fused kernel cannot multiply as declared."""
    for entry in precision.entries():
        slot, spec = entry.slot, entry.spec
        forward = precision.slots.get(slot._replace(product=Product.FPROP))
        if forward is None or slot.operand is Operand.P:
            # dS, dO and P exist only inside the kernel, or enter it once for two products
            if spec.quantised or not spec.softmax.is_stock:
                yield entry
        elif slot.product is Product.FPROP:
            if spec.is_pre_scaled or spec.is_transformed:
                yield entry
        elif spec.quantised != forward.quantised or (spec.quantised and not spec.reuse):
            yield entry


def require_fused_attention(model: ModelConfig, quant: QuantConfig) -> None:
    """Refuse a scheme that declares, in any layer at any iteration, what the fused kernel cannot do.

    Raises:
        ConfigError: names the first unsupported slot.
    """
    for declared in attentions(model, quant):
        require_fused(declared)


def attentions(model: ModelConfig, quant: QuantConfig) -> Iterator[ModulePrecision]:
    """Every layer's attention, as declared at every iteration that changes the precision map."""
    for each in declared_maps(model, quant):
        for module, declared in each.items():
            if module.name == ATTENTION:
                yield declared


def require_fused(precision: ModulePrecision) -> None:
    """Refuse what the fused kernel cannot do.

    Raises:
        ConfigError: names the first unsupported slot.
    """
    for entry in obstacles(precision):
        raise ConfigError(
            f"training.attention=fused cannot hold {entry.label} as {_words(entry)}: the kernel multiplies q, k "
            "and v the same way forward and backward, all else in high precision; use training.attention=tiled or plain"
        )


def _words(entry: Entry) -> str:
    spec = entry.spec
    if not spec.softmax.is_stock:
        return "P with unnormalised or delta"
    if spec.is_transformed:
        return f"{spec.fmt.name} after a Hadamard transform"
    if spec.is_pre_scaled:
        return f"{spec.fmt.name} scaled by {factor_words(spec.pre_scale)}"
    return spec.fmt.name if spec.quantised else "the working precision, which its forward is not in"

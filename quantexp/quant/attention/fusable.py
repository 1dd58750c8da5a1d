"""Which attentions torch's fused kernel can multiply as declared; without torch, for the configuration's checks.

The kernel multiplies the same q, k and v forward and backward, and holds S, P, dP and dS in float32 within. So a
forward operand that is quantised has to be used again by the backward (`reuse`), and everything else stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantexp.errors import ConfigError
from quantexp.model.decoder import ATTENTION
from quantexp.quant.precision import Entry, ModulePrecision, changes, precision_map
from quantexp.quant.sites import Product
from quantexp.schema import ModelConfig, QuantConfig


def obstacles(precision: ModulePrecision) -> Iterator[Entry]:
    """The slots of an attention that the fused kernel cannot multiply as declared."""
    forward = {
        (entry.site, entry.name): entry.operand
        for entry in precision.entries()
        if entry.product is Product.FPROP
    }
    for entry in precision.entries():
        operand = entry.operand
        if (entry.site, entry.name) not in forward or entry.name == "P":
            if (
                operand.quantised
            ):  # dS, dO and P exist within the kernel alone, or enter it once for two products
                yield entry
        elif entry.product is Product.FPROP:
            if operand.pre_scale or operand.hadamard is not None:
                yield entry
        elif operand.quantised != forward[entry.site, entry.name].quantised or (
            operand.quantised and not operand.reuse
        ):
            yield entry


def require_fused_attention(model: ModelConfig, quant: QuantConfig) -> None:
    """Refuse a scheme that in any layer, at any iteration, declares what the fused kernel cannot do.

    Raises:
        ConfigError: with the first slot that stands in the way.
    """
    for declared in attentions(model, quant):
        require_fused(declared)


def attentions(model: ModelConfig, quant: QuantConfig) -> Iterator[ModulePrecision]:
    """Every layer's attention, as it is declared at every iteration that changes something."""
    for iteration in changes(quant):
        for module, declared in precision_map(model, quant, iteration).items():
            if module.name == ATTENTION:
                yield declared


def require_fused(precision: ModulePrecision) -> None:
    """Refuse what the fused kernel cannot do.

    Raises:
        ConfigError: with the first slot that stands in the way.
    """
    for entry in obstacles(precision):
        raise ConfigError(
            f"training.attention=fused cannot hold {entry.label} as {_words(entry)}: the kernel multiplies q, k "
            "and v the same way forward and backward, all else in high precision; use training.attention=tiled or plain"
        )


def _words(entry: Entry) -> str:
    operand = entry.operand
    if operand.hadamard is not None:
        return f"{operand.format} after a Hadamard transform"
    if operand.pre_scale:
        return f"{operand.format} scaled by 3/4"
    return (
        operand.format
        if operand.quantised
        else "the working precision, which its forward is not in"
    )

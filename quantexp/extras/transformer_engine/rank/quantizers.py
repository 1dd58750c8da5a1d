"""Reads from the quantizers of a linear module what Transformer Engine makes of its operands.

A module keeps the quantizers of its first recipe when another one of the same class comes (seen in 2.11.0), so that
only the quantizers say what runs. A module's first forward pass under a recipe is followed by this comparison.
"""

from __future__ import annotations

from typing import Any

from quantexp.errors import EngagementError
from quantexp.extras.transformer_engine.scheme.operands import (
    FP32_SCALES,
    NV_SCALES,
    RANDOM_HADAMARD,
    TENSOR_EXACT,
    TENSOR_POWER_OF_TWO,
    Held,
    block_of,
    delayed_scale,
    power_of_two_scales,
)
from quantexp.extras.transformer_engine.scheme.recipes import Recipe
from quantexp.formats.types import Rounding, ScaleRule
from quantexp.quant.precision import ModuleId
from quantexp.quant.sites import Operand, Product, Slot

_ELEMENTS = {"kFloat8E4M3": "e4m3", "kFloat8E5M2": "e5m2", "kFloat4E2M1": "e2m1"}
#: Direction and position of each operand's quantizer in `module.quantizers`.
_PLACES = {
    Operand.X: ("scaling_fwd", 0),
    Operand.W: ("scaling_fwd", 1),
    Operand.G: ("scaling_bwd", 0),
}


def require_quantizers(module: Any, name: ModuleId, recipe: Recipe) -> None:
    """Refuse a module whose quantizers are not those of its recipe.

    Raises:
        EngagementError: names the slot.
    """
    for slot, wanted in recipe.slots().items():
        got = held_by_module(module, slot)
        if (aspect := got.differs(wanted)) is not None:
            raise EngagementError(
                f"{name} {slot}: Transformer Engine's quantizer has {aspect} {getattr(got, aspect)}, and {recipe} has "
                f"{getattr(wanted, aspect)}"
            )


def held_by_module(module: Any, slot: Slot) -> Held:
    """What the quantizer of one operand makes of it."""
    direction, index = _PLACES[slot.operand]
    quantizer = module.quantizers[direction][index]
    element = _ELEMENTS[quantizer.dtype.name]
    match type(quantizer).__name__:
        case "MXFP8Quantizer":
            return Held(element, block_of(1, 32), power_of_two_scales(ScaleRule.RCEIL))
        case "Float8CurrentScalingQuantizer":
            powers = quantizer.force_pow_2_scales
            return Held(element, scale=TENSOR_POWER_OF_TWO if powers else TENSOR_EXACT)
        case "Float8Quantizer":
            history = module.fp8_meta[direction].amax_history.shape[0]
            return Held(element, scale=delayed_scale(history))
        case "Float8BlockQuantizer":
            rows = quantizer.block_len if quantizer.block_scaling_dim == 2 else 1
            powers = power_of_two_scales(ScaleRule.RCEIL)
            scale = powers if quantizer.force_pow_2_scales else FP32_SCALES
            return Held(element, block_of(rows, quantizer.block_len), scale)
        case "NVFP4Quantizer":
            is_transformed = quantizer.with_rht and slot.product is Product.WGRAD
            rounding = Rounding.STOCHASTIC if quantizer.stochastic_rounding else Rounding.EVEN
            return Held(
                element,
                block_of(16 if quantizer.with_2d_quantization else 1, 16),
                NV_SCALES,
                RANDOM_HADAMARD if is_transformed else "none",
                rounding.value,
            )
        case other:
            raise EngagementError(f"{slot} has a quantizer that no recipe makes: {other}")

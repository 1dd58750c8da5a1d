"""Transformer Engine's recipes as data, and what each makes of the six operands of a linear layer.

Read in transformer_engine/common/recipe and the quantisers of version 2.11.0. A recipe quantises x, w and g once each,
from the high-precision tensor, in one copy along each axis, so that its six slots follow from three operands:

    MXFP8BlockScaling     1 x 32 under powers of two, the least that hold the amax (`rceil`)
    Float8CurrentScaling  one scale a tensor, float32(max / amax), or the power of two below it
    DelayedScaling        as the former, from the largest amax of earlier micro-batches
    Float8BlockScaling    x and g 1 x 128, w 128 x 128 (or 1 x 128), under powers of two (`rceil`) or float32
    NVFP4BlockScaling     1 x 16 under E4M3 and one float32 scale; w 16 x 16, wgrad's operands transformed, g rounded
                          stochastically, unless switched off

HYBRID is E4M3 for x and w and E5M2 for g. Settings that environment variables would change are always passed. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import product

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
from quantexp.formats.types import Rounding, ScaleRule
from quantexp.quant.sites import Operand, Product, Site, Slot, slots_of


class Kind(Enum):
    """A class of `transformer_engine.common.recipe`."""

    MXFP8 = "MXFP8BlockScaling"
    CURRENT = "Float8CurrentScaling"
    DELAYED = "DelayedScaling"
    BLOCK = "Float8BlockScaling"
    NVFP4 = "NVFP4BlockScaling"
    #: The scheme's own formats inside Transformer Engine's linear layers.
    CUSTOM = "CustomRecipe"


@dataclass(frozen=True)
class Recipe:
    """A recipe with its settings; one that its kind does not have keeps its default."""

    kind: Kind
    #: E5M2 for gradients.
    hybrid: bool = False
    #: CURRENT, BLOCK: scales are powers of two.
    power_of_two: bool = False
    #: BLOCK, NVFP4: rows of a weight's block.
    weight_rows: int = 1
    #: DELAYED: micro-batches in the amax history.
    history: int = 0
    #: NVFP4: wgrad's operands are transformed, gradients are rounded stochastically.
    hadamard: bool = False
    stochastic: bool = False

    def __str__(self) -> str:
        return f"{self.kind.value}({', '.join(self._settings())})"

    def _settings(self) -> Iterator[str]:
        if self.kind is Kind.CUSTOM:
            yield "the scheme's formats"
            return
        if self.kind is Kind.NVFP4:
            yield f"w {block_of(self.weight_rows, 16)}"
            yield "random Hadamard in wgrad" if self.hadamard else "no Hadamard"
            yield "g stochastic" if self.stochastic else "all to nearest"
            return
        yield "HYBRID" if self.hybrid else "E4M3"
        if self.kind is Kind.BLOCK:
            yield f"w {block_of(self.weight_rows, 128)}"
        if self.kind in (Kind.CURRENT, Kind.BLOCK):
            yield "powers of two" if self.power_of_two else "float32 scales"
        if self.kind is Kind.DELAYED:
            yield f"history {self.history}"

    @property
    def has_token_blocks(self) -> bool:
        """Whether wgrad's operands have blocks along tokens."""
        return self.kind in (Kind.MXFP8, Kind.BLOCK, Kind.NVFP4)

    def slots(self) -> Mapping[Slot, Held]:
        """What it makes of each operand."""
        return {slot: self._held(slot) for slot in slots_of(Site.LINEAR)}

    def _held(self, slot: Slot) -> Held:
        is_gradient, is_weight = slot.operand is Operand.G, slot.operand is Operand.W
        element = "e5m2" if is_gradient and self.hybrid else "e4m3"
        rows = self.weight_rows if is_weight else 1
        match self.kind:
            case Kind.MXFP8:
                return Held(element, block_of(1, 32), power_of_two_scales(ScaleRule.RCEIL))
            case Kind.CURRENT:
                scale = TENSOR_POWER_OF_TWO if self.power_of_two else TENSOR_EXACT
                return Held(element, scale=scale)
            case Kind.DELAYED:
                return Held(element, scale=delayed_scale(self.history))
            case Kind.BLOCK:
                powers = power_of_two_scales(ScaleRule.RCEIL)
                scale = powers if self.power_of_two else FP32_SCALES
                return Held(element, block_of(rows, 128), scale)
            case Kind.NVFP4:
                is_transformed = self.hadamard and slot.product is Product.WGRAD
                is_random = self.stochastic and is_gradient
                return Held(
                    "e2m1",
                    block_of(rows, 16),
                    NV_SCALES,
                    RANDOM_HADAMARD if is_transformed else "none",
                    (Rounding.STOCHASTIC if is_random else Rounding.EVEN).value,
                )
            case Kind.CUSTOM:
                raise ValueError("a custom recipe has the slots of its scheme")


def native_recipes(history: int | None) -> Iterator[Recipe]:
    """Every recipe that slots describe, and with a history delayed scaling alone."""
    flags = (False, True)
    if history is not None:
        yield from (Recipe(Kind.DELAYED, hybrid, history=history) for hybrid in flags)
        return
    yield from (Recipe(Kind.MXFP8, hybrid) for hybrid in flags)
    for hybrid, powers in product(flags, flags):
        yield Recipe(Kind.CURRENT, hybrid, powers)
        yield from (Recipe(Kind.BLOCK, hybrid, powers, rows) for rows in (128, 1))
    for rows, hadamard, stochastic in product((16, 1), flags, flags):
        yield Recipe(Kind.NVFP4, weight_rows=rows, hadamard=hadamard, stochastic=stochastic)

"""Linear layers of recipes that authors' code computes too: `benchmarks/layer_authors.py` runs it.

An operand is compared as codes: in units of its largest magnitude, so that a constant factor, which the other operand
or the product takes back, does not count; such are the root of a transform's size, and 16/17.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantexp.config.compose import compose
from quantexp.quant.hooks import hook_operands
from quantexp.quant.linear import dgrad, fprop, wgrad
from quantexp.quant.precision import ModuleId, precision_map
from quantexp.quant.sites import Slot
from quantexp.quant.step_state import StepState, use_step_state

#: Tokens, input and output width; one sequence.
TOKENS, WIDTH, OUTPUT = 128, 256, 384
#: Of the run, and the module and iteration whose random numbers are drawn.
RUN, MODULE, ITERATION = 1, ModuleId(0, "fc1"), 1
SLOTS = ("fprop.x", "fprop.w", "dgrad.g", "dgrad.w", "wgrad.g", "wgrad.x")
#: The files, and what their authors' code has beyond the papers.
RECIPES: dict[str, tuple[str, ...]] = {
    "linear_nvfp4_recipe": tuple(
        f"+quant.linear.{slot}.pre_scale={16 / 17}" for slot in ("dgrad.g", "wgrad.g")
    ),
    "linear_nvfp4_tetrajet_v2": (),
    "linear_nvfp4_quartet2": (),
    "linear_nvfp4_four_over_six": (),
}
#: Parts of the largest magnitude.
_PARTS = 1 << 14


@cache
def sources(sample: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [tokens, 1, width], w [output, width] and g [tokens, 1, output]: normal numbers in float32."""
    normal = np.random.RandomState(sample).standard_normal
    shapes = ((TOKENS, 1, WIDTH), (OUTPUT, WIDTH), (TOKENS, 1, OUTPUT))
    x, w, g = (torch.from_numpy(normal(shape).astype(np.float32)) for shape in shapes)
    return x, w, g


def layer(recipe: str, sample: int) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """The operands by slot, as matrices of the layout of x, w and g, and y, dx and dw, in float32."""
    words = ["training=fast", "training.precision=fp32", "quant.rules=[]", f"quant=more/{recipe}"]
    experiment = compose([*words, *RECIPES[recipe]], None, {})
    precision = precision_map(experiment.model, experiment.quant)[MODULE]
    operands = {}

    def keep(_: Any, slot: Slot, x: Tensor, quantised: Tensor, *__: Any) -> None:
        operands[str(slot).partition(".")[2]] = quantised.reshape(-1, x.shape[-1])

    x, w, g = sources(sample)
    with use_step_state(StepState(RUN, ITERATION)), hook_operands(keep):
        y, dx, dw = fprop(precision, x, w), dgrad(precision, g, w), wgrad(precision, g, x)
    return operands, (y.squeeze(1), dx.squeeze(1), dw)


def codes(operand: Tensor) -> Tensor:
    """Each element in units of the largest magnitude, int16."""
    x = operand.double()
    return (x / x.abs().max() * _PARTS).round().to(torch.int16)


def digest(operand: Tensor) -> str:
    """sha256 of the codes, in hexadecimal, its first 16 digits."""
    return hashlib.sha256(codes(operand).contiguous().numpy().tobytes()).hexdigest()[:16]

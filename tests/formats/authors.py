"""Cases that authors' code computes too: `benchmarks/authors.py` runs it, `test_authors.py` has its digests.

A result is compared as integers: 14 times each element in units of its block's scale (a multiple of 1/2, or of 6/7),
and the scale of each block in units of that of the tensor. Both are the codes that hardware would store; the values
that they stand for differ by float32's last bits, because some authors multiply by reciprocals.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantexp.formats import quantise, resolve, scales_of
from quantexp.formats.declared.levels import inner_blocks
from quantexp.formats.definitions.definition import declared_format
from quantexp.formats.definitions.files import shipped_formats
from quantexp.formats.spec import get_format
from quantexp.formats.types import Format, Rounding

SEED, SHAPE = 48, (128, 1024)
BLOCK = 16
#: What elements of one of the grids are whole multiples of.
_UNIT = 14


@dataclass(frozen=True)
class Case:
    """A format, and the keys of its definition that differ."""

    fmt: str
    changes: tuple[tuple[str, Any], ...] = ()
    #: Whether elements, or of MS-EDEN block scales, are drawn.
    is_drawn: bool = False

    @property
    def format(self) -> Format:
        shipped = shipped_formats().get(self.fmt)
        if shipped is None or not self.changes:
            return shipped or get_format(self.fmt)
        return declared_format(self.fmt, json.loads(shipped.definition) | dict(self.changes))


#: 16/17 of the largest value of E2M1 for a block, and times 448 for the tensor.
_UNBIASED = (("candidates", [6 * 16 / 17]), ("amax_target", 6 * 16 / 17 * 448))
CASES = {
    "nvfp4": Case("nvfp4"),
    "four over six, mse": Case("nvfp4_four_over_six"),
    "four over six, mae": Case("nvfp4_four_over_six", (("choose", "mae"),)),
    "four over six, max": Case("nvfp4_four_over_six", (("choose", "max"),)),
    "four over six of tiles": Case("nvfp4_four_over_six_16x16"),
    "if4, mse": Case("if4"),
    "if4, mae": Case("if4", (("choose", "mae"),)),
    "if4, max": Case("if4", (("choose", "max"),)),
    "if4, 16/17": Case("if4", _UNBIASED),
    "nvfp4, drawn": Case("nvfp4", is_drawn=True),
    "ms-eden": Case("nvfp4_ms_eden", is_drawn=True),
}


def source() -> Tensor:
    """Normal numbers in float32."""
    x = np.random.RandomState(SEED).standard_normal(SHAPE).astype(np.float32)
    return torch.from_numpy(x)


def codes(case: Case) -> tuple[Tensor, Tensor]:
    """14 times each element, int16, and the scale of each block, float32, in units of that of the tensor."""
    x, fmt = source(), case.format
    rounding = Rounding.STOCHASTIC if case.is_drawn else Rounding.EVEN
    y = quantise(x, fmt, rounding=rounding, seed=SEED if case.is_drawn else None)
    spec = resolve(fmt)
    scales = scales_of(x, spec)
    t = x.abs().max() / spec.amax_target
    if not isinstance(scales, Tensor):
        b = scales.block.view(torch.float8_e4m3fn).float()
    else:
        b = (scales / t).to(torch.float8_e4m3fn).float()
    if fmt.across > 1:
        b = b.repeat_interleave(fmt.across, dim=0)
    each = b.repeat_interleave(BLOCK, dim=1)
    if (
        fmt.name == "nvfp4_ms_eden"
    ):  # what was drawn follows from the elements before the correction
        q = quantise(x, inner_blocks(spec).fmt, rounding="even") / (each * t)
        ratio = (y / t / q).unflatten(1, (-1, BLOCK)).nan_to_num(0.0).amax(-1)
        b = ratio.to(torch.float8_e4m3fn).float()
        each = b.repeat_interleave(BLOCK, dim=1)
    return in_units(y / (each * t)), b


def in_units(elements: Tensor) -> Tensor:
    """14 times each element as an integer."""
    return (elements * _UNIT).round().to(torch.int16)


def digest(elements: Tensor, scales: Tensor) -> str:
    """sha256 of codes, in hexadecimal, its first 16 digits."""
    arrays = elements.numpy(), scales.contiguous().numpy()
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:16]

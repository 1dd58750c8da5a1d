"""Excludes grids that cannot have produced an operand, at a small part of the cost of searching all its windows.

A grid has not produced a window if an element off it is telling, or if there are fewer telling elements than evidence
takes. Either often follows from little: the first from a few lines of each window, the second from bounds on the steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quantexp.formats.types import Family
from quantexp.proof.candidates import Grid, telling_elements

#: Divisor for the number of lines of a window that are examined.
_FEW_LINES = 8


@dataclass(frozen=True)
class _Few:
    """A few lines of every window, [windows, lines, elements of a line], whole along a grid's blocks."""

    values: Tensor
    #: The steps of the declared grid and of the working precision.
    step: Tensor
    working: Tensor

    @cached_property
    def binade(self) -> Tensor:
        """The power of two at or below each magnitude, except 0."""
        return torch.ldexp(
            torch.ones_like(self.step), torch.frexp(self.values.float()).exponent - 1
        )


@dataclass(frozen=True)
class Exclusion:
    """What excludes grids from having produced windows [windows, lines, elements], which lie on the declared grid."""

    #: None if they are in the working precision.
    declared: Grid | None
    windows: Tensor
    #: The operand's.
    amax: Tensor
    #: Of the declared grid and of the working precision, around each element.
    step: Tensor
    working: Tensor

    def excludes(self, other: Grid) -> bool:
        """True only if no window has enough telling elements that all lie on another grid."""
        return self._is_nowhere_coarser(other) or self._is_soon_off(other)

    def _is_soon_off(self, other: Grid) -> bool:
        """Whether a few lines of every window already have a telling element off another grid, which is the usual case.

        Of a grid whose scale is searched, they must have one at every scale that the search tries.

        Where all steps are powers of two, every element off the other grid and within its range is telling: it is a
        multiple of the declared grid's step around it; if the other's were no larger, it would be a multiple of that,
        too.
        """
        few = self._across if other.across else self._along
        if other.spec.fmt.block_scale:
            return _have_crowded_blocks(few, other)
        is_binary = self._has_binary_steps and other.has_binary_steps
        if not other.searches_scale and other.reaches(self.amax):
            off = other.requantised(few.values) != few.values
            if not is_binary:
                off &= few.binade * 2.0**-other.mantissa_bits > few.step
        elif is_binary and other.searches_scale:  # no steps are needed: as fast for twice the lines
            lines = self.windows.narrow(-2, 0, max(1, 2 * self.windows.shape[-2] // _FEW_LINES))
            off = ~other.at_each_scale(lines, self.amax)[0]
        else:
            on_grid, steps = other.at_each_scale(few.values, self.amax)
            off = telling_elements(other, steps(), few.values, few.step, few.working, -1) & ~on_grid
        return _in_every_window(off)

    def _is_nowhere_coarser(self, other: Grid) -> bool:
        """Whether bounds on the steps leave no telling element.

        With m bits of mantissa, a step is more than |x| / 2^(m + 1), and at most |x| / 2^m or the smallest step. Where
        all steps are powers of two, more bits are not needed: both are 2^-m of the binade, or the smallest step.
        """
        if self.declared is None or other.spec.fmt.block_scale:
            return False
        bits = self.declared.mantissa_bits
        if not (self._has_binary_steps and other.has_binary_steps):
            bits += 1
        if other.mantissa_bits < bits:
            return False
        if other.spec.fmt.family is Family.HIF8:
            return self._bits_of_hif8(other) >= bits
        smallest = other.smallest_step(self._amax_of_windows if other.block else self.amax)
        return bool((smallest <= self._smallest_step).all())

    def _bits_of_hif8(self, other: Grid) -> int:
        """The least number of mantissa bits of HiF8 at any magnitude of the windows, at any scale it may find."""
        low, high, amax = self._range
        if other.searches_scale:
            scale = other.spec.amax_target / amax
            if not 2.0**-126 < scale < 2.0**127:
                return 0  # it is clamped
            # A power of two may be half of what fits, and the search tries its half and its double.
            low, high = (
                (low * scale / 4, high * scale * 2)
                if other.has_binary_steps
                else (low * scale * 0.9, high * scale * 1.1)
            )
        exponent = max(abs(math.frexp(x)[1] - 1) for x in (low, high))
        return 4 - max(1, exponent.bit_length() - 1) if exponent < 16 else 0

    @cached_property
    def _range(self) -> tuple[float, float, float]:
        """The smallest magnitude of the windows except 0, the largest one, and the operand's amax."""
        magnitude = self.windows.abs().float()
        low = magnitude.masked_fill(magnitude == 0, math.inf).amin()
        low, high, amax = torch.stack([low, magnitude.amax(), self.amax]).tolist()
        return low, high, amax

    @cached_property
    def _amax_of_windows(self) -> Tensor:
        return self.windows.abs().flatten(1).amax(dim=1).float()

    @cached_property
    def _smallest_step(self) -> Tensor:
        """The declared grid's smallest step in each window; it is 0 around 0 alone."""
        return self.step.masked_fill(self.step == 0, math.inf).flatten(1).amin(dim=1)

    @property
    def _has_binary_steps(self) -> bool:
        return self.declared is None or self.declared.has_binary_steps

    @cached_property
    def _along(self) -> _Few:
        return self._few(-2)

    @cached_property
    def _across(self) -> _Few:
        return self._few(-1)

    def _few(self, lines: int) -> _Few:
        """The first lines of each window along the declared blocks or across them, at least one."""
        few = max(1, self.windows.shape[lines] // _FEW_LINES)
        parts = (x.narrow(lines, 0, few) for x in (self.windows, self.step, self.working))
        values, step, working = (
            (x.transpose(-1, -2) if lines == -1 else x).contiguous() for x in parts
        )
        return _Few(values, step, working)


def _have_crowded_blocks(few: _Few, other: Grid) -> bool:
    """Whether every window has a block with more telling magnitudes than NVFP4's element has, whatever the scales.

    A step of NVFP4 is more than |x| / 4, so an element of at least four steps of the declared grid is telling, if it is
    a normal number: it has at least 128 steps of the working precision. Two magnitudes near the same value of NVFP4 are
    apart by less than a factor of 1 + 3 eps of the dtype + 16 eps of float32 (see `_block_tolerance`).
    """
    info, element, size = torch.finfo(few.values.dtype), other.spec.fmt.element, other.block
    assert size is not None
    magnitude = few.values.abs().float()
    magnitude.masked_fill_((magnitude < 4 * few.step) | (magnitude < info.smallest_normal), 0.0)
    extent = magnitude.shape[-1] // size * size
    blocks = magnitude[..., :extent].reshape(*magnitude.shape[:-1], -1, size).sort(dim=-1).values
    apart = blocks[..., 1:] > blocks[..., :-1] * (1 + 3 * info.eps + 2.0**-19)
    return _in_every_window(apart.sum(dim=-1) >= 2 ** (element.bits - 1))


def _in_every_window(mask: Tensor) -> bool:
    """Whether every window has a true element, in a mask [..., windows, lines, elements of a line]."""
    return bool(mask.flatten(-2).any(dim=-1).all())

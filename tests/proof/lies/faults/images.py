"""Under the quantiser: operands that are something else than the image of their source, in every product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantexp.formats import (
    QuantSpec,
    Rounding,
    ScaleRule,
    finite_amax,
    quantise,
)
from tests.proof.lies.planting import EVERYWHERE, Planter, Quantising, When

from .fault import Group, add

_Change = Callable[[Quantising], Tensor | None]


def _add(name: str, line: str, change: _Change) -> None:
    add(name, line, Group.IMAGE, lambda planter: planter.quantisers(change))


def _spec(name: str, line: str, other: Callable[[QuantSpec], QuantSpec | None]) -> None:
    """Another declaration, where the format has that option."""

    def change(call: Quantising) -> Tensor | None:
        spec = other(call.spec)
        return None if spec is None or spec == call.spec else call.again(spec=spec)

    _add(name, line, change)


def _every(x: Tensor, step: int) -> Tensor:
    """Every `step`-th element of x, as a mask."""
    return (torch.arange(x.numel()) % step == 0).view(x.shape)


def _half_amax(call: Quantising) -> Tensor | None:
    """The scale that follows from half the amax: elements beyond it saturate."""
    if call.spec.is_scaled and not call.spec.has_blocks:
        amax = finite_amax(call.x) if call.amax is None else call.amax
        return call.again(amax=amax / 2)
    blocks = call.blocks(call.x)
    bound = blocks.abs().amax(-1, keepdim=True) / 2
    return call.again(call.unblocked(blocks.clamp(-bound, bound)))


def _block(factor: float) -> Callable[[QuantSpec], QuantSpec | None]:
    def other(spec: QuantSpec) -> QuantSpec | None:
        return replace(spec, block=int(spec.block * factor)) if spec.block > 1 else None

    return other


def _one_scale(call: Quantising) -> Tensor | None:
    """One block with the whole tensor."""
    if call.spec.block <= 1 or "block" not in call.spec.fmt.options:
        return None
    flat = call.x.flatten()
    whole = 1 << (flat.numel() - 1).bit_length()
    return call.again(flat, replace(call.spec, block=whole), 0, place=None).view(call.x.shape)


def _rule(spec: QuantSpec) -> QuantSpec | None:
    if "scale_rule" not in spec.fmt.options:
        return None
    is_floor = spec.scale_rule is ScaleRule.FLOOR
    return replace(spec, scale_rule=ScaleRule.CEIL if is_floor else ScaleRule.FLOOR)


def _rounding(rounding: Rounding) -> Callable[[QuantSpec], QuantSpec | None]:
    return lambda spec: replace(spec, rounding=rounding) if "rounding" in spec.fmt.options else None


def _twice(call: Quantising) -> Tensor | None:
    """wgrad's operands from the copies that the other products multiply."""
    if call.x.dim() != 3 or call.axis % 3 != 0 or not call.spec.has_blocks:
        return None
    return call.again(call.again(axis=2))


def _other_axis(call: Quantising) -> Tensor | None:
    """Blocks along the other axis."""
    if not call.spec.has_blocks:
        return None
    last = call.x.dim() - 1
    return call.again(axis=0 if call.axis % call.x.dim() == last else last)


def _shifted(call: Quantising) -> Tensor | None:
    """Blocks that begin half a block later."""
    if call.spec.block <= 1:
        return None
    shift = call.spec.block // 2
    return call.again(call.x.roll(shift, call.axis)).roll(-shift, call.axis)


def _other_format(call: Quantising) -> Tensor:
    """Another format of as many bits or more."""
    name = call.spec.fmt.name
    others = {"mxfp4_e2m1": "nvfp4", "nvfp4": "mxfp4", "mxfp8_e4m3": "mxfp8_e5m2"}
    return quantise(call.x, others.get(name, "mxfp8"), axis=call.axis)


def _coarser(call: Quantising) -> Tensor:
    """Values of the grid alone whose last bit of significand is zero, as if a bit were not stored."""
    bits = max(1, call.spec.fmt.element.mantissa_bits)
    mantissa, exponent = call.honest.float().frexp()
    return torch.ldexp((mantissa * 2**bits).trunc() / 2**bits, exponent).to(call.x.dtype)


def _without_small(call: Quantising) -> Tensor:
    """Elements below an eighth of their block's largest become zero, as where subnormals are flushed."""
    blocks = call.blocks(call.honest)
    largest = blocks.abs().amax(-1, keepdim=True)
    return call.unblocked(blocks.masked_fill(blocks.abs() < largest / 8, 0.0))


def _scale_off_by_two(call: Quantising) -> Tensor:
    """In every fifth block the scale is taken for twice as large."""
    blocks = call.blocks(call.honest)
    flat = blocks.reshape(-1, blocks.shape[-1]).clone()
    flat[::5] *= 2
    return call.unblocked(flat.view(blocks.shape))


def _swapped_scales(call: Quantising) -> Tensor | None:
    """Neighbouring blocks have each other's scale: scales laid out for the other axis, or swizzled."""
    if call.spec.block <= 1:
        return None
    blocks = call.blocks(call.honest).clone()
    if blocks.shape[-2] < 2:
        return None
    largest = blocks.abs().amax(-1, keepdim=True)
    exponent = torch.where(largest > 0, largest.float().log2().floor(), torch.zeros(()))
    other = exponent.roll(1, -2)
    return call.unblocked(blocks.float() * torch.exp2((other - exponent).clamp(-8, 8)))


def _transposed_blocks(call: Quantising) -> Tensor | None:
    """A square matrix quantised as its transpose."""
    if call.x.dim() != 2 or call.x.shape[0] != call.x.shape[1] or not call.spec.has_blocks:
        return None
    return call.again(call.x.t().contiguous()).t().contiguous()


def _sign_of_zero(call: Quantising) -> Tensor | None:
    """No product sees the sign of a zero: without an effect by design."""
    is_zero = call.honest == 0
    return call.honest.masked_fill(is_zero, -0.0) if is_zero.any() else None


def _largest_lost(call: Quantising) -> Tensor:
    """The largest element of each row becomes zero: a mask for outliers with the wrong sign."""
    honest = call.honest
    place = honest.abs().argmax(-1, keepdim=True)
    return honest.scatter(-1, place, 0.0)


def _only(elements: Callable[[Tensor], Tensor], what: _Change) -> _Change:
    """A change in some elements alone."""

    def change(call: Quantising) -> Tensor | None:
        other = what(call)
        if other is None:
            return None
        return torch.where(elements(call.x), other.to(call.x.dtype), call.honest)

    return change


def _one(x: Tensor) -> Tensor:
    mask = torch.zeros(x.shape, dtype=torch.bool)
    mask.view(-1)[x.abs().argmax() // 2] = True
    return mask


def _one_bit(call: Quantising) -> Tensor:
    """The operand after a step of the grid in one element in 64."""
    return torch.where(_every(call.x, 64), call.again(call.x * 1.5), call.honest)


_add("noise", "unrelated noise on the grid", lambda c: c.again(c.planter.noise(c.x)))
_add("negated", "the negative", lambda c: -c.honest)
_add("times 1.25", "the image of 1.25 times the source", lambda c: c.again(c.x * 1.25))
_add("times 2", "the image of twice the source", lambda c: c.again(c.x * 2))
_add("reversed rows", "the rows in reverse order", lambda c: c.again(c.x.flip(0)))
_add("half zero", "half of the elements are zero", lambda c: c.again(c.x * _every(c.x, 2)))
_add("all zero", "every operand is zero", lambda c: torch.zeros_like(c.honest))
_add("half amax", "scales follow from half the amax", _half_amax)
_spec("block x2", "blocks of twice the length", _block(2))
_spec("block x4", "blocks of four times the length", _block(4))
_spec("half block", "blocks of half the length", _block(0.5))
_add("one scale", "one scale a tensor in place of one a block", _one_scale)
_spec("stochastic", "rounded stochastically", _rounding(Rounding.STOCHASTIC))
_spec("away", "ties rounded away from zero", _rounding(Rounding.AWAY))
_spec("to nearest", "rounded to nearest, ties to even", _rounding(Rounding.EVEN))
_spec("towards zero", "rounded towards zero", _rounding(Rounding.ZERO))
_spec("other scale rule", "block scales by another rule", _rule)
_add("twice", "wgrad's operands quantised from copies along the other axis", _twice)
_add("other axis", "blocks along the other axis", _other_axis)
_add("shifted blocks", "blocks that begin half a block later", _shifted)
_add("transposed blocks", "a square weight quantised as its transpose", _transposed_blocks)
_add("other format", "another format", _other_format)
_add("coarser format", "a coarser format on the same grid", _coarser)
_add("not quantised", "the source itself", lambda c: c.x.clone())
_add("one element", "one element is not quantised", _only(_one, lambda c: c.x * 1.01))
_add(
    "one in five",
    "one element in five is not quantised",
    _only(lambda x: _every(x, 5), lambda c: c.x),
)
_add("one step", "one element in 64 has a neighbouring value of the grid", _one_bit)
_add("no small values", "values below 1/8 of the block's largest become zero", _without_small)
_add(
    "scale of every fifth block",
    "every fifth block's scale is taken for twice itself",
    _scale_off_by_two,
)
_add("scales of neighbours", "every block has its neighbour's scale", _swapped_scales)
_add("without the largest", "the largest element of each row is lost", _largest_lost)
_add("sign of zero", "zeros are negative", _sign_of_zero)
_spec(
    "not saturated",
    "values beyond the largest overflow",
    lambda s: replace(s, saturate=not s.saturate),
)
_spec(
    "amax target",
    "half the amax target",
    lambda s: replace(s, amax_target=s.amax_target / 2) if s.is_scaled else None,
)
_spec(
    "3/4",
    "3/4 of the operand, or all of it where 3/4 is declared",
    lambda s: (
        replace(s, pre_scale=1.0 if s.is_pre_scaled else 0.75)
        if "pre_scale" in s.fmt.options
        else None
    ),
)


def _kernel(planter: Planter) -> None:
    """The compiled kernel itself is wrong: an element in 64 of what it writes."""
    from quantexp.formats.kernels import cpu

    def one(original: Any) -> Any:
        def quantised(x: Tensor, y: Tensor, *rest: object) -> None:
            original(x, y, *rest)
            y.view(-1)[::64].neg_()
            planter.fire()

        return quantised

    def two(original: Any) -> Any:
        def quantised(x: Tensor, columns: Tensor, rows: Tensor, *rest: object) -> None:
            original(x, columns, rows, *rest)
            for y in (columns, rows):
                y.view(-1)[::64].neg_()
            planter.fire()

        return quantised

    planter.attribute(cpu, "quantise", one(cpu.quantise))
    planter.attribute(cpu, "quantise_both", two(cpu.quantise_both))


add(
    "kernel",
    "the compiled CPU kernel writes a wrong sign in one element of 64",
    Group.IMAGE,
    _kernel,
)


def _deep(planter: Planter) -> None:
    """`quantexp.formats` itself, below every caller."""
    from quantexp.formats import quantising

    def make(original: Any) -> Any:
        def quantised(x: Tensor, spec: QuantSpec, *rest: object) -> Tensor:
            planter.fire()
            return original(x * 1.25, spec, *rest)

        return quantised

    planter.attribute(quantising, "_quantised", make(quantising._quantised))


add("formats", "`formats.quantise` of 1.25 times its argument, whoever calls", Group.IMAGE, _deep)


def _quantised_bf16(planter: Planter) -> None:
    """A baseline that quantises."""
    planter.operands(
        lambda o: None if o.spec.quantised else quantise(o.x.contiguous(), "mxfp8", axis=o.axis),
        EVERYWHERE,
        When(),
    )


add(
    "baseline quantises",
    "slots declared in the working precision are in mxfp8",
    Group.IMAGE,
    _quantised_bf16,
)


def _bf16_of_fp32(planter: Planter) -> None:
    """Operands that pass through bf16 where the working precision has more bits."""
    planter.operands(lambda o: None if o.spec.quantised else o.x.bfloat16())


add(
    "baseline in bf16",
    "slots in the working precision are rounded to bf16",
    Group.IMAGE,
    _bf16_of_fp32,
)

"""Holds a stored operand against what `encode` or `quantise` makes of the tensor that it was quantised from.

Of formats with codes, codes and scales are compared byte for byte; of declared formats, which have none, the values.
Some differences are expected, each for a reason (Transformer Engine 2.11 to 2.20, read from its kernels):

    NaN          its amax leaves NaN out, so that only the element is NaN; ours gives NaN to the whole block
    Inf          MXFP8's scale is then 2^127, that of 1 x 128 blocks 1, ours NaN; no code of the block is compared
    smallest     up to version 2.12, MXFP8 multiplies a block whose scale is 2^-127 by 1, and flushes it to zero
    zero block   the scale of a block of zeros is 1 in 1 x 128 blocks and 0 in NVFP4, ours the smallest
    NVFP4        it multiplies by rounded reciprocals where ours divides, which decides where a scale or a quotient lies
                 at the middle of two values; and it rounds the scale of a block far below the others to zero
    random       where it rounds stochastically, or transforms by its own signs, only the format is compared

A zero block of 1 x 128 is one whose codes are all zero or NaN, here and there, so that it has the same values under any
finite scale; such scales are counted as expected. Any other block must have our scale. Source of the 1:
`compute_scale_from_amax` (common/recipe/recipe_common.cuh), which returns it for an amax of 0, Inf or NaN.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantexp.extras.transformer_engine.proof.stored import BLOCKS, E2M1, NV_TOP, Kind, Stored
from quantexp.formats import Family, QuantSpec, Rounding, Scaling, encode, quantise
from quantexp.formats.types import BlockScaleKind
from quantexp.proof.findings import Finding, Status
from quantexp.proof.verdict import NOT_FINITE

#: The share of values under float32 block scales that may differ by the order of operations; a wrong scale moves most.
NEAR = 2e-3
#: Relative: eight roundings to float32, more than NVFP4 makes between an element or amax and what is rounded.
SLACK = 2.0**-21
#: Why an operand's bytes are not compared though its source is at hand.
OWN_BITS = "by its class: the random bits are Transformer Engine's, it was not compared"
#: Said of an operand that engages with blocks of zeros.
OWN_ZEROS = "{:,} of {:,} scales are Transformer Engine's own, of blocks of zeros"
#: The first version in which MXFP8 keeps blocks with the smallest scale.
KEEPS_SMALLEST = (2, 13)

_NAN_SCALE, _MAGNITUDE = 255, 0x7F
_E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
#: The scale of a block with Inf.
_INF_SCALES = {Kind.MXFP8: 254, Kind.BLOCK: 127}


@dataclass(frozen=True)
class Comparison:
    """How a stored tensor differs from ours."""

    elements: int
    scales: int = 1
    #: Codes (of a declared format: values) and scales that differ without a reason.
    code_mismatches: int = 0
    scale_mismatches: int = 0
    #: Elements (of zero blocks: scales) that differ as expected, or are not compared, by reason.
    expected: Counter[str] = field(default_factory=Counter)

    @property
    def conforms(self) -> bool:
        """Whether nothing differs without a reason."""
        return not (self.code_mismatches or self.scale_mismatches)

    def __str__(self) -> str:
        return (
            f"{self.code_mismatches:,} of {self.elements:,} codes and {self.scale_mismatches:,} of {self.scales:,} "
            "scales differ"
        )


def kind_of_spec(spec: QuantSpec) -> Kind | None:
    """How Transformer Engine stores an operand of a slot; None for the working precision, and for a format it lacks."""
    match spec.fmt.family:
        case Family.MX if spec.fmt.element.bits == 8:
            return {32: Kind.MXFP8, 128: Kind.BLOCK}.get(spec.block)
        case Family.FP8:
            return Kind.FP8
        case Family.NV:
            return Kind.NVFP4
        case Family.GRID if spec.fmt.block is not None:
            return Kind.NVFP4 if spec.fmt.element.name == "e2m1" else Kind.BLOCK
    return None


def other_format(stored: Stored, spec: QuantSpec) -> str | None:
    """What a stored tensor is instead of the declared format; None if it is that format."""
    fits = stored.kind is kind_of_spec(spec) and stored.element == spec.fmt.element.name
    if fits and (stored.kind is not Kind.BLOCK or stored.across == spec.fmt.across):
        return None
    blocks = f" x {stored.across}" if stored.across > 1 else ""
    return f"{stored}{blocks}"


def finding_of(stored: Stored, spec: QuantSpec, source: Tensor) -> Finding:
    """The result for a stored operand; `source` is the tensor [M, K] before quantisation."""
    if (other := other_format(stored, spec)) is not None:
        return Finding(
            Status.MISMATCH,
            f"it reached the product as {other} of Transformer Engine",
            quantised=True,
        )
    if source.shape != stored.codes.shape:
        return other_shape(stored.codes, source)
    if not bool(source.isfinite().all()):
        return Finding(Status.INCONCLUSIVE, NOT_FINITE)
    if not bool(source.any()):
        return Finding(Status.INCONCLUSIVE, "all zero")
    if _is_random(spec):
        return Finding(Status.ENGAGED, OWN_BITS, quantised=True)
    comparison = compare(stored, spec, source)
    if comparison.conforms:
        zeros = comparison.expected["zero block"]
        reason = OWN_ZEROS.format(zeros, comparison.scales) if zeros else ""
        return Finding(Status.ENGAGED, reason, quantised=True)
    return Finding(
        Status.MISMATCH,
        f"{comparison} from those of {spec.fmt.name} of its source",
        quantised=True,
    )


def other_shape(x: Tensor, source: Tensor) -> Finding:
    """The result for an operand that cannot be that of its source."""
    shapes = [" x ".join(f"{extent:,}" for extent in each.shape) for each in (x, source)]
    return Finding(
        Status.MISMATCH, f"it reached the product as {shapes[0]}, and its source is {shapes[1]}"
    )


def compare(
    stored: Stored, spec: QuantSpec, source: Tensor, version: tuple[int, ...] = (2, 11)
) -> Comparison:
    """Compare a stored tensor [M, K] with the quantisation of `source` [M, K] as declared.

    `version` is that of Transformer Engine, for differences that it has outgrown.
    """
    count = stored.codes.numel()
    if _is_random(spec):
        return Comparison(count, expected=Counter({"random": count}))
    if stored.kind is Kind.NVFP4:
        return _nvfp4(stored, spec, source)
    if spec.fmt.family is Family.GRID:
        return _by_value(stored, spec, source)
    if stored.kind is Kind.FP8:
        return _one_scale(stored, spec, source)
    return _powers_of_two(stored, spec, source, version)


def _is_random(spec: QuantSpec) -> bool:
    return spec.is_transformed or spec.rounding is Rounding.STOCHASTIC


def _one_scale(stored: Stored, spec: QuantSpec, source: Tensor) -> Comparison:
    """FP8: codes, and the reciprocal of the scale. Delayed, the scale is Transformer Engine's, and the codes follow."""
    count = stored.codes.numel()
    if spec.scaling is Scaling.DELAYED:
        dtype = torch.float8_e4m3fn if stored.element == "e4m3" else torch.float8_e5m2
        top = torch.finfo(dtype).max
        scale = stored.scales.float().reciprocal()
        near = [scale, *(torch.nextafter(scale, scale * by) for by in (0, 2))]
        wrong = [
            int((_cast(source.float() * s, top, dtype) != stored.codes).sum())
            for s in near
            if torch.equal(s.reciprocal(), stored.scales.float())
        ]
        return Comparison(count, code_mismatches=min(wrong, default=count))
    clean = source.masked_fill(source.isnan(), 0.0)
    codes, factor = encode(clean, spec)
    assert isinstance(factor, Tensor)
    differ = (codes != stored.codes) & ~source.isnan()
    wrong_scale = not torch.equal(factor.reciprocal().reshape(1), stored.scales.float().reshape(1))
    return Comparison(
        count,
        code_mismatches=int(differ.sum()),
        scale_mismatches=int(wrong_scale),
        expected=_reasons(NaN=source.isnan()),
    )


def _cast(x: Tensor, top: float, dtype: torch.dtype) -> Tensor:
    return x.clamp(-top, top).to(dtype).view(torch.uint8)


def _powers_of_two(
    stored: Stored, spec: QuantSpec, source: Tensor, version: tuple[int, ...]
) -> Comparison:
    """MXFP8, and FP8 in blocks of 128 under powers of two."""
    size, axis = BLOCKS[stored.kind], stored.axis
    nan, inf = source.isnan(), _of_block(source.isinf(), size, axis)
    codes, scales = encode(source.masked_fill(nan, 0.0), spec, axis=axis)
    assert isinstance(scales, Tensor)
    theirs = stored.scales
    if stored.kind is Kind.BLOCK:
        theirs = _bytes_of(theirs)
    is_inf = scales == _NAN_SCALE
    wanted = scales.masked_fill(is_inf, _INF_SCALES[stored.kind])
    flushed = torch.zeros_like(nan)
    if stored.kind is Kind.MXFP8 and version < KEEPS_SMALLEST:
        flushed = _spread(scales == 0, source.shape, size, axis) & (codes & _MAGNITUDE != 0)
        codes = torch.where(flushed, codes & ~torch.tensor(_MAGNITUDE, dtype=torch.uint8), codes)
    nan_code = _MAGNITUDE if stored.element == "e4m3" else 0x7D
    is_nan = stored.codes & _MAGNITUDE >= nan_code
    differ = torch.where(nan, ~is_nan, codes != stored.codes) & ~inf
    differ_scale = theirs != wanted
    own = torch.zeros_like(differ_scale)
    if stored.kind is Kind.BLOCK:
        has_value = ((codes | stored.codes) & _MAGNITUDE != 0) & ~nan
        is_zero = ~_blocks(has_value, size, axis).any(-1) & ~is_inf
        own = differ_scale & is_zero & (theirs != _NAN_SCALE)
    expected = _reasons(
        **{"NaN": nan, "Inf": inf & ~nan, "smallest": flushed, "zero block": own},
    )
    return Comparison(
        stored.codes.numel(),
        scales.numel(),
        int(differ.sum()),
        int((differ_scale & ~own).sum()),
        expected,
    )


def _bytes_of(scales: Tensor) -> Tensor:
    """Float32 scales as E8M0; 255 for one that is no power of two from 2^-127 on."""
    mantissa, exponent = torch.frexp(scales)
    is_power = (mantissa == 0.5) & (exponent >= -126)
    return torch.where(is_power, exponent + 126, _NAN_SCALE).to(torch.uint8)


def _nvfp4(stored: Stored, spec: QuantSpec, source: Tensor) -> Comparison:
    """NVFP4 in blocks of 16 or 16 x 16: every scale and code is a nearest one, by `_is_nearest`."""
    assert stored.tensor_scale is not None
    axis, of_tensor = stored.axis, stored.tensor_scale.double().reshape(())
    x = source.double()
    amax = _blocks(x.abs(), 16, axis).amax(-1)
    if spec.fmt.across > 1:
        amax = _of_lines(amax, spec.fmt.across, -1 - axis)
    wanted, zero = amax / (6 * of_tensor), amax == 0
    of_block = stored.scales.view(torch.float8_e4m3fn).double()
    # Ours keeps the smallest scale for blocks whose scale Transformer Engine rounds to zero.
    is_smallest = (stored.scales == 1) & (wanted < of_block)
    right_scale = _is_nearest(stored.scales, wanted, _E4M3) | is_smallest | zero
    of_each = _spread(of_block, source.shape, 16, axis) * of_tensor
    quotient = torch.where(of_each > 0, x.abs() / of_each, 0.0)
    magnitude = stored.codes & 7
    right_sign = (magnitude == 0) | ((stored.codes >= 8) == x.signbit())
    wrong = ~_is_nearest(magnitude, quotient, E2M1.double()) | ~right_sign
    is_far = not torch.allclose(
        source.abs().amax().double() / NV_TOP, of_tensor, rtol=SLACK, atol=0
    )
    ours = quantise(source.float(), spec, axis=axis)
    other = ~torch.isclose(ours, stored.values(), rtol=SLACK, atol=0.0) & ~wrong
    return Comparison(
        stored.codes.numel(),
        stored.scales.numel() + 1,
        int(wrong.sum()),
        int((~right_scale).sum()) + is_far,
        _reasons(**{"zero block": zero & (stored.scales == 0), "NVFP4": other}),
    )


def _is_nearest(codes: Tensor, wanted: Tensor, values: Tensor) -> Tensor:
    """Whether each code is that of a nearest value >= 0 of a grid, up to `SLACK`; beyond the last value, of that."""
    values = values.to(wanted.device)
    middle = (values[1:] + values[:-1]) / 2
    ends = middle.new_tensor([0.0]), middle.new_tensor([torch.inf])
    index = codes.long().clamp_max(len(values) - 1)
    low, high = torch.cat([ends[0], middle])[index], torch.cat([middle, ends[1]])[index]
    is_code = codes < len(values)
    return is_code & (wanted >= low * (1 - SLACK)) & (wanted <= high * (1 + SLACK))


def _of_lines(x: Tensor, size: int, axis: int) -> Tensor:
    """The largest of each `size` neighbours along an axis, given to each of them."""
    largest = _blocks(x, size, axis).amax(-1)
    return _spread(largest, x.shape, size, axis)


def _by_value(stored: Stored, spec: QuantSpec, source: Tensor) -> Comparison:
    """A declared format: the values of its blocks, exactly under powers of two."""
    ours = quantise(source.float(), spec, axis=stored.axis)
    theirs = stored.values()
    grid_scale = spec.fmt.grid_scale
    differ = ours != theirs
    near = 0
    if grid_scale is None or grid_scale.kind is not BlockScaleKind.E8M0:
        differ = ~torch.isclose(ours, theirs, rtol=SLACK, atol=0.0)
        near = _allowed(differ, differ.numel())
    expected = Counter({"order of operations": near}) if near else Counter()
    return Comparison(differ.numel(), 0, int(differ.sum()) - near, expected=expected)


def _allowed(differ: Tensor, count: int) -> int:
    """How many differences the order of operations explains: all of them, or none if they are too many."""
    number = int(differ.sum())
    return number if number <= NEAR * count + 1 else 0


def _blocks(x: Tensor, size: int, axis: int) -> Tensor:
    """[M, K] as [M, blocks, size] or [blocks, K, size]; a short last block is padded with False."""
    lines = x.movedim(axis, -1)
    lines = torch.nn.functional.pad(lines, (0, -lines.shape[-1] % size))
    blocks = lines.reshape(lines.shape[0], -1, size)
    return blocks if axis == -1 else blocks.movedim(1, 0)


def _of_block(x: Tensor, size: int, axis: int) -> Tensor:
    """For each element of [M, K]: whether any of its block is."""
    return _spread(_blocks(x, size, axis).any(-1), x.shape, size, axis)


def _spread(of_blocks: Tensor, shape: torch.Size, size: int, axis: int) -> Tensor:
    M, K = shape
    return of_blocks.repeat_interleave(size, axis)[:M, :K]


def _reasons(**masks: Tensor) -> Counter[str]:
    return Counter({name: int(mask.sum()) for name, mask in masks.items() if bool(mask.any())})

"""The table of number formats. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from quantexp.formats.types import Element, Family, Format, Rounding, ScaleRule, Scaling

# OCP MX v1.0 section 5.3.1: E4M3 has no infinity, E5M2 follows IEEE 754; sections 5.3.2 and 5.3.3: the 6-bit and 4-bit
# elements have neither infinity nor NaN.
E4M3 = Element("e4m3", 8, emin=-6, emax=8, mantissa_bits=3, max=448.0, nan_codes=(0x7F,))
E5M2 = Element(
    "e5m2",
    8,
    emin=-14,
    emax=15,
    mantissa_bits=2,
    max=57344.0,
    inf_codes=(0x7C,),
    nan_codes=(0x7D, 0x7E, 0x7F),
)
E2M3 = Element("e2m3", 6, emin=0, emax=2, mantissa_bits=3, max=7.5)
E3M2 = Element("e3m2", 6, emin=-2, emax=4, mantissa_bits=2, max=28.0)
E2M1 = Element("e2m1", 4, emin=0, emax=2, mantissa_bits=1, max=6.0)
# HiFloat8's NaN is the code 0x80 (the sign bit alone), so no magnitude code represents it.
HIF8 = Element(
    "hif8",
    8,
    emin=-22,
    emax=15,
    mantissa_bits=3,
    max=32768.0,
    inf_codes=(0x6F,),
    has_negative_zero=False,
)
BF16 = Element(
    "bf16",
    16,
    emin=-126,
    emax=127,
    mantissa_bits=7,
    max=(2 - 2**-7) * 2.0**127,
    inf_codes=(0x7F80,),
    nan_codes=tuple(range(0x7F81, 0x8000)),
)

MX_BLOCK = 32
NV_BLOCK = 16
#: The default amax after HiF8's scalings: the top of the region with three mantissa bits.
HIF8_AMAX_TARGET = 15.0

ROUNDING_OPTIONS = frozenset({"rounding", "seed", "offset"})
TENSOR_SCALE_OPTIONS = frozenset({"scaling", "amax"})


def _mx(name: str, element: Element, *aliases: str) -> Format:
    pre_scale = {"pre_scale"} if element.bits == 4 else set()
    return Format(
        name=name,
        family=Family.MX,
        element=element,
        block=MX_BLOCK,
        scale_rule=ScaleRule.FLOOR,
        rounding=Rounding.EVEN,
        options=ROUNDING_OPTIONS | {"block", "scale_rule"} | pre_scale,
        aliases=aliases,
        source="OCP Microscaling Formats (MX) v1.0",
    )


def _fp8(element: Element) -> Format:
    return Format(
        name=f"fp8_{element.name}",
        family=Family.FP8,
        element=element,
        block=None,
        scale_rule=None,
        rounding=Rounding.EVEN,
        options=ROUNDING_OPTIONS | TENSOR_SCALE_OPTIONS | {"amax_target", "saturate"},
        scaling=Scaling.EXACT,
        amax_target=element.max,
        source="OCP 8-bit Floating Point (OFP8) v1.0",
    )


_ALL = (
    _mx("mxfp8_e4m3", E4M3, "mxfp8"),
    _mx("mxfp8_e5m2", E5M2),
    _mx("mxfp6_e2m3", E2M3),
    _mx("mxfp6_e3m2", E3M2),
    _mx("mxfp4_e2m1", E2M1, "mxfp4"),
    Format(
        name="nvfp4_e2m1",
        family=Family.NV,
        element=E2M1,
        block=NV_BLOCK,
        scale_rule=None,
        rounding=Rounding.EVEN,
        options=ROUNDING_OPTIONS | TENSOR_SCALE_OPTIONS | {"block", "pre_scale"},
        scaling=Scaling.EXACT,
        amax_target=E2M1.max * E4M3.max,
        block_scale=E4M3,
        aliases=("nvfp4",),
        source="NVFP4, arXiv 2509.25149",
    ),
    _fp8(E4M3),
    _fp8(E5M2),
    Format(
        name="hifp8",
        family=Family.HIF8,
        element=HIF8,
        block=None,
        scale_rule=None,
        rounding=Rounding.AWAY,
        options=ROUNDING_OPTIONS | TENSOR_SCALE_OPTIONS | {"amax_target", "saturate"},
        amax_target=HIF8_AMAX_TARGET,
        source="HiFloat8, arXiv 2409.16626",
    ),
    Format(
        name="bf16",
        family=Family.BF16,
        element=BF16,
        block=None,
        scale_rule=None,
        rounding=Rounding.EVEN,
        options=frozenset(),
        source="the upper half of IEEE 754 binary32",
    ),
)

#: Every format by its canonical name.
FORMATS: Mapping[str, Format] = MappingProxyType({fmt.name: fmt for fmt in _ALL})
#: The same by every name and alias.
BY_ANY_NAME: Mapping[str, Format] = {name: fmt for fmt in _ALL for name in (fmt.name, *fmt.aliases)}
#: Mantissa bits of the elements of MX that kernels compute in integers, or on a GPU.
_MX_MANTISSAS = range(1, 4)
#: Elements of a panel of the compiled code: the most, of a column, and of a row's smallest part.
_PANEL, _COLUMN, _ROW = 16384, 512, 32
#: Exponent beyond which the float adder cannot round to an element's mantissa: the sum would overflow.
MOST_MAGIC = 127 - 24
#: The smallest normal exponent of float32.
_LEAST_STEP = -126


def panel_fits(block: int, across: int = 1) -> bool:
    """Whether a panel of the compiled code holds such blocks, along memory and across it."""
    sides = (block, across), (across, block)
    return block <= _COLUMN and all(a * (-(-b // _ROW) * _ROW) <= _PANEL for a, b in sides)


def is_usual_mx(element: Element) -> bool:
    """Whether kernels compute such elements of MX in integers, or on a GPU: no rule takes their scales beyond 2^127."""
    return element.mantissa_bits in _MX_MANTISSAS and element.emax > 0


def is_compiled(fmt: Format, block: int | None = None) -> bool:
    """Whether the compiled code may take the format; `block` replaces the format's own.

    Its scales follow from an amax, its elements are floats or integers that the float adder rounds to, and its blocks
    have up to 512 elements along the axis, up to 128 x 128 in all.
    """
    scale, extent = fmt.grid_scale, fmt.block if block is None else block
    if fmt.family in (Family.PYTHON, Family.BF16) or (scale is not None and not scale.is_of_amax):
        return False
    if fmt.block is not None and (extent is None or not panel_fits(extent, fmt.across)):
        return False
    if fmt.family is Family.HIF8:
        return True
    of_scale = fmt.block_scale if scale is None else scale.element
    is_power = fmt.scale_rule is not None or (scale is not None and of_scale is None)
    elements = [fmt.element, *([] if of_scale is None else [of_scale])]
    return all(map(_is_rounded_by_adder, elements)) and (not is_power or fmt.element.emax >= 0)


def _is_rounded_by_adder(element: Element) -> bool:
    if element.values or element is HIF8:
        return False
    is_normal = element.emin - element.mantissa_bits > _LEAST_STEP
    return is_normal and element.emax - element.mantissa_bits <= MOST_MAGIC

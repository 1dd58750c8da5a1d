"""What `quantexp list formats` shows of each number format. Needs no torch."""

from __future__ import annotations

from quantexp.formats.table import FORMATS
from quantexp.formats.types import Family, Format

_SCALE = {
    Family.MX: "a power of two (E8M0) a block",
    Family.NV: "E4M3 a block, float32 a tensor",
    Family.FP8: "float32 a tensor",
    Family.HIF8: "none, or a power of two a tensor",
    Family.BF16: "none",
}


def format_rows() -> list[dict[str, object]]:
    """Each format, in the order of the table; largest and smallest are the element's, before any scale."""
    return [
        {
            "name": fmt.name,
            "about": fmt.source,
            "aliases": list(fmt.aliases),
            "element": fmt.element.name,
            "element_bits": fmt.element.bits,
            "block": fmt.block,
            "scale": _SCALE[fmt.family],
            "largest": fmt.element.max,
            "smallest": smallest(fmt),
        }
        for fmt in FORMATS.values()
    ]


def smallest(fmt: Format) -> float:
    """The smallest positive value: subnormal, but for HiF8, whose `emin` is the smallest value's exponent."""
    element = fmt.element
    subnormal_bits = 0 if fmt.family is Family.HIF8 else element.mantissa_bits
    return float(2.0 ** (element.emin - subnormal_bits))

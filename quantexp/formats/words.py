"""Describes a number format in words, for tables and plans. Needs no torch."""

from __future__ import annotations

from quantexp.formats.table import is_compiled
from quantexp.formats.types import (
    WHOLE_ROW,
    BlockRule,
    BlockScaleKind,
    Family,
    Format,
    Scaling,
)

#: The scale of a tensor in words, by scaling.
_TENSOR_SCALE = {
    Scaling.NONE: "",
    Scaling.EXACT: "float32 a tensor",
    Scaling.CURRENT: "2^k a tensor",
    Scaling.DELAYED: "2^k a tensor",
}
_KINDS = {
    BlockScaleKind.E8M0: "E8M0",
    BlockScaleKind.BF16: "bf16",
    BlockScaleKind.FP32: "float32",
}


def block_words(fmt: Format, block: int | None = None) -> str:
    """`24`, `128 x 128` or `row`; empty without blocks. `block` replaces the format's own number."""
    extent = fmt.block if block is None else block
    if fmt.block is None or extent is None:
        return ""
    if fmt.grid_scale is not None and fmt.grid_scale.each:
        extent = fmt.grid_scale.each
    if extent >= WHOLE_ROW:
        return "row"
    return f"{extent}" if fmt.across == 1 else f"{fmt.across} x {extent}"


def block_scale_words(fmt: Format, rule: str | None = None) -> str:
    """`UE5M3 a block`, with the rule where it is not `exact`; empty without blocks.

    `rule` replaces an MX format's own.
    """
    if fmt.family is Family.MX:
        return f"E8M0 a block, {rule or fmt.scale_rule}" if fmt.definition else "E8M0 a block"
    if fmt.grid_scale is None:
        return "E4M3 a block" if fmt.block is not None else ""
    scale = fmt.grid_scale
    name = scale.element.name.upper() if scale.element else _KINDS[scale.kind]
    own = "" if scale.rule is BlockRule.EXACT else f", {scale.rule}"
    if scale.candidates:
        own += f", to {' or '.join(f'{c:g}' for c in scale.candidates)}"
    if len(scale.candidates) > 1 or scale.others:
        own += f" by {scale.choose}"
    return f"{name} a {'row' if block_words(fmt) == 'row' else 'block'}{own}{level_words(fmt)}"


def level_words(fmt: Format) -> str:
    """`, one bit for 8 and 4 elements` or `, corrected over 32`; empty for plain scales."""
    scale = fmt.grid_scale
    if scale is None or scale.is_of_amax:
        return ""
    words = ""
    if scale.micro_exponents:
        words = f", one bit for {' and '.join(map(str, scale.micro_exponents))} elements"
    if scale.corrected:
        words = f", corrected over {scale.corrected}"
    if scale.macro is not Scaling.NONE:
        of = "a row" if fmt.block == WHOLE_ROW else f"for {fmt.block} elements"
        words += f", {_TENSOR_SCALE[scale.macro].removesuffix(' a tensor')} {of}"
    return words


def element_words(fmt: Format) -> str:
    """The element's name, or those of all that a block may take: `e2m1 or int4`."""
    others = () if fmt.grid_scale is None else fmt.grid_scale.others
    return " or ".join(element.name for element in (fmt.element, *others))


def scale_words(fmt: Format) -> str:
    """`UE5M3 a block, float32 a tensor`."""
    if fmt.family is Family.HIF8 and not fmt.definition:
        return "none, or 2^k a tensor"
    return ", ".join(filter(None, (block_scale_words(fmt), _TENSOR_SCALE[fmt.scaling]))) or "none"


def smallest_value(fmt: Format) -> float:
    """The smallest positive value of the element; for HiF8, `emin` is already its exponent."""
    element = fmt.element
    if element.values:
        return min(value for value in map(abs, element.values) if value)
    subnormal_bits = 0 if element.name == "hif8" else element.mantissa_bits
    return float(2.0 ** (element.emin - subnormal_bits))


def num_values(fmt: Format) -> int:
    """Finite values of the element, with one zero."""
    element = fmt.element
    if element.values:
        return len(element.values)
    special = len(element.inf_codes) + len(element.nan_codes)
    magnitudes = element.sign_bit - special
    return 2 * magnitudes - 1 + (element.lowest is not None)


def code_words(fmt: Format) -> str:
    """Which code quantises on a CPU: compiled, that of torch, or a class of the user."""
    if fmt.family is Family.PYTHON:
        return "your class"
    return "compiled code" if is_compiled(fmt) else "torch code"

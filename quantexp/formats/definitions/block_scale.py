"""Reads what a declaration says of its blocks' scales. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from quantexp.formats.definitions.elements import (
    POWERS,
    TENSOR_SCALES,
    amax_target_of,
    as_text,
    choice_of,
    scale_element_of,
)
from quantexp.formats.table import HIF8
from quantexp.formats.types import (
    WHOLE_ROW,
    BlockRule,
    BlockScale,
    BlockScaleKind,
    Choose,
    Element,
)

_MOST_CANDIDATES = 16
#: The most levels of micro-exponents, and the most elements whose scales share a correction.
_MOST_LEVELS, _MOST_CORRECTED = 3, 1 << 16
_RULES = {
    BlockScaleKind.E8M0: ("floor", "rceil", "ceil", "even", "search"),
    BlockScaleKind.FLOAT: ("exact", "floor", "ceil", "search"),
    BlockScaleKind.BF16: ("exact", "floor", "ceil", "search"),
    BlockScaleKind.FP32: ("exact", "search"),
}
_SCALES = "e8m0, power_of_two, fp32, bf16, none, or a small float such as ue5m3"


def block_scale_of(
    content: Mapping[str, Any], elements: Sequence[Element], block: tuple[int, int]
) -> BlockScale:
    """The scales of blocks of so many rows and elements, whose elements are of the first of these, or of one of them.

    Raises:
        ValueError: in one line, what is wrong with which key.
    """
    name = content.get("scale", "e8m0")
    small = None
    if name in POWERS:
        kind = BlockScaleKind.E8M0
    elif name in ("fp32", "bf16"):
        kind = BlockScaleKind(name)
    elif isinstance(name, str | Mapping) and (small := scale_element_of(name)) is not None:
        kind = BlockScaleKind.FLOAT
    elif name in (None, "none"):
        raise ValueError("scale must not be none with blocks; drop block, or give a scale")
    else:
        raise ValueError(f"scale must be one of {_SCALES}, got {name!r}")
    rules = _RULES[kind]
    rule = content.get("scale_rule") or rules[0]
    if rule not in rules:
        raise ValueError(
            f"scale_rule must be one of {', '.join(rules)} for scale {name}, got {rule!r}"
        )
    for element in elements:
        if rule == "even" and (element is HIF8 or element.values):
            raise ValueError(
                f"scale_rule even rounds an amax to the element's mantissa, which {element.name} does not have; take "
                "floor"
            )
    candidates = _candidates(content, kind, rule)
    is_chosen = len(elements) > 1 or len(candidates) > 1 or rule == BlockRule.SEARCH
    return BlockScale(
        kind,
        BlockRule(rule),
        small,
        candidates,
        _choose(content, is_chosen=is_chosen),
        others=tuple(elements[1:]),
        micro_exponents=_micro_exponents(content, elements, block),
        **_groups(content, kind, block, elements[0], small),
    )


def _candidates(content: Mapping[str, Any], kind: BlockScaleKind, rule: str) -> tuple[float, ...]:
    candidates = content.get("candidates")
    if candidates is None:
        return ()
    if kind is BlockScaleKind.E8M0:
        raise ValueError(
            "candidates is for scales that are no powers of two; scale_rule: search tries halves of those"
        )
    if rule == BlockRule.SEARCH:
        raise ValueError("candidates and scale_rule search exclude each other; drop one")
    is_list = isinstance(candidates, list) and 1 <= len(candidates) <= _MOST_CANDIDATES
    if not is_list or not all(map(_is_positive, candidates)):
        raise ValueError(
            f"candidates must be 1 to {_MOST_CANDIDATES} numbers above 0, got {candidates!r}{as_text(candidates)}"
        )
    return tuple(map(float, candidates))


def _choose(content: Mapping[str, Any], *, is_chosen: bool) -> Choose:
    choose = content.get("choose")
    if choose is not None and not is_chosen:
        raise ValueError(
            "choose is for several candidates or elements and for scale_rule search; give these, or drop it"
        )
    chosen: Choose = choice_of("choose", choose or "mse", {each.value: each for each in Choose})
    return chosen


def _micro_exponents(
    content: Mapping[str, Any], elements: Sequence[Element], block: tuple[int, int]
) -> tuple[int, ...]:
    sizes = content.get("micro_exponents")
    if sizes is None:
        return ()
    rows, extent = block
    is_list = isinstance(sizes, list) and 1 <= len(sizes) <= _MOST_LEVELS
    outer = [extent, *sizes] if is_list else []
    if not is_list or not all(
        isinstance(inner, int)
        and not isinstance(inner, bool)
        and 1 <= inner < size
        and size % inner == 0
        for size, inner in zip(outer, sizes, strict=False)
    ):
        raise ValueError(
            f"micro_exponents must be 1 to {_MOST_LEVELS} numbers of elements, each of which divides the one before, "
            f"the first the block of {extent}, got {sizes!r}"
        )
    for key in ("candidates", "eden"):
        if content.get(key) is not None:
            raise ValueError(f"micro_exponents and {key} exclude each other; drop one")
    if rows > 1 or len(elements) > 1 or content.get("scale_rule") == BlockRule.SEARCH:
        raise ValueError(
            "micro_exponents is for blocks of one row of one element, whose scale follows from an amax"
        )
    if elements[0] is HIF8 or elements[0].values:
        raise ValueError(
            f"micro_exponents is for floats and integers, whose values a power of two moves, got {elements[0].name}"
        )
    return tuple(sizes)


def _groups(
    content: Mapping[str, Any],
    kind: BlockScaleKind,
    block: tuple[int, int],
    element: Element,
    scale: Element | None,
) -> dict[str, Any]:
    """What several blocks share: the scale of a macro block, and a correction of their own."""
    corrected = _corrected(content, kind, block)
    unit = corrected or block[1]
    size = content.get("macro_block")
    if size is None:
        return {"each": block[1], "corrected": corrected} if corrected else {}
    _check_plain_blocks("macro_block", block)
    is_number = isinstance(size, int) and not isinstance(size, bool)
    if size != "row" and not (is_number and unit < size <= _MOST_CORRECTED and size % unit == 0):
        raise ValueError(
            f"macro_block must be row or a multiple of {unit} elements, at most {_MOST_CORRECTED}, got {size!r}"
        )
    if content.get("tensor_scale") in (None, "none"):
        raise ValueError("macro_block has the scale that tensor_scale names; give tensor_scale")
    if kind not in (BlockScaleKind.E8M0, BlockScaleKind.FLOAT):
        raise ValueError(
            "macro_block is above block scales that are small floats or powers of two; drop it"
        )
    largest = element.max * 2.0 ** len(content.get("micro_exponents") or ())
    largest *= 1.0 if scale is None else scale.max
    return {
        "each": block[1],
        "corrected": corrected,
        "macro": choice_of("tensor_scale", content["tensor_scale"], TENSOR_SCALES),
        "macro_target": amax_target_of(content, largest) or largest,
    }


def _check_plain_blocks(key: str, block: tuple[int, int]) -> None:
    rows, extent = block
    if rows > 1 or extent >= WHOLE_ROW:
        raise ValueError(f"{key} is for blocks of a number of elements; give block a number")


def _corrected(
    content: Mapping[str, Any], kind: BlockScaleKind, block: tuple[int, int]
) -> int | None:
    """The elements whose blocks' scales share a correction."""
    size = content.get("eden")
    if size is None:
        return None
    _check_plain_blocks("eden", block)
    extent = block[1]
    if kind is BlockScaleKind.E8M0:
        raise ValueError(
            "eden corrects scales by some percent, which powers of two cannot have; give scale a small float"
        )
    is_number = isinstance(size, int) and not isinstance(size, bool)
    if not is_number or not extent <= size <= _MOST_CORRECTED or size % extent:
        raise ValueError(
            f"eden must be a multiple of the block of {extent}, at most {_MOST_CORRECTED}, got {size!r}"
        )
    return int(size)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def check_reach(element: Element, scale: BlockScale) -> None:
    """Refuse scales under which no value of ordinary size can be represented.

    Training's values lie around 1 or below, gradients far below: a format must at least reach 1, without its tensor
    scale, which moves the whole range.
    """
    if scale.element is None or _reaches_one(element, scale.element):
        return
    largest = element.max * scale.element.max
    smallest = element.max * 2.0 ** (scale.element.emin - scale.element.mantissa_bits)
    raise ValueError(
        f"scale {scale.element.name} cannot reach 1 with element {element.name}: its blocks have an amax from "
        f"{smallest:.3g} to {largest:.3g}; take a scale with more exponent bits"
    )


def _reaches_one(element: Element, scale: Element) -> bool:
    smallest = element.max * 2.0 ** (scale.emin - scale.mantissa_bits)
    return smallest <= 1 <= element.max * scale.max

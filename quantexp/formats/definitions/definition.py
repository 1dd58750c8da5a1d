"""Reads the declaration of a number format. Needs no torch.

    element: e3m3            see `elements`; a list of which a block takes the one with the least error
    block: 24                elements along the axis that a product reduces; or [rows, elements], row, tensor
    scale: ue5m3             e8m0 (or power_of_two), fp32, bf16, a small float without a sign, or none
    scale_rule: exact        how a block's amax determines its scale, see `BlockRule`
    candidates: [6, 4]       what a block's amax may be brought to; the element's largest value without it
    choose: mse              of candidates, elements and of the rule search: the error that decides, see `Choose`
    micro_exponents: [8, 4]  groups within a block, each in the one before, with one bit of exponent each
    eden: 32                 elements whose blocks' scales share a correction and are rounded to the format's `rounding`
    tensor_scale: none       above the block scales: fp32 or power_of_two
    macro_block: 128         elements that have the scale of `tensor_scale` in place of the tensor; or row
    rounding: even           even, away, zero or stochastic
    amax_target: 15          the amax of the tensor after scaling; without it the largest value of the element, times
                             that of the block scales if there are any

A declaration whose arithmetic is that of a family of the table belongs to that family:

    mx      a float or an integer in blocks of one row under powers of two by amax: its kernels, its codes, its proof
    fp8     a float or an integer under at most one scale a tensor
    hif8    HiFloat8 under at most one scale a tensor
    grid    all others

The key `python` alone declares a class (see `python`).

The default scale rule is floor for e8m0, as OCP MX v1.0 says, and exact for all others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from quantexp.formats.definitions.elements import (
    POWERS,
    TENSOR_SCALES,
    amax_target_of,
    choice_of,
    element_of,
)
from quantexp.formats.definitions.python import PYTHON, python_format
from quantexp.formats.table import (
    HIF8,
    HIF8_AMAX_TARGET,
    ROUNDING_OPTIONS,
    TENSOR_SCALE_OPTIONS,
)
from quantexp.formats.types import (
    WHOLE_ROW,
    BlockScale,
    BlockScaleKind,
    Element,
    Family,
    Format,
    Rounding,
    ScaleRule,
    Scaling,
)

KEYS = (
    "element",
    "block",
    "scale",
    "scale_rule",
    "candidates",
    "choose",
    "micro_exponents",
    "eden",
    "macro_block",
    "tensor_scale",
    "rounding",
    "amax_target",
)
_MOST_BLOCK = 1 << 20
#: The most elements of which a block takes one.
_MOST_ELEMENTS = 4
#: Exponents that MX's arithmetic adds to a magnitude; beyond, the sum would not be finite.
_MAGIC_BITS = 24
_FLOAT32_EMAX = 127
#: The exponents of E8M0's smallest scale and of float32's smallest number: MX rounds to multiples of a step in units of
#: x, which must not vanish.
_LEAST_SCALE, _FLOAT32_LEAST = -127, -149


def canonical(content: Mapping[str, Any]) -> str:
    """A definition as JSON with sorted keys: what makes two declarations the same format."""
    return json.dumps(content, sort_keys=True)


def declared_format(name: str, content: Mapping[str, Any]) -> Format:
    """The format of a declaration.

    Raises:
        ValueError: in one line, what is wrong with which key.
    """
    try:
        return _format_of(name, canonical(content))
    except TypeError as error:
        raise ValueError(
            f"the format {name} must be plain YAML with text as keys: {error}"
        ) from error


@lru_cache(maxsize=1024)
def _format_of(name: str, definition: str) -> Format:
    content = json.loads(definition)
    if PYTHON in content:
        return python_format(name, content, definition)
    for key in content:
        if key not in KEYS:
            raise ValueError(f"unknown key {key}; a format has {', '.join(KEYS)}")
    if "element" not in content:
        raise ValueError(f"element is missing; a format has {', '.join(KEYS)}")
    elements = _elements(content["element"])
    rows, extent = _block(content.get("block", "tensor"))
    roundings = {rounding.value: rounding for rounding in Rounding}
    rounding = choice_of("rounding", content.get("rounding", "even"), roundings)
    make = _of_tensor if extent is None else _of_blocks
    return make(name, content, elements, (rows, extent or 0), rounding, definition)


def _elements(content: object) -> list[Element]:
    """The elements of a format, of which a block takes one."""
    if not isinstance(content, list):
        return [element_of(content)]
    if not 2 <= len(content) <= _MOST_ELEMENTS:
        raise ValueError(
            f"a list of elements must have 2 to {_MOST_ELEMENTS}, got {len(content)}; a list of values is "
            "{values: [...]}"
        )
    return [element_of(each) for each in content]


def _of_tensor(
    name: str,
    content: Mapping[str, Any],
    elements: Sequence[Element],
    block: tuple[int, int],
    rounding: Rounding,
    definition: str,
) -> Format:
    """A format without blocks: under one scale, or none."""
    element, *others = elements
    if others:
        raise ValueError(
            "a list of elements is for a format with blocks; give block, or one element"
        )
    for key in (
        *("scale_rule", "candidates", "choose", "micro_exponents", "eden", "macro_block"),
        "tensor_scale",
    ):
        if content.get(key) is not None:
            raise ValueError(f"{key} is for a format with blocks; give block, or drop it")
    scale = content.get("scale", "fp32")
    scale = "power_of_two" if scale in POWERS else "none" if scale is None else scale
    if scale not in TENSOR_SCALES:
        raise ValueError(
            f"scale of a whole tensor must be one of {', '.join(TENSOR_SCALES)}, got {scale!r}"
        )
    scaling = TENSOR_SCALES[scale]
    is_grid = not _is_signed_float(element) and element is not HIF8
    target = amax_target_of(content, element.max)
    default = HIF8_AMAX_TARGET if element is HIF8 else element.max
    family = Family.GRID if is_grid else Family.HIF8 if element is HIF8 else Family.FP8
    options = ROUNDING_OPTIONS | TENSOR_SCALE_OPTIONS | {"amax_target"}
    return Format(
        name,
        family,
        element,
        block=None,
        scale_rule=None,
        rounding=rounding,
        options=options if is_grid else options | {"saturate"},
        scaling=scaling,
        amax_target=target or float(default),
        definition=definition,
    )


def _of_blocks(
    name: str,
    content: Mapping[str, Any],
    elements: Sequence[Element],
    block: tuple[int, int],
    rounding: Rounding,
    definition: str,
) -> Format:
    """A format with blocks, each under a scale."""
    from quantexp.formats.definitions.block_scale import block_scale_of, check_reach

    element = elements[0]
    rows, extent = block
    scale = block_scale_of(content, elements, block)
    scaling = choice_of("tensor_scale", content.get("tensor_scale") or "none", TENSOR_SCALES)
    is_macro, extent = scale.macro is not Scaling.NONE, scale.corrected or extent
    if is_macro:
        macro_block, scaling = content["macro_block"], Scaling.NONE
        extent = WHOLE_ROW if macro_block == "row" else macro_block
    if scaling is not Scaling.NONE and scale.element is None:
        raise ValueError(
            f"tensor_scale is for block scales that are small floats such as e4m3, got scale {content.get('scale')}; "
            "drop it"
        )
    is_scaled = scaling is not Scaling.NONE
    if "amax_target" in content and not (is_scaled or is_macro):
        raise ValueError(
            "amax_target is the amax of a tensor after scaling; with blocks it needs a tensor_scale"
        )
    check_reach(element, scale)
    options = ROUNDING_OPTIONS
    if _is_mx(element, rows, extent, scale):
        return Format(
            name,
            Family.MX,
            element,
            block=extent,
            scale_rule=ScaleRule(scale.rule.value),
            rounding=rounding,
            options=options | {"block", "scale_rule"},
            definition=definition,
        )
    largest = element.max * scale.element.max if is_scaled and scale.element else None
    return Format(
        name,
        Family.GRID,
        element,
        block=extent,
        scale_rule=None,
        rounding=rounding,
        options=options | TENSOR_SCALE_OPTIONS if is_scaled else options,
        scaling=scaling,
        amax_target=largest and (amax_target_of(content, largest) or largest),
        across=rows,
        grid_scale=scale,
        definition=definition,
    )


def _block(content: object) -> tuple[int, int | None]:
    """Rows and elements of a block; no elements stand for the whole tensor."""
    if content == "tensor" or content is None:
        return 1, None
    if content == "row":
        return 1, WHOLE_ROW
    sides = [1, content] if _is_extent(content) else content
    if isinstance(sides, list) and len(sides) == 2 and all(map(_is_extent, sides)):
        return sides[0], sides[1]
    raise ValueError(
        f"block must be a number of elements, [rows, elements], row or tensor, with numbers from 1 to {_MOST_BLOCK}, "
        f"got {content!r}"
    )


def _is_extent(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST_BLOCK


def _is_signed_float(element: Element) -> bool:
    """Whether the families of the table can round to it: a float or an integer of which both signs are alike."""
    return (
        element is not HIF8
        and not element.values
        and element.lowest is None
        and element.has_negative_zero
        and element.emax + _MAGIC_BITS - element.mantissa_bits <= _FLOAT32_EMAX
    )


def _is_mx(element: Element, rows: int, extent: int, scale: BlockScale) -> bool:
    return (
        _is_signed_float(element)
        and rows == 1
        and extent < WHOLE_ROW
        and scale.kind is BlockScaleKind.E8M0
        and scale.is_of_amax
        and element.emin - element.mantissa_bits + _LEAST_SCALE >= _FLOAT32_LEAST
    )

"""Reads the declaration of a number format. Needs no torch.

    element: e3m3            see `elements`
    block: 24                elements along the axis that a product reduces; or [rows, elements], row, tensor
    scale: ue5m3             e8m0 (or power_of_two), fp32, bf16, a small float without a sign, or none
    scale_rule: exact        how a block's amax determines its scale, see `BlockRule`
    candidates: [6, 4]       what a block's amax may be brought to; the element's largest value without it
    choose: mse              of candidates and of the rule search: the error that decides, see `Choose`
    tensor_scale: none       above the block scales: fp32 or power_of_two
    rounding: even           even, away or stochastic
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
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from quantexp.formats.definitions.elements import as_text, element_of, scale_element_of
from quantexp.formats.definitions.python import PYTHON, python_format
from quantexp.formats.table import (
    HIF8,
    HIF8_AMAX_TARGET,
    ROUNDING_OPTIONS,
    TENSOR_SCALE_OPTIONS,
)
from quantexp.formats.types import (
    WHOLE_ROW,
    BlockRule,
    BlockScale,
    BlockScaleKind,
    Choose,
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
    "tensor_scale",
    "rounding",
    "amax_target",
)
_MOST_BLOCK = 1 << 20
_MOST_CANDIDATES = 16
_POWERS = ("e8m0", "power_of_two")
_RULES = {
    BlockScaleKind.E8M0: ("floor", "rceil", "ceil", "even", "search"),
    BlockScaleKind.FLOAT: ("exact", "floor", "ceil", "search"),
    BlockScaleKind.BF16: ("exact", "floor", "ceil", "search"),
    BlockScaleKind.FP32: ("exact", "search"),
}
_TENSOR_SCALES = {"fp32": Scaling.EXACT, "power_of_two": Scaling.CURRENT, "none": Scaling.NONE}
_SCALES = "e8m0, power_of_two, fp32, bf16, none, or a small float such as ue5m3"
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
    element = element_of(content["element"])
    rows, extent = _block(content.get("block", "tensor"))
    roundings = {rounding.value: rounding for rounding in Rounding}
    rounding = _choice_of("rounding", content.get("rounding", "even"), roundings)
    make = _of_tensor if extent is None else _of_blocks
    return make(name, content, element, (rows, extent or 0), rounding, definition)


def _of_tensor(
    name: str,
    content: Mapping[str, Any],
    element: Element,
    block: tuple[int, int],
    rounding: Rounding,
    definition: str,
) -> Format:
    """A format without blocks: under one scale, or none."""
    for key in ("scale_rule", "candidates", "choose", "tensor_scale"):
        if content.get(key) is not None:
            raise ValueError(f"{key} is for a format with blocks; give block, or drop it")
    scale = content.get("scale", "fp32")
    scale = "power_of_two" if scale in _POWERS else "none" if scale is None else scale
    if scale not in _TENSOR_SCALES:
        raise ValueError(
            f"scale of a whole tensor must be one of {', '.join(_TENSOR_SCALES)}, got {scale!r}"
        )
    scaling = _TENSOR_SCALES[scale]
    is_grid = not _is_signed_float(element) and element is not HIF8
    target = _amax_target(content, element.max)
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
    element: Element,
    block: tuple[int, int],
    rounding: Rounding,
    definition: str,
) -> Format:
    """A format with blocks, each under a scale."""
    rows, extent = block
    scale = _block_scale(content, element)
    scaling = _choice_of("tensor_scale", content.get("tensor_scale") or "none", _TENSOR_SCALES)
    if scaling is not Scaling.NONE and scale.element is None:
        raise ValueError(
            f"tensor_scale is for block scales that are small floats such as e4m3, got scale {content.get('scale')}; "
            "drop it"
        )
    is_scaled = scaling is not Scaling.NONE
    if "amax_target" in content and not is_scaled:
        raise ValueError(
            "amax_target is the amax of a tensor after scaling; with blocks it needs a tensor_scale"
        )
    _check_reach(element, scale)
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
        amax_target=largest and (_amax_target(content, largest) or largest),
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


def _block_scale(content: Mapping[str, Any], element: Element) -> BlockScale:
    name = content.get("scale", "e8m0")
    small = None
    if name in _POWERS:
        kind = BlockScaleKind.E8M0
    elif name in ("fp32", "bf16"):
        kind = BlockScaleKind(name)
    elif isinstance(name, str) and (small := scale_element_of(name)) is not None:
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
    if rule == "even" and (element is HIF8 or element.values):
        raise ValueError(
            f"scale_rule even rounds an amax to the element's mantissa, which {element.name} does not have; take floor"
        )
    return BlockScale(
        kind, BlockRule(rule), small, _candidates(content, kind, rule), _choose(content, rule)
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
    is_list = isinstance(candidates, list) and 2 <= len(candidates) <= _MOST_CANDIDATES
    if not is_list or not all(map(_is_positive, candidates)):
        raise ValueError(
            f"candidates must be 2 to {_MOST_CANDIDATES} numbers above 0, got {candidates!r}{as_text(candidates)}"
        )
    return tuple(map(float, candidates))


def _choose(content: Mapping[str, Any], rule: str) -> Choose:
    choose = content.get("choose")
    if choose is not None and rule != BlockRule.SEARCH and not content.get("candidates"):
        raise ValueError("choose is for candidates and scale_rule search; give one, or drop it")
    chosen: Choose = _choice_of("choose", choose or "mse", {each.value: each for each in Choose})
    return chosen


def _amax_target(content: Mapping[str, Any], largest: float) -> float | None:
    target = content.get("amax_target")
    if target is None:
        return None
    if isinstance(target, bool) or not isinstance(target, int | float):
        raise ValueError(f"amax_target must be a number, got {target!r}{as_text(target)}")
    if not 0 < target <= largest:
        raise ValueError(
            f"amax_target must be above 0 and at most the largest value {largest:g}, got {target}"
        )
    return float(target)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _check_reach(element: Element, scale: BlockScale) -> None:
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
        and not scale.is_chosen
        and element.emin - element.mantissa_bits + _LEAST_SCALE >= _FLOAT32_LEAST
    )


def _choice_of(key: str, value: object, choices: Mapping[str, Any]) -> Any:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{key} must be one of {', '.join(choices)}, got {value!r}")
    return choices[str(value)]

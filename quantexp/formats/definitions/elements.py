"""The elements that a declaration may name or describe. Needs no torch.

e3m3                      3 exponent bits, 3 mantissa bits, bias 2^(e-1) - 1 or 0; neither infinity nor NaN
e4m3, e5m2                those of OCP OFP8, with their NaN and infinity
int8                      -127 .. 127
hif8                      HiFloat8 (arXiv 2409.16626)
{exponent_bits: 4, mantissa_bits: 3, bias: 8, infinity: false, nan: true, negative_zero: false}
{integer_bits: 8, symmetric: false, step: 0.015625}
{values: [-1, -0.5, 0, 0.5, 1]}
"""

from __future__ import annotations

import math
import re
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from quantexp.formats.table import E2M1, E2M3, E3M2, E4M3, E5M2, HIF8
from quantexp.formats.types import Element, Scaling

#: Names of scales that are powers of two, and of the scale of a tensor or of a macro block.
POWERS = ("e8m0", "power_of_two")
TENSOR_SCALES = {"fp32": Scaling.EXACT, "power_of_two": Scaling.CURRENT, "none": Scaling.NONE}
MOST_BITS = 16
MOST_EXPONENT_BITS, MOST_MANTISSA_BITS = 8, 10
#: Largest length of a list of values.
MOST_VALUES = 256
_NAMED = {element.name: element for element in (E4M3, E5M2, E2M3, E3M2, E2M1, HIF8)}
_FLOAT = re.compile(r"e(\d+)m(\d+)")
_SCALE = re.compile(r"u?e(\d+)m(\d+)")
_INTEGER = re.compile(r"int(\d+)")
#: A number with an exponent.
_WITH_EXPONENT = re.compile(r"[-+]?[0-9.]+[eE][-+]?[0-9]+")
_SCALE_KEYS = ("exponent_bits", "mantissa_bits", "bias")
_FLOAT_KEYS = ("exponent_bits", "mantissa_bits", "bias", "infinity", "nan", "negative_zero")
_INTEGER_KEYS = ("integer_bits", "symmetric", "step")
_KINDS = "a name such as e3m3, int8 or hif8, or keys with exponent_bits, integer_bits or values"
#: Exponents of the smallest normal and the largest value of float32, in whose arithmetic elements are rounded.
_LEAST_EXPONENT, _MOST_EXPONENT = -126, 127


def element_of(content: object) -> Element:
    """The element of a declaration.

    Raises:
        ValueError: it is none, has no finite value besides zero, or a value that float32 has not.
    """
    if isinstance(content, str):
        return _named(content)
    if not isinstance(content, Mapping):
        raise ValueError(f"element must be {_KINDS}, got {content!r}")
    keys = {str(key): value for key, value in content.items()}
    if "exponent_bits" in keys or "mantissa_bits" in keys:
        return _float_of(_known(keys, _FLOAT_KEYS))
    if "integer_bits" in keys:
        return _integer_of(_known(keys, _INTEGER_KEYS))
    if "values" in keys:
        return _list_of(_known(keys, ("values",))["values"])
    raise ValueError(f"element must be {_KINDS}, got the keys {', '.join(keys) or 'of nothing'}")


def scale_element_of(name: str | Mapping[str, Any]) -> Element | None:
    """The element of block scales such as ue5m3, whose code of all ones is NaN; None for any other name.

    A mapping has the bits and the bias: {exponent_bits: 6, mantissa_bits: 2, bias: 48}.

    Raises:
        ValueError: it has more bits than a small float may have, or no mantissa.
    """
    bias = None
    if isinstance(name, str):
        match = _SCALE.fullmatch(name)
        if match is None:
            return None
        exponent_bits, mantissa_bits = int(match[1]), int(match[2])
    else:
        if set(name) != set(_SCALE_KEYS):
            raise ValueError(f"scale must have the keys {', '.join(_SCALE_KEYS)}, got {name!r}")
        exponent_bits, mantissa_bits, bias = (_whole(name, key, "scale") for key in _SCALE_KEYS)
    if mantissa_bits == 0:
        raise ValueError(f"scale {name} has no mantissa: take e8m0, whose values are powers of two")
    return binary_float(
        f"ue{exponent_bits}m{mantissa_bits}", exponent_bits, mantissa_bits, bias=bias, has_nan=True
    )


def _named(name: str) -> Element:
    if name in _NAMED:
        return _NAMED[name]
    if match := _FLOAT.fullmatch(name):
        return binary_float(name, int(match[1]), int(match[2]))
    if match := _INTEGER.fullmatch(name):
        return _integer(name, int(match[1]))
    raise ValueError(f"element must be {_KINDS}, got {name!r}")


def _float_of(keys: Mapping[str, Any]) -> Element:
    missing = [key for key in ("exponent_bits", "mantissa_bits") if key not in keys]
    if missing:
        raise ValueError(f"element.{missing[0]} is missing; give exponent_bits and mantissa_bits")
    exponent_bits, mantissa_bits = (_whole(keys, key) for key in ("exponent_bits", "mantissa_bits"))
    return binary_float(
        f"e{exponent_bits}m{mantissa_bits}",
        exponent_bits,
        mantissa_bits,
        bias=_whole(keys, "bias") if keys.get("bias") is not None else None,
        has_infinity=_flag(keys, "infinity", default=False),
        has_nan=_flag(keys, "nan", default=False),
        has_negative_zero=_flag(keys, "negative_zero", default=True),
    )


def binary_float(
    name: str,
    exponent_bits: int,
    mantissa_bits: int,
    *,
    bias: int | None = None,
    has_infinity: bool = False,
    has_nan: bool = False,
    has_negative_zero: bool = True,
) -> Element:
    """A float with this many bits besides its sign.

    Infinity reserves the largest exponent, as IEEE 754 does, for infinity and NaN; NaN alone takes the code of all
    ones, as E4M3 of OCP OFP8 does. Without a negative zero, NaN has that code, and no other code is lost.

    Raises:
        ValueError: too many bits, no finite value besides zero, or a value that float32 has not.
    """
    _between("exponent_bits", exponent_bits, 0, MOST_EXPONENT_BITS)
    _between("mantissa_bits", mantissa_bits, 0, MOST_MANTISSA_BITS)
    if exponent_bits + mantissa_bits + 1 > MOST_BITS:
        raise ValueError(
            f"element {name} must have at most {MOST_BITS} bits with its sign, got {exponent_bits + mantissa_bits + 1}"
        )
    bias = max(0, (1 << exponent_bits >> 1) - 1) if bias is None else bias
    emin = 1 - bias
    codes = 1 << (exponent_bits + mantissa_bits)
    reserved = 0
    if has_infinity:
        reserved = 1 << mantissa_bits if exponent_bits else codes
    elif has_nan and has_negative_zero:
        reserved = 1
    largest_code = codes - reserved - 1
    if largest_code < 1:
        raise ValueError(f"element {name} has no finite value besides zero")
    field, mantissa = divmod(largest_code, 1 << mantissa_bits)
    if field:
        mantissa, field = mantissa + (1 << mantissa_bits), field - 1
    exponent = emin + field - mantissa_bits
    if exponent + mantissa.bit_length() - 1 > _MOST_EXPONENT:
        raise ValueError(
            f"element {name} with bias {bias} has values beyond float32's largest; raise its bias, reserve codes, "
            "or take fewer exponent bits"
        )
    if emin < _LEAST_EXPONENT:
        raise ValueError(
            f"element {name} with bias {bias} has normal values below float32's smallest normal one; lower its bias"
        )
    return Element(
        name,
        1 + exponent_bits + mantissa_bits,
        emin=emin,
        emax=exponent + mantissa.bit_length() - 1,
        mantissa_bits=mantissa_bits,
        max=math.ldexp(mantissa, exponent),
        inf_codes=(largest_code + 1,) if has_infinity else (),
        nan_codes=tuple(range(largest_code + 1 + has_infinity, codes)),
        has_negative_zero=has_negative_zero,
    )


def _integer_of(keys: Mapping[str, Any]) -> Element:
    bits = _whole(keys, "integer_bits")
    return _integer(
        f"int{bits}",
        bits,
        is_symmetric=_flag(keys, "symmetric", default=True),
        step=keys.get("step", 1),
    )


def _integer(name: str, bits: int, is_symmetric: bool = True, step: object = 1) -> Element:
    _between("integer_bits", bits, 2, MOST_MANTISSA_BITS + 1)
    if not _is_number(step) or math.frexp(float(step))[0] != 0.5:
        raise ValueError(f"element.step must be a power of two, got {step!r}")
    exponent = math.frexp(float(step))[1] - 1
    _between("the exponent of element.step", exponent, -100, 100)
    magnitude_bits = bits - 1
    largest = math.ldexp((1 << magnitude_bits) - 1, exponent)
    return Element(
        name if exponent == 0 else f"{name}*2^{exponent}",
        bits,
        emin=magnitude_bits + exponent,
        emax=magnitude_bits - 1 + exponent,
        mantissa_bits=magnitude_bits,
        max=largest,
        lowest=None if is_symmetric else -math.ldexp(1 << magnitude_bits, exponent),
    )


def _list_of(content: object) -> Element:
    if not isinstance(content, list | tuple) or not all(map(_is_number, content)):
        raise ValueError(
            f"element.values must be a list of numbers, got {content!r:.80}{as_text(*_items(content))}"
        )
    values = tuple(sorted({_float32(float(value)) for value in content}))
    if len(values) < len(content):
        raise ValueError("element.values must differ in float32, got one twice")
    _between("the number of element.values", len(values), 2, MOST_VALUES)
    has_both_signs = values[0] < 0 < values[-1]
    # The largest magnitude that both signs reach, so that an amax of either sign is in range.
    largest = (min if has_both_signs else max)(abs(values[0]), abs(values[-1]))
    return Element(
        f"{len(values)} values",
        max(1, math.ceil(math.log2(len(values)))),
        emin=math.frexp(min(abs(value) for value in values if value))[1] - 1,
        emax=math.frexp(largest)[1] - 1,
        mantissa_bits=0,
        max=largest,
        lowest=values[0],
        has_negative_zero=False,
        values=values,
    )


def _float32(value: float) -> float:
    try:
        single = float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        single = math.inf
    if not math.isfinite(single):
        raise ValueError(f"element.values must be finite in float32, got {value!r}")
    return single


def _known(keys: dict[str, Any], allowed: tuple[str, ...]) -> dict[str, Any]:
    for key in keys:
        if key not in allowed:
            raise ValueError(f"unknown key element.{key}; allowed beside it: {', '.join(allowed)}")
    return keys


def _whole(keys: Mapping[str, Any], key: str, of: str = "element") -> int:
    value = keys[key]
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{of}.{key} must be a whole number, got {value!r}")
    return value


def _flag(keys: Mapping[str, Any], key: str, *, default: bool) -> bool:
    value = keys.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"element.{key} must be true or false, got {value!r}")
    return value


def _between(what: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ValueError(f"{what} must be between {least} and {most}, got {value}")


def _is_number(value: object) -> TypeGuard[float]:
    """Whether it is a number that a float can hold."""
    if not isinstance(value, int) or isinstance(value, bool):
        return isinstance(value, float)
    return abs(value) <= sys.float_info.max


def as_text(*values: object) -> str:
    """What to write where YAML 1.1 reads one of the values, such as `1e-3`, as text; empty if it does not."""
    for value in values:
        if isinstance(value, str) and _WITH_EXPONENT.fullmatch(value):
            return f"; YAML reads {value} as text, so write it with a dot and a signed exponent, as 1.0e-3"
    return ""


def _items(content: object) -> Sequence[object]:
    return content if isinstance(content, list | tuple) else (content,)


def amax_target_of(content: Mapping[str, Any], largest: float) -> float | None:
    """The amax after scaling that a declaration sets; None if it sets none.

    Raises:
        ValueError: it is no number, or beyond the largest value.
    """
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


def choice_of(key: str, value: object, choices: Mapping[str, Any]) -> Any:
    """The choice that a key names.

    Raises:
        ValueError: it names none.
    """
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{key} must be one of {', '.join(choices)}, got {value!r}")
    return choices[str(value)]

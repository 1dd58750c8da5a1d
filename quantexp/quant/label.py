"""The displayed name of a slot's format.

In a configuration `bf16` marks a slot that is not quantised: it keeps the working precision, which may be fp32 or
fp16. Displays show `high (fp32)`. Files and JSON keep the configuration's word.
"""

from __future__ import annotations

from fractions import Fraction

from quantexp.quant.slots import WORKING
from quantexp.schema import Precision

HIGH = "high"


def describe_format(name: str, precision: Precision | str | None) -> str:
    """`high (fp32)` for a slot in the working precision, else the format's own name.

    The first of several words is the format: `bf16 (forward copy)` becomes `high (fp32) (forward copy)`. Without a
    known precision (None) it is `high`.
    """
    first, space, rest = name.partition(" ")
    if first != WORKING:
        return name
    word = precision.value if isinstance(precision, Precision) else precision
    return (HIGH if word is None else f"{HIGH} ({word})") + space + rest


def factor_words(part: float, *, inverse: bool = False) -> str:
    """`3/4` and `4/3` of the factor 0.75; a decimal number of a factor that is no ratio of small numbers."""
    ratio = Fraction(part).limit_denominator(64)
    if abs(float(ratio) - part) > 2.0**-26:
        return f"{1 / part if inverse else part:.6g}"
    return str(1 / ratio if inverse else ratio)


def is_unquantised(name: str) -> bool:
    """Whether a derived name is that of a scheme that quantises nothing: `bf16`, also with rules or under a backend."""
    return name.partition("~")[0].rpartition("te_")[2].removeprefix("emulated_") == WORKING


def describe_scheme(name: str, precision: Precision | str | None) -> str:
    """The scheme's name; for `bf16`, which quantises nothing, also the working precision if that is not bf16."""
    word = precision.value if isinstance(precision, Precision) else precision
    if not is_unquantised(name) or word in (None, Precision.bf16.value):
        return name
    return f"{name} (nothing quantised, computed in {word})"

"""The scored candidates for an operand: a format with its scale, rounding and Hadamard transform.

Of every format that quantises all scale rules (MX) or scalings of the tensor (nvfp4, fp8, hifp8), all roundings and all
transforms are combined; FP4 is rounded stochastically after 3/4 as well, the recipe of arXiv 2502.20586. A format's
first candidate is what the schemes do by default. Delayed scaling is none: it needs the iterations
before. Blocks have the format's own size.

An element costs its code and its share of its block's scale; one scale a tensor counts for nothing:

    mxfp8 8.25   mxfp6 6.25   mxfp4 4.25 (8 bits for 32)      nvfp4 4.5 (8 bits for 16)      fp8, hifp8 8      bf16 16
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

from quantexp.errors import ConfigError
from quantexp.formats.definitions.files import known_names
from quantexp.formats.spec import QuantSpec, get_format
from quantexp.formats.table import FORMATS
from quantexp.formats.types import Family, Format, Hadamard, Rounding, ScaleRule, Scaling
from quantexp.quant.choosing import Setting, scheme_spec, transform_block
from quantexp.quant.sites import Operand, Slot
from quantexp.quant.slots import WORKING
from quantexp.schema import Slot as SlotConfig

_Choice = TypeVar("_Choice")
#: Hadamard transforms with their blocks; None without a transform.
Transform = tuple[Hadamard, int | None]

#: The working precision, which is always available as a fallback.
WORKING_BITS = 16.0


@dataclass(frozen=True)
class Candidate:
    """One candidate: a format with its options."""

    format: Format
    #: None if the scale is not a power of two derived from a block's amax.
    scale_rule: ScaleRule | None
    #: None without a per-tensor scale.
    scaling: Scaling | None
    rounding: Rounding
    pre_scale: bool = False
    hadamard: Hadamard = Hadamard.NONE

    @property
    def bits(self) -> float:
        """Bits per element, including its share of the block scale."""
        return self.format.bits_each()

    @property
    def hadamard_block(self) -> int | None:
        """The transform's block size, as the schemes choose it; None without a transform."""
        if self.hadamard is Hadamard.NONE:
            return None
        return transform_block(self.format)

    @property
    def transform(self) -> Transform:
        """The options that both operands of a product must share."""
        return self.hadamard, self.hadamard_block

    @property
    def name(self) -> str:
        """`mxfp4_e2m1 floor even`, followed by options that differ from the defaults."""
        words: list[str | None] = [
            self.format.name,
            self.scale_rule,
            self.scaling,
            self.rounding,
            "3/4" if self.pre_scale else None,
            None if self.hadamard is Hadamard.NONE else f"{self.hadamard} Hadamard",
        ]
        return " ".join(str(word) for word in words if word is not None)

    def settings(self) -> dict[str, Any]:
        """The complete keys of a scheme's slot for this candidate."""
        values: dict[str, Any] = {
            "format": self.format.name,
            "block": self.format.block if "block" in self.format.options else None,
            "scale_rule": self.scale_rule,
            "scaling": self.scaling,
            "rounding": self.rounding if "rounding" in self.format.options else None,
            "pre_scale": self.pre_scale or None,
            "hadamard": None if self.hadamard is Hadamard.NONE else self.hadamard,
            "hadamard_block": self.hadamard_block,
        }
        plain = {k: str(v) if isinstance(v, str) else v for k, v in values.items()}
        return {key: value for key, value in plain.items() if value is not None}

    def spec(self, slot: Slot) -> QuantSpec:
        """What a scheme with these settings does to the slot."""
        return replace(_scheme_spec(self, slot.operand), axis=slot.axis, left=slot.is_left)


@cache
def _scheme_spec(candidate: Candidate, operand: Operand) -> QuantSpec:
    """`Candidate.spec` but for the slot's axis and side; one operand has the same in every tensor."""
    settings = candidate.settings()
    setting = Setting(str(operand), SlotConfig(**settings))
    keys = {key: setting for key in settings if key != "format"}
    return scheme_spec(candidate.format, operand, keys)


def candidates(formats: Sequence[Format]) -> list[Candidate]:
    """All candidates of these formats, grouped by format, with the schemes' options first."""
    return [one for fmt in formats for one in _of_format(fmt)]


def formats_of(
    words: Iterable[str] | None, declared: Mapping[str, Format] | None = None
) -> list[Format]:
    """The formats with these names or aliases, without repeats; None means all formats of the table that quantise.

    `declared` are formats of the user's own.

    Raises:
        ConfigError: a name that no format has, or the working precision, which quantises nothing.
    """
    if words is None:
        return [fmt for fmt in FORMATS.values() if fmt.family is not Family.BF16]
    chosen = []
    for word in words:
        try:
            fmt = get_format(word, declared)
        except ValueError:
            fmt = FORMATS[WORKING]
        if fmt.family is Family.BF16:
            names = ", ".join(sorted(known_names(declared) - {WORKING}))
            raise ConfigError(f"--formats must be among {names}, got {word!r}")
        chosen.append(fmt)
    return list(dict.fromkeys(chosen))


def _of_format(fmt: Format) -> list[Candidate]:
    usual = scheme_spec(fmt, Operand.X)
    rules: Sequence[ScaleRule | None] = [None]
    if "scale_rule" in fmt.options:
        rules = _first(ScaleRule, usual.scale_rule)
    scalings: list[Scaling | None] = [None]
    if "scaling" in fmt.options:
        scalings = [s for s in _first(Scaling, usual.scaling) if s is not Scaling.DELAYED]
    if fmt.definition:  # says what its scales are
        rules, scalings = rules[:1], scalings[:1]
    roundings = _first((r for r in Rounding if r is not Rounding.ZERO), usual.rounding)
    if fmt.family is Family.PYTHON:  # its class decides
        roundings = roundings[:1]
    candidates = []
    for hadamard in Hadamard:
        for rule in rules:
            for scaling in scalings:
                candidates += [Candidate(fmt, rule, scaling, r, False, hadamard) for r in roundings]
                if "pre_scale" in fmt.options:
                    candidates.append(
                        Candidate(fmt, rule, scaling, Rounding.STOCHASTIC, True, hadamard)
                    )
    return candidates


def _first(choices: Iterable[_Choice], usual: _Choice) -> list[_Choice]:
    return [usual, *(choice for choice in choices if choice != usual)]

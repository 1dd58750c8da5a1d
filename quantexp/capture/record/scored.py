"""The format that a tensor's statistics score.

It is `capture.format`, or the scheme's own: that of the first product that quantises the tensor. Random rounding,
delayed scales and transforms are left out: the score is that of the tensor as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quantexp.capture.names import TensorName
from quantexp.capture.operands import first_quantised
from quantexp.capture.statistics.fidelity import Chosen, chosen_for
from quantexp.formats import Format, Hadamard, QuantSpec, Rounding, Scaling, get_format
from quantexp.quant.precision import ModuleId, ModulePrecision, Slots


class OwnFormats:
    """The formats of the precision map for each tensor, cached until a rule changes the map."""

    def __init__(self) -> None:
        self._scored: dict[tuple[ModuleId, str, str, int], tuple[Slots, Chosen | None]] = {}

    def chosen(self, name: TensorName, precision: ModulePrecision, ndim: int) -> Chosen | None:
        """The format and axis for a tensor of `ndim` dimensions; None if no product quantises it."""
        key = (precision.module, name.operation, name.tensor, ndim)
        slots, chosen = self._scored.get(key, (None, None))
        if slots is not precision.slots:  # new, or changed by a rule
            operand = first_quantised(precision, name.operation, name.tensor)
            chosen = None
            if operand is not None:
                chosen = Chosen(_as_it_is(operand.spec), operand.dim(ndim))
            self._scored[key] = precision.slots, chosen
        return chosen


class Scoring:
    """The format of `capture.format`, if it is set, for all tensors; else the scheme's own, if `of_scheme`."""

    def __init__(
        self, format_name: str | None, formats: Mapping[str, Format] | None, *, of_scheme: bool
    ) -> None:
        """`formats` are those that the scheme declares."""
        self._format = None if format_name is None else get_format(format_name, formats)
        self._own = OwnFormats() if of_scheme else None

    def chosen(self, name: TensorName, precision: ModulePrecision, ndim: int) -> Chosen | None:
        """The format and axis for a tensor of `ndim` dimensions; None for a tensor that is not scored."""
        if self._format is not None:
            return chosen_for(self._format, name.tensor)
        return None if self._own is None else self._own.chosen(name, precision, ndim)


def _as_it_is(spec: QuantSpec) -> QuantSpec:
    """A slot's specification without what depends on a step: random rounding, an amax history, a transform."""
    draws, is_delayed = spec.rounding is Rounding.STOCHASTIC, spec.scaling is Scaling.DELAYED
    return replace(
        spec,
        hadamard=Hadamard.NONE,
        hadamard_block=1,
        rounding=spec.fmt.rounding if draws else spec.rounding,
        scaling=Scaling.CURRENT if is_delayed else spec.scaling,
    )

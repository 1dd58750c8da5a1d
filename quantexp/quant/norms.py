"""What the slots of norms cannot have."""

from __future__ import annotations

from collections.abc import Mapping

from quantexp.errors import ConfigError
from quantexp.formats.spec import QuantSpec
from quantexp.formats.types import Family, Rounding, Scaling
from quantexp.quant.sites import Slot


def check_norms(resolved: Mapping[Slot, QuantSpec]) -> None:
    """Refuse for norms what needs a matrix product, or numbers that follow from an operand's place in one.

    Raises:
        ConfigError: names the slot and the option.
    """
    for slot, spec in resolved.items():
        reasons = {
            "hadamard": spec.is_transformed and "only a matrix product undoes it",
            "pre_scale": spec.is_pre_scaled and "only a matrix product undoes it",
            "parts": spec.parts and "only a matrix product adds them up",
            "clip_gradient": spec.clip_gradient
            and "the gradients of a norm's gain and result go straight through",
            "rounding stochastic": spec.rounding is Rounding.STOCHASTIC
            and "random numbers follow from the place in a product's operand; take even",
            "scaling delayed": spec.scaling is Scaling.DELAYED
            and "amax histories are those of products' operands; take current or exact",
            f"format {spec.fmt.name}": spec.fmt.family is Family.PYTHON
            and "a class in Python may look at the whole tensor, which ranks divide",
            f"format {spec.fmt.name} with blocks of {spec.fmt.across} rows": spec.fmt.across > 1
            and "a gain is one row",
        }
        for option, why in reasons.items():
            if why:
                raise ConfigError(
                    f"quant.{slot} must have no {option}: {why}; remove it, or name other sites in the rule that "
                    "brings it"
                )

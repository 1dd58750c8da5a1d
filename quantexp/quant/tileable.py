"""Which attentions can be multiplied tile by tile; without torch, for the configuration's checks.

Everything that follows from a block, from a row or from the amax of a tensor can. Random numbers follow from an
element's place in the whole tensor, and a tile of P or dS is not laid out as the whole is.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantexp.errors import ConfigError
from quantexp.formats.types import Rounding
from quantexp.quant.fusable import attentions
from quantexp.quant.precision import Entry, ModulePrecision
from quantexp.schema import ModelConfig, QuantConfig


def obstacles(precision: ModulePrecision) -> Iterator[Entry]:
    """The slots of an attention that tiles cannot hold as declared."""
    for entry in precision.entries():
        if entry.name in ("P", "dS") and entry.operand.rounding is Rounding.STOCHASTIC:
            yield entry


def require_tiled_attention(model: ModelConfig, quant: QuantConfig) -> None:
    """Refuse a scheme that in any layer, at any iteration, declares what tiles cannot hold.

    Raises:
        ConfigError: with the first slot that stands in the way.
    """
    for declared in attentions(model, quant):
        for entry in obstacles(declared):
            raise ConfigError(
                f"training.attention=tiled cannot round {entry.label} stochastically: its random numbers follow from "
                "an element's place in the whole of T x T; use training.attention=plain"
            )

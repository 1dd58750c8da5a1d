"""Refuses Megatron's own settings of quantisation: the scheme decides all of it, and proof and captures know no other.

Without Transformer Engine Megatron quantises nothing under them, and says nothing.
"""

from __future__ import annotations

from megatron.core.transformer.transformer_config import TransformerConfig

from quantexp.errors import ConfigError

#: Setting -> the value without an effect, and what another one would do.
_SETTINGS: dict[str, tuple[object, str]] = {
    "fp8": (None, "quantises beside the scheme, or without Transformer Engine nothing at all"),
    "fp4": (None, "quantises beside the scheme, or without Transformer Engine nothing at all"),
    "fp8_param": (False, "leaves no weights in high precision to quantise"),
    "fp4_param": (False, "leaves no weights in high precision to quantise"),
    "fp8_wgrad": (True, "has no effect in Transformer Engine 2"),
    "quant_recipe": (None, "gives modules recipes beside the scheme"),
    "use_kitchen": (False, "takes linear layers that the scheme does not reach"),
    "gradient_accumulation_fusion": (
        False,
        "computes the weight gradient past the scheme, and under te_emulated loses it",
    ),
}


def refuse_own_quantisation(config: TransformerConfig) -> None:
    """Refuse a configuration of Megatron's that quantises by itself.

    Raises:
        ConfigError: names the setting, and what it would do.
    """
    for name, (neutral, effect) in _SETTINGS.items():
        value = getattr(config, name, neutral)
        if value != neutral:
            raise ConfigError(
                f"TransformerConfig.{name} {effect}, got {value!r}; leave it at {neutral}, and set quant.backend"
            )

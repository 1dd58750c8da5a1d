"""The decoder's spec under a backend."""

from __future__ import annotations

from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from quantexp.extra import Service, required
from quantexp.schema import Backend, ModelConfig
from quantexp.training.megatron.specs import inject, stock_spec
from quantexp.training.megatron.without_te import require_te


def scheme_spec(
    model: ModelConfig, backend: Backend = Backend.emulated
) -> TransformerBlockSubmodules:
    """The decoder with the scheme's products: the emulation's, or linear layers of Transformer Engine.

    Raises:
        RunError: the backend needs Transformer Engine, which cannot be imported.
    """
    if backend is Backend.emulated:
        spec: TransformerBlockSubmodules = inject(stock_spec(model))
        return spec
    require_te(f"quant.backend={backend.value}")
    native: TransformerBlockSubmodules = required(
        Service.NATIVE_SPEC, f"quant.backend={backend.value}"
    )(model, backend)
    return native

"""The layers of a Megatron-LM model: Megatron's own for its arguments, with the scheme's classes in them."""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import transformer_block
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    get_transformer_layer_offset,
)

from quantexp.schema import ModelConfig
from quantexp.training.megatron.attention import LatentCoreAttention, SchemeAttention
from quantexp.training.megatron.linear import SchemeColumnParallelLinear, SchemeRowParallelLinear
from quantexp.training.megatron.norm import MarkedRMSNorm
from quantexp.training.megatron.specs import CLASSES, inject, stock_layer_spec


class FromFile:
    """A module that keeps what `--te-precision-config-file` says about it (`finish_init`, from 0.16)."""

    #: The configuration of the first matcher; None if none matches, or without a file.
    file_entry: dict[str, Any] | None = None

    def finish_init(self, quantization_config: Any) -> None:
        """Keep the entry; GPTModel calls this for every module when it is built."""
        if quantization_config is not None:
            self.file_entry = quantization_config.config


class LmColumnParallelLinear(FromFile, SchemeColumnParallelLinear):
    """A column layer whose scheme may come from the file."""


class LmRowParallelLinear(FromFile, SchemeRowParallelLinear):
    """A row layer whose scheme may come from the file."""


class LmAttention(FromFile, SchemeAttention):
    """A core attention whose scheme may come from the file."""


_CLASSES: dict[type, type] = CLASSES | {
    ColumnParallelLinear: LmColumnParallelLinear,
    RowParallelLinear: LmRowParallelLinear,
    DotProductAttention: LmAttention,
    LatentCoreAttention: LmAttention,
}


class MixedLayer(TransformerLayer):  # type: ignore[misc]
    """A layer of a model whose first layers are dense and whose others have experts."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any,
        layer_number: int = 1,
        *,
        dense: Any,
        num_dense_layers: int,
        **kwargs: Any,
    ) -> None:
        stage = parallel_state.get_pipeline_model_parallel_rank()
        offset = get_transformer_layer_offset(config, kwargs.get("vp_stage"), stage)
        chosen = dense if layer_number + offset <= num_dense_layers else submodules
        super().__init__(config, chosen, layer_number, **kwargs)


def layer_spec(model: ModelConfig, *, sequence_parallel: bool) -> ModuleSpec:
    """The spec of every layer of a model, with the scheme's classes.

    Sequence parallelism needs a final norm whose weight is marked, where Megatron has no kernel of its own for it.
    """
    if sequence_parallel and transformer_block.LayerNormImpl is WrappedTorchNorm:
        transformer_block.LayerNormImpl = MarkedRMSNorm
    is_latent, moe = model.mla is not None, model.moe
    experts = None if moe is None else moe.num_experts
    spec = inject(stock_layer_spec(is_latent, experts, model.qk_norm), _CLASSES)
    if moe is not None and moe.num_dense_layers:
        dense = inject(stock_layer_spec(is_latent, None, model.qk_norm), _CLASSES)
        params = {"dense": dense.submodules, "num_dense_layers": moe.num_dense_layers}
        return ModuleSpec(module=MixedLayer, submodules=spec.submodules, params=params)
    return spec

"""The model of a configuration, built by Megatron-Core, and its modules by the precision map's names."""

from __future__ import annotations

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from quantexp.megatron.attention import SchemeAttention
from quantexp.megatron.linear import SchemeLinear
from quantexp.quant.precision import ATTENTION, ModuleId, PrecisionMap
from quantexp.schema import ModelConfig, Precision, Recompute, TrainingConfig
from quantexp.sizes import padded_vocab_size

SchemeModule = SchemeLinear | SchemeAttention

#: Where the decoder layer keeps each module of the precision map.
PATHS = {
    "qkv": "self_attention.linear_qkv",
    ATTENTION: "self_attention.core_attention",
    "proj": "self_attention.linear_proj",
    "fc1": "mlp.linear_fc1",
    "fc2": "mlp.linear_fc2",
}

DTYPES = {
    Precision.bf16: torch.bfloat16,
    Precision.fp16: torch.float16,
    Precision.fp32: torch.float32,
}


def transformer_config(model: ModelConfig, training: TrainingConfig) -> TransformerConfig:
    """Megatron's configuration of the decoder.

    Fusions are off: they need kernels that are not everywhere, and runs that are compared take one path. Weights are
    initialised on the CPU, so that a seed gives the same weights on every device.
    """
    dtype = DTYPES[training.precision]
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_epsilon,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        init_method_std=model.init_std,
        bf16=training.precision is Precision.bf16,
        fp16=training.precision is Precision.fp16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        cross_entropy_loss_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **_recompute(training.recompute),
    )


def _recompute(recompute: Recompute) -> dict[str, object]:
    if recompute is Recompute.none:
        return {}
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }


def build_model(
    model: ModelConfig, training: TrainingConfig, layer_spec: ModuleSpec
) -> tuple[GPTModel, TransformerConfig]:
    """Megatron's GPTModel for a configuration and a layer spec, in the working dtype, on the CPU."""
    config = transformer_config(model, training)
    built = GPTModel(
        config,
        layer_spec,
        vocab_size=padded_vocab_size(model.vocab_size),
        max_sequence_length=training.seq_length,
        share_embeddings_and_output_weights=model.tie_embeddings,
        position_embedding_type="rope",
        rotary_base=model.rotary_base,
        rope_scaling=model.rope_scaling_factor is not None,
        rope_scaling_factor=model.rope_scaling_factor or 1.0,
    )
    return built, config


def scheme_modules(model: GPTModel) -> dict[ModuleId, SchemeModule]:
    """Every module of the decoder that multiplies as a scheme declares, by its name in the precision map."""
    modules: dict[ModuleId, SchemeModule] = {}
    for layer in model.decoder.layers:
        for name, path in PATHS.items():
            module = layer.get_submodule(path)
            if isinstance(module, SchemeLinear | SchemeAttention):
                modules[ModuleId(layer.layer_number - 1, name)] = module
    return modules


def set_precision(model: GPTModel, precision: PrecisionMap) -> None:
    """Tell every module what the map declares for it; again whenever the map changes.

    Raises:
        RuntimeError: the model and the map do not have the same modules.
    """
    modules = scheme_modules(model)
    if modules.keys() != precision.keys():
        raise RuntimeError(
            f"the model has {len(modules)} modules of the scheme and the precision map {len(precision)}"
        )
    for name, module in modules.items():
        module.precision = precision[name]

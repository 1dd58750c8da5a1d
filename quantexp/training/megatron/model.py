"""Builds a configured model with Megatron-Core, of the decoder's spec under its backend, and names its modules.

The names are those of the precision map.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import Parameter

from quantexp.errors import RunError
from quantexp.extra import Service, required
from quantexp.model.decoder import (
    ATTENTION,
    EMBEDDING,
    FINAL_NORM,
    OUTPUT,
    is_routed,
    norm_widths,
)
from quantexp.model.layout import Layout
from quantexp.model.sizes import padded_vocab_size
from quantexp.quant.precision import ModuleId, PrecisionMap, quantises_norms, quantises_output
from quantexp.quant.weight_cache.weights import WeightCopies
from quantexp.schema import (
    AttentionPath,
    Backend,
    Dispatcher,
    ModelConfig,
    QuantConfig,
    TrainingConfig,
)
from quantexp.training.megatron.attention import SchemeAttention
from quantexp.training.megatron.embedding import SchemeEmbedding
from quantexp.training.megatron.experts import moe_layers, pass_rows_to_experts, release_routing
from quantexp.training.megatron.linear import LinearLayer, SchemeOutputLayer
from quantexp.training.megatron.norm import MarkedRMSNorm, SchemeRMSNorm
from quantexp.training.megatron.specs import inject, require_reached, stock_spec
from quantexp.training.megatron.transformer_config import (
    ONE_PROCESS,
    refuse_own_quantisation,
    transformer_config,
)
from quantexp.training.megatron.without_te import require_te

SchemeModule = LinearLayer | SchemeAttention | SchemeEmbedding | SchemeRMSNorm

#: The path in a decoder layer of each module of the precision map, except routed experts.
PATHS = {
    "qkv": "self_attention.linear_qkv",
    "q-proj": "self_attention.linear_q_proj",
    "q-down": "self_attention.linear_q_down_proj",
    "q-up": "self_attention.linear_q_up_proj",
    "kv-down": "self_attention.linear_kv_down_proj",
    "kv-up": "self_attention.linear_kv_up_proj",
    ATTENTION: "self_attention.core_attention",
    "proj": "self_attention.linear_proj",
    "fc1": "mlp.linear_fc1",
    "fc2": "mlp.linear_fc2",
    "shared-fc1": "mlp.shared_experts.linear_fc1",
    "shared-fc2": "mlp.shared_experts.linear_fc2",
    "attention-norm": "input_layernorm",
    "q-norm": "self_attention.q_layernorm",
    "k-norm": "self_attention.k_layernorm",
    "kv-norm": "self_attention.kv_layernorm",
    "mlp-norm": "pre_mlp_layernorm",
}


def path_of(module: str) -> str:
    """The path in a decoder layer of a module of the precision map, for `get_submodule`."""
    if not is_routed(module):
        return PATHS[module]
    expert, _, name = module.partition("-")
    return f"mlp.experts.local_experts.{expert.removeprefix('expert')}.linear_{name}"


def build_model(
    model: ModelConfig,
    training: TrainingConfig,
    layer_spec: ModuleSpec | TransformerBlockSubmodules,
    quant: QuantConfig | None = None,
) -> tuple[GPTModel, TransformerConfig]:
    """The whole model in one process, its weights uninitialised: `build_chunks` without a layout."""
    (gpt,), config = build_chunks(model, training, layer_spec, quant=quant)
    return gpt, config


def build_chunks(
    model: ModelConfig,
    training: TrainingConfig,
    layer_spec: ModuleSpec | TransformerBlockSubmodules,
    layout: Layout = ONE_PROCESS,
    dispatcher: Dispatcher = Dispatcher.allgather,
    quant: QuantConfig | None = None,
) -> tuple[list[GPTModel], TransformerConfig]:
    """This rank's parts of Megatron's GPTModel, in the working dtype, on the CPU: one, or its interleaved chunks.

    Their weights are uninitialised: `load_initial_weights` sets them.

    `layer_spec` describes every layer of the model, or all layers alike. `quant` is the scheme: its backend is that of
    the spec's linear layers, and it may have the output layer, and a tied embedding, in the precision map.
    """
    native_decoder = None
    if quant is not None and quant.backend is not Backend.emulated:
        native_decoder = required(Service.NATIVE_DECODER, f"quant.backend={quant.backend.value}")()
    config = transformer_config(model, training, layout, dispatcher)
    refuse_own_quantisation(config)
    stage = parallel_state.get_pipeline_model_parallel_rank() if layout.pipeline > 1 else 0
    chunks = []
    for chunk in range(layout.chunks):
        layers = layout.layers(model.num_layers, stage, chunk)
        is_first = stage == 0 and chunk == 0
        is_last = stage == layout.pipeline - 1 and chunk == layout.chunks - 1
        gpt = GPTModel(
            config,
            _spec_of(layer_spec, layers),
            vocab_size=padded_vocab_size(model.vocab_size),
            max_sequence_length=training.seq_length,
            pre_process=is_first,
            post_process=is_last,
            share_embeddings_and_output_weights=model.tie_embeddings,
            position_embedding_type="rope",
            rotary_base=model.rotary_base,
            rope_scaling=model.rope_scaling_factor is not None,
            rope_scaling_factor=model.rope_scaling_factor or 1.0,
            vp_stage=chunk if layout.chunks > 1 else None,
        )
        for moe in moe_layers(gpt).values():
            pass_rows_to_experts(moe)
            release_routing(moe)
        if native_decoder is not None:
            gpt.decoder.__class__ = native_decoder
        if quant is not None and quantises_output(quant):
            use_scheme_beside_decoder(gpt)
        if quant is not None and quantises_norms(quant):
            use_scheme_norms(gpt, model)
        chunks.append(gpt)
    if model.mla is not None:
        # Megatron would add the gradients of the query latent's norm, which every rank has whole, over the ranks; with
        # sequence parallelism, where they are parts, the weights are marked (`norm`).
        config.qk_layernorm = False
    return chunks, config


def use_scheme_beside_decoder(gpt: GPTModel) -> None:
    """Let the output layer, and a tied embedding, use the scheme's products.

    GPTModel builds both itself, from no spec. The scheme's classes only override methods, so that a built module may
    change its class.
    """
    if gpt.post_process:
        gpt.output_layer.__class__ = SchemeOutputLayer
    if gpt.pre_process and gpt.share_embeddings_and_output_weights:
        gpt.embedding.word_embeddings.__class__ = SchemeEmbedding


def use_scheme_norms(gpt: GPTModel, model: ModelConfig) -> None:
    """Let the norms of the layers, and the one after the last, use the scheme's gains and results.

    Raises:
        RunError: a norm is of another class, such as Transformer Engine's, which computes inside a kernel of its own.
    """
    norms = {
        f"layer {layer.layer_number - 1} {name}": module
        for layer in gpt.decoder.layers
        for name, module in _by_name(layer)
        if name in norm_widths(model)
    }
    if getattr(gpt.decoder, "final_layernorm", None) is not None:
        norms[FINAL_NORM] = gpt.decoder.final_layernorm
    for name, module in norms.items():
        if type(module) is not MarkedRMSNorm:
            raise RunError(
                f"{name} is a {type(module).__module__}.{type(module).__name__}, into which the formats of quant.norm "
                "cannot be injected; take the norms of quantexp's own spec, or a scheme without quant.norm"
            )
        module.__class__ = SchemeRMSNorm


def _spec_of(
    spec: ModuleSpec | TransformerBlockSubmodules, layers: range
) -> ModuleSpec | TransformerBlockSubmodules:
    """The spec of some layers of a model."""
    if isinstance(spec, ModuleSpec):
        return spec
    own = [spec.layer_specs[layer] for layer in layers]
    return dataclasses.replace(spec, layer_specs=own)


def first_layer(model: GPTModel) -> int:
    """The first decoder layer, over all stages, of a rank's part of the model; 0 for a part without layers."""
    layers = model.decoder.layers
    return int(layers[0].layer_number) - 1 if len(layers) else 0


def scheme_modules(model: GPTModel) -> dict[ModuleId, SchemeModule]:
    """The modules that use the scheme's products, by their names in the precision map."""
    modules: dict[ModuleId, SchemeModule] = {}
    for layer in model.decoder.layers:
        for name, module in _by_name(layer):
            if isinstance(module, LinearLayer | SchemeAttention | SchemeRMSNorm):
                modules[ModuleId(layer.layer_number - 1, name)] = module
    beside = {
        OUTPUT: getattr(model, "output_layer", None),
        EMBEDDING: model.embedding.word_embeddings if model.pre_process else None,
        FINAL_NORM: getattr(model.decoder, "final_layernorm", None),
    }
    for name, module in beside.items():
        if isinstance(module, SchemeOutputLayer | SchemeEmbedding | SchemeRMSNorm):
            modules[ModuleId(model.config.num_layers, name)] = module
    return modules


def linear_weights(model: GPTModel) -> dict[ModuleId, Parameter]:
    """The weights that products multiply; a tied output layer beside its embedding has none of its own."""
    modules: list[tuple[ModuleId, Any]] = [
        (name, module)
        for name, module in scheme_modules(model).items()
        if isinstance(module, LinearLayer)
    ]
    return {
        name: model.shared_embedding_or_output_weight() if module.weight is None else module.weight
        for name, module in modules
    }


def _by_name(layer: Any) -> Iterator[tuple[str, Any]]:
    """The modules of a layer that the precision map may name; experts count over all ranks."""
    names = {path: name for name, path in PATHS.items()}
    for index, expert in enumerate(getattr(layer.mlp, "local_expert_indices", ())):
        for part in ("fc1", "fc2"):
            names[path_of(f"expert{index}-{part}")] = f"expert{expert}-{part}"
    for path, module in layer.named_modules():
        if path in names:
            yield names[path], module


def set_precision(
    model: GPTModel, precision: PrecisionMap, path: AttentionPath = AttentionPath.plain
) -> None:
    """Set every module's precision and attention path; call again whenever the map changes.

    Args:
        model: a model, or a rank's part of it.
        precision: exactly the modules of that part.
        path: how attention is computed.

    Raises:
        RunError: a module is not the scheme's.
        RuntimeError: the model and the map have different modules.
    """
    require_reached(model.decoder)
    modules = scheme_modules(model)
    if modules.keys() != precision.keys():
        raise RuntimeError(
            f"the model has {len(modules)} scheme modules, but the precision map has {len(precision)}"
        )
    for name, module in modules.items():
        module.precision = precision[name]
        if isinstance(module, SchemeAttention):
            module.path = path
    if hasattr(model.decoder, "use_recipes"):
        model.decoder.use_recipes([getattr(module, "recipe", None) for module in modules.values()])


def share_weight_copies(model: GPTModel, copies: WeightCopies) -> None:
    """Share `copies` between the modules with weights; loading a state dict clears it."""
    for module in scheme_modules(model).values():
        if isinstance(module, LinearLayer | SchemeEmbedding):
            module.copies = copies
    model.register_load_state_dict_post_hook(lambda *_: copies.drop())


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

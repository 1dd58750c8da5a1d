"""The decoder's modules with matrix products, by layer, with the shapes of their weights; from the configuration alone.

    attention     qkv                             with latent attention q-proj (or q-down, q-up), kv-down, kv-up
                  attention                       the core: scores, softmax, context; it has no weight
                  proj
    feed-forward  fc1, fc2                        fc1 contains gate and up
    experts       shared-fc1, shared-fc2          all shared experts form one feed-forward
                  expert0-fc1, expert0-fc2, ...   each routed expert separately

    norms         attention-norm, mlp-norm        of the residual stream, before attention and before the feed-forward
                  q-norm, k-norm, kv-norm         of queries and keys, or of the latents

Beside the decoder are `output`, the output layer, `embedding`, and `final-norm`, the norm after the last layer. They
count as the layer after the last one.

The precision map, the proof of engagement and captured tensors use these names. The router is not among them: it stays
in high precision. Needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from quantexp.schema import MlaConfig, ModelConfig, MoeConfig

#: The module with attention's two products.
ATTENTION = "attention"
#: The output layer and the embedding, which are no part of the decoder.
OUTPUT, EMBEDDING = "output", "embedding"
#: The norm after the last layer of the decoder.
FINAL_NORM = "final-norm"
_ROUTED = re.compile(r"expert\d+-fc[12]")


@dataclass(frozen=True)
class LinearShape:
    """A linear layer's weight is [output_width, input_width]."""

    output_width: int
    input_width: int

    @property
    def count(self) -> int:
        """Elements of the weight."""
        return self.output_width * self.input_width


def moe_of(model: ModelConfig, layer: int) -> MoeConfig | None:
    """The mixture of experts of a layer (from 0), or None if it has a plain feed-forward."""
    moe = model.moe
    return None if moe is None or layer < moe.num_dense_layers else moe


def is_routed(module: str) -> bool:
    """Whether a module belongs to a routed expert, which may have fewer tokens than the micro-batch, or none."""
    return _ROUTED.fullmatch(module) is not None


def is_norm(module: str) -> bool:
    """Whether a module is a norm, of a layer or the last one."""
    return module.endswith("-norm")


def is_column_wise(module: str) -> bool:
    """Whether the ranks of a tensor-parallel group share a linear module's input; they share the output of others."""
    return module == "proj" or module.endswith("fc2")


def layer_words(layer: object, module: str) -> str:
    """The layer of a module as a person reads it: `3`, or `output` for what is beside the decoder."""
    return OUTPUT if module in (OUTPUT, EMBEDDING, FINAL_NORM) else str(layer)


def in_words(modules: Iterable[str]) -> str:
    """Unique module names for a message; of the routed experts, which are many, only the first and the last."""
    names = list(dict.fromkeys(modules))
    routed = [name for name in names if is_routed(name)]
    shown = [name for name in names if not is_routed(name)]
    if routed:
        shown.append(f"{routed[0]} to {routed[-1]}")
    return ", ".join(shown)


def layer_modules(model: ModelConfig, layer: int) -> dict[str, LinearShape | None]:
    """The modules of a layer in the order of the forward pass; attention's core has no shape."""
    attention = {**_projections(model), ATTENTION: None, "proj": _proj(model)}
    return {**attention, **_feed_forward(model, layer)}


def norm_widths(model: ModelConfig) -> dict[str, int]:
    """The norms of every layer, in the order of the forward pass, with their number of gains."""
    widths = {"attention-norm": model.hidden_size}
    if model.mla is not None:
        if model.mla.q_lora_rank is not None:
            widths["q-norm"] = model.mla.q_lora_rank
        widths["kv-norm"] = model.mla.kv_lora_rank
    elif model.qk_norm:
        widths |= dict.fromkeys(("q-norm", "k-norm"), model.head_dim)
    return {**widths, "mlp-norm": model.hidden_size}


def alike_layers(model: ModelConfig) -> list[tuple[int, int]]:
    """The first layer and the length of each range of equal layers: dense ones, then those with experts."""
    moe, layers = model.moe, model.num_layers
    num_dense = layers if moe is None else min(moe.num_dense_layers, layers)
    stretches = [(0, num_dense), (num_dense, layers - num_dense)]
    return [(first, count) for first, count in stretches if count]


def linear_shapes(model: ModelConfig, layer: int) -> dict[str, LinearShape]:
    """The linear modules of a layer, in the order of the forward pass."""
    modules = layer_modules(model, layer).items()
    return {name: shape for name, shape in modules if shape is not None}


def _projections(model: ModelConfig) -> dict[str, LinearShape]:
    width, heads = model.hidden_size, model.num_attention_heads
    if model.mla is None:
        rows = (heads + 2 * model.num_query_groups) * model.head_dim
        return {"qkv": LinearShape(rows, width)}
    mla, query = model.mla, heads * model.head_dim
    shapes: dict[str, LinearShape] = {}
    if mla.q_lora_rank is None:
        shapes["q-proj"] = LinearShape(query, width)
    else:
        shapes["q-down"] = LinearShape(mla.q_lora_rank, width)
        shapes["q-up"] = LinearShape(query, mla.q_lora_rank)
    shapes["kv-down"] = LinearShape(mla.kv_lora_rank + mla.qk_pos_emb_head_dim, width)
    shapes["kv-up"] = LinearShape(heads * (mla.qk_head_dim + mla.v_head_dim), mla.kv_lora_rank)
    return shapes


def value_head_dim(model: ModelConfig) -> int:
    """Elements of one value head."""
    return model.head_dim if model.mla is None else model.mla.v_head_dim


def _proj(model: ModelConfig) -> LinearShape:
    return LinearShape(model.hidden_size, model.num_attention_heads * value_head_dim(model))


def _feed_forward(model: ModelConfig, layer: int) -> dict[str, LinearShape]:
    moe = moe_of(model, layer)
    if moe is None:
        return _gated("", model.hidden_size, model.ffn_hidden_size)
    shapes: dict[str, LinearShape] = {}
    if moe.num_shared_experts:
        shapes |= _gated("shared-", model.hidden_size, shared_width(moe))
    for expert in range(moe.num_experts):
        shapes |= _gated(f"expert{expert}-", model.hidden_size, moe.expert_ffn_hidden_size)
    return shapes


def shared_width(moe: MoeConfig) -> int:
    """Inner width of all shared experts together."""
    return moe.num_shared_experts * moe.expert_ffn_hidden_size


def _gated(prefix: str, width: int, inner: int) -> dict[str, LinearShape]:
    return {
        f"{prefix}fc1": LinearShape(2 * inner, width),
        f"{prefix}fc2": LinearShape(width, inner),
    }


def other_parameters(model: ModelConfig, layer: int) -> int:
    """Parameters of a layer outside the modules above that are never divided: norms and the router."""
    moe = moe_of(model, layer)
    router = 0 if moe is None else moe.num_experts * model.hidden_size
    heads = 2 * model.head_dim if model.qk_norm else 0
    return 2 * model.hidden_size + heads + _latent_norms(model.mla) + router


def bias_parameters(model: ModelConfig) -> int:
    """Elements of a layer's biases, which tensor parallelism divides like the rows of their modules."""
    return _projections(model)["qkv"].output_width if model.qkv_bias else 0


def _latent_norms(mla: MlaConfig | None) -> int:
    return 0 if mla is None else mla.kv_lora_rank + (mla.q_lora_rank or 0)

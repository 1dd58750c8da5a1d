"""Configuration of a model: Megatron-Core's numbers, and those of latent attention and experts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from quantexp.schema.limits import (
    FOLDER_NAME,
    MISSING,
    NOT_NEGATIVE,
    POSITIVE,
    Limit,
    at_most,
    between,
    limited,
)

#: The bounds of sizes: about eight times the largest published ones, and little enough for a plan to count in seconds.
_LAYERS, _WIDTHS, _HEADS, _EXPERTS = (between(1, most) for most in (1_000, 1 << 24, 16_384, 4_096))
_TOKENS = between(1, 1 << 31)
_ABOVE_ONE = Limit(lambda value: value > 1, "must be above 1")
_EVEN = Limit(lambda value: value % 2 == 0, "must be even for the rotary embedding")


class AuxLoss(Enum):
    """The tokens over which the load of a router's experts is balanced."""

    none = "none"
    #: The micro-batch.
    batch = "batch"
    #: Each sequence separately.
    sequence = "sequence"


@dataclass
class YarnConfig:
    """YaRN's scaling of rotary frequencies (arXiv 2309.00071) as in DeepSeek-V2; names as in its config.json.

    With m(x) = 0.1 x ln(factor) + 1, cosine and sine are multiplied by m(mscale) / m(mscale_all_dim) and the softmax
    scale by m(mscale_all_dim)^2.
    """

    #: The factor by which sequences may be longer.
    factor: float = limited(MISSING, _ABOVE_ONE, at_most(1_000_000))
    #: Original maximum sequence length, tokens.
    original_length: int = limited(MISSING, *_TOKENS)
    #: Rotations over the original length above which a frequency is unchanged.
    beta_fast: float = limited(32.0, POSITIVE, at_most(1_000_000))
    #: Rotations below which it is divided by the factor.
    beta_slow: float = limited(1.0, POSITIVE, at_most(1_000_000))
    mscale: float = limited(1.0, NOT_NEGATIVE, at_most(1_000_000))
    mscale_all_dim: float = limited(0.0, NOT_NEGATIVE, at_most(1_000_000))


@dataclass
class MlaConfig:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1); names as in Megatron's MLATransformerConfig."""

    #: Width of the queries' latent; null projects queries directly.
    q_lora_rank: int | None = limited(None, *_WIDTHS)
    #: Width of the latent that keys and values share.
    kv_lora_rank: int = limited(MISSING, *_WIDTHS)
    #: Elements of a query or key head without position.
    qk_head_dim: int = limited(MISSING, *_WIDTHS)
    #: Elements of a query or key head with rotary position; the keys' are shared by all heads.
    qk_pos_emb_head_dim: int = limited(MISSING, *_WIDTHS, _EVEN)
    #: Elements of a value head.
    v_head_dim: int = limited(MISSING, *_WIDTHS)
    #: null means plain rotary embedding.
    yarn: YarnConfig | None = None


@dataclass
class MoeConfig:
    """A mixture of experts instead of the feed-forward (arXiv 2405.04434, section 2.2)."""

    #: Routed experts per layer.
    num_experts: int = limited(MISSING, *_EXPERTS)
    #: Routed experts per token.
    top_k: int = limited(MISSING, at_most(4_096))
    #: Inner width of one expert, elements.
    expert_ffn_hidden_size: int = limited(MISSING, *_WIDTHS)
    #: Experts that process every token; they form one feed-forward of this many times the width.
    num_shared_experts: int = limited(0, *between(0, 4_096))
    #: Number of first layers with the plain feed-forward of `ffn_hidden_size`.
    num_dense_layers: int = limited(0, *between(0, 1_000))
    #: Whether the weights of a token's experts are normalised to a sum of 1.
    norm_topk_prob: bool = False
    #: Factor of the weights; not together with norm_topk_prob.
    routed_scaling_factor: float = limited(1.0, POSITIVE, at_most(1_000_000))
    aux_loss: AuxLoss = AuxLoss.none
    #: Factor of the balancing loss.
    aux_loss_coefficient: float = limited(0.0, NOT_NEGATIVE, at_most(1_000_000))


@dataclass
class ModelConfig:
    """A decoder-only transformer; every number as published.

    The families are Llama 3, Mistral, Qwen2, Qwen3, Mixtral, Qwen3-MoE and DeepSeek-V2.
    """

    #: The name of the choice; part of the run folder's name.
    name: str = limited(MISSING, FOLDER_NAME)
    #: Decoder layers.
    num_layers: int = limited(MISSING, *_LAYERS)
    #: Width of the residual stream, elements.
    hidden_size: int = limited(MISSING, *_WIDTHS)
    #: Inner width of the gated feed-forward, elements; with `moe` that of the dense layers only.
    ffn_hidden_size: int = limited(MISSING, *_WIDTHS)
    #: Query heads.
    num_attention_heads: int = limited(MISSING, *_HEADS)
    #: Key and value heads (grouped-query attention); with `mla` as many as query heads.
    num_query_groups: int = limited(MISSING, *_HEADS)
    #: Elements of one query or key head; with `mla` the sum of its two parts.
    head_dim: int = limited(MISSING, *_WIDTHS)
    #: Rows of the embedding that the tokenizer uses; Megatron's padding is counted separately.
    vocab_size: int = limited(MISSING, *_WIDTHS)
    #: Longest published sequence length, tokens.
    max_sequence_length: int = limited(MISSING, *_TOKENS)
    #: Added to the mean square in RMSNorm.
    norm_epsilon: float = limited(1.0e-5, POSITIVE, at_most(1))
    #: Base period of the rotary embedding.
    rotary_base: int = limited(10000, *between(1, 1_000_000_000_000))
    #: Llama 3's frequency scaling; null means none.
    rope_scaling_factor: float | None = limited(None, POSITIVE, at_most(1_000_000))
    #: Whether the projections of queries, keys and values have biases (Qwen2).
    qkv_bias: bool = False
    #: Whether each query and key head has an RMSNorm before the rotary embedding (Qwen3).
    qk_norm: bool = False
    #: Published window of attention, tokens (Mistral); sequences must fit in it, so it hides nothing. null means none.
    sliding_window: int | None = limited(None, *_TOKENS)
    #: Whether the output layer shares the embedding's weight.
    tie_embeddings: bool = False
    #: Standard deviation of the initial weights.
    init_std: float = limited(0.02, POSITIVE, at_most(100))
    #: Multi-head latent attention; null means grouped-query attention.
    mla: MlaConfig | None = None
    #: A mixture of experts; null means a feed-forward in every layer.
    moe: MoeConfig | None = None
    #: A published config.json, or its folder: sets all numbers above, unless they are given explicitly.
    from_hf: str | None = None
    #: Published initial weights, a folder of safetensors; null means random weights from the seed.
    init_from: str | None = None

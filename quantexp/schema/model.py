"""Configuration of a model: Megatron-Core's numbers, and those of latent attention and experts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from quantexp.schema.missing import MISSING


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
    factor: float = MISSING
    #: Original maximum sequence length, tokens.
    original_length: int = MISSING
    #: Rotations over the original length above which a frequency is unchanged.
    beta_fast: float = 32.0
    #: Rotations below which it is divided by the factor.
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass
class MlaConfig:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1); names as in Megatron's MLATransformerConfig."""

    #: Width of the queries' latent; null projects queries directly.
    q_lora_rank: int | None = None
    #: Width of the latent that keys and values share.
    kv_lora_rank: int = MISSING
    #: Elements of a query or key head without position.
    qk_head_dim: int = MISSING
    #: Elements of a query or key head with rotary position; the keys' are shared by all heads.
    qk_pos_emb_head_dim: int = MISSING
    #: Elements of a value head.
    v_head_dim: int = MISSING
    #: null means plain rotary embedding.
    yarn: YarnConfig | None = None


@dataclass
class MoeConfig:
    """A mixture of experts instead of the feed-forward (arXiv 2405.04434, section 2.2)."""

    #: Routed experts per layer.
    num_experts: int = MISSING
    #: Routed experts per token.
    top_k: int = MISSING
    #: Inner width of one expert, elements.
    expert_ffn_hidden_size: int = MISSING
    #: Experts that process every token; they form one feed-forward of this many times the width.
    num_shared_experts: int = 0
    #: Number of first layers with the plain feed-forward of `ffn_hidden_size`.
    num_dense_layers: int = 0
    #: Whether the weights of a token's experts are normalised to a sum of 1.
    norm_topk_prob: bool = False
    #: Factor of the weights; not together with norm_topk_prob.
    routed_scaling_factor: float = 1.0
    aux_loss: AuxLoss = AuxLoss.none
    #: Factor of the balancing loss.
    aux_loss_coefficient: float = 0.0


@dataclass
class ModelConfig:
    """A decoder-only transformer of the Llama or DeepSeek-V2 family; every number as published."""

    #: The name of the choice; part of the run folder's name.
    name: str = MISSING
    #: Decoder layers.
    num_layers: int = MISSING
    #: Width of the residual stream, elements.
    hidden_size: int = MISSING
    #: Inner width of the gated feed-forward, elements; with `moe` that of the dense layers only.
    ffn_hidden_size: int = MISSING
    #: Query heads.
    num_attention_heads: int = MISSING
    #: Key and value heads (grouped-query attention); with `mla` as many as query heads.
    num_query_groups: int = MISSING
    #: Elements of one query or key head; with `mla` the sum of its two parts.
    head_dim: int = MISSING
    #: Rows of the embedding that the tokenizer uses; Megatron's padding is counted separately.
    vocab_size: int = MISSING
    #: Longest published sequence length, tokens.
    max_sequence_length: int = MISSING
    #: Added to the mean square in RMSNorm.
    norm_epsilon: float = 1.0e-5
    #: Base period of the rotary embedding.
    rotary_base: int = 10000
    #: Llama 3's frequency scaling; null means none.
    rope_scaling_factor: float | None = None
    #: Whether the output layer shares the embedding's weight.
    tie_embeddings: bool = False
    #: Standard deviation of the initial weights.
    init_std: float = 0.02
    #: Multi-head latent attention; null means grouped-query attention.
    mla: MlaConfig | None = None
    #: A mixture of experts; null means a feed-forward in every layer.
    moe: MoeConfig | None = None
    #: A published config.json, or its folder: sets all numbers above, unless they are given explicitly.
    from_hf: str | None = None
    #: Published initial weights, a folder of safetensors; null means random weights from the seed.
    init_from: str | None = None

"""The configuration of a model: Megatron-Core's numbers, and those of latent attention and experts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from quantexp.schema.missing import MISSING


class AuxLoss(Enum):
    """Over which tokens the load of a router's experts is balanced."""

    none = "none"
    #: Those of the micro-batch.
    batch = "batch"
    #: Those of each sequence by itself.
    sequence = "sequence"


@dataclass
class YarnConfig:
    """YaRN's scaling of rotary frequencies (arXiv 2309.00071) as DeepSeek-V2 has it; names as in its config.json.

    With m(x) = 0.1 x ln(factor) + 1, cosine and sine are multiplied by m(mscale) / m(mscale_all_dim) and the softmax
    scale by m(mscale_all_dim)^2.
    """

    #: How many times longer sequences may be.
    factor: float = MISSING
    #: Longest sequence before, tokens.
    original_length: int = MISSING
    #: Rotations over the original length from which a frequency stays as it is.
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
    #: null is plain rotary embedding.
    yarn: YarnConfig | None = None


@dataclass
class MoeConfig:
    """A mixture of experts in place of the feed-forward (arXiv 2405.04434, section 2.2)."""

    #: Routed experts of a layer.
    num_experts: int = MISSING
    #: Routed experts that a token goes to.
    top_k: int = MISSING
    #: Inner width of one expert, elements.
    expert_ffn_hidden_size: int = MISSING
    #: Experts that every token goes to; they are one feed-forward of so many times the width.
    num_shared_experts: int = 0
    #: The first layers, which have the plain feed-forward of `ffn_hidden_size`.
    num_dense_layers: int = 0
    #: Whether the weights of a token's experts are made to add up to 1.
    norm_topk_prob: bool = False
    #: What the weights are multiplied with; not together with norm_topk_prob.
    routed_scaling_factor: float = 1.0
    aux_loss: AuxLoss = AuxLoss.none
    #: Factor of the balancing loss.
    aux_loss_coefficient: float = 0.0


@dataclass
class ModelConfig:
    """A decoder-only transformer of the Llama or DeepSeek-V2 family; every number as published."""

    #: The choice's name; part of the run folder's name.
    name: str = MISSING
    #: Decoder layers.
    num_layers: int = MISSING
    #: Width of the residual stream, elements.
    hidden_size: int = MISSING
    #: Inner width of the gated feed-forward, elements; with `moe` of the dense layers' alone.
    ffn_hidden_size: int = MISSING
    #: Query heads.
    num_attention_heads: int = MISSING
    #: Key and value heads (grouped-query attention); with `mla` as many as query heads.
    num_query_groups: int = MISSING
    #: Elements of one query or key head; with `mla` the sum of its two parts.
    head_dim: int = MISSING
    #: Rows of the embedding that the tokenizer can name; Megatron's padding is counted apart.
    vocab_size: int = MISSING
    #: Longest sequence the model was published for, tokens.
    max_sequence_length: int = MISSING
    #: Added to the mean square in RMSNorm.
    norm_epsilon: float = 1.0e-5
    #: Base period of the rotary embedding.
    rotary_base: int = 10000
    #: Llama 3's frequency scaling; null is none.
    rope_scaling_factor: float | None = None
    #: Whether the output layer is the embedding.
    tie_embeddings: bool = False
    #: Standard deviation of the initial weights.
    init_std: float = 0.02
    #: Multi-head latent attention; null is grouped-query attention.
    mla: MlaConfig | None = None
    #: A mixture of experts; null is a feed-forward in every layer.
    moe: MoeConfig | None = None
    #: A published config.json, or the folder of one: all numbers above are its, unless they are given beside.
    from_hf: str | None = None
    #: Published weights to start with, a folder of safetensors; null is random weights of the seed.
    init_from: str | None = None

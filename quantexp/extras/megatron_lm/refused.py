"""Arguments of Megatron-LM that would bypass or defeat the scheme, refused by name before the model is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from quantexp.errors import ConfigError

#: Versions of megatron.core under which the loop has been run.
VERSIONS = ("0.15", "0.16", "0.17", "0.18", "0.19")
_NO_TE = "needs Transformer Engine's linear layers, and the scheme's are Megatron's own"
_QUANTISES_NOTHING = "quantises nothing in Megatron's own linear layers"
_FAMILY = "is in no family of models that quantexp describes"
_LAYOUT = "divides layers or ranks in a way that quantexp has not been run with"
_DROPS = "drops tokens, which quantexp's experts have not been run with"
_BATCHES = "changes the number of micro-batches, which a run folder records once"
_NOTHING = "trains nothing that could be proved"
_PACKS = "packs sequences, which the scheme's attention does not take"
_SHARDS = "divides parameters in a way that quantexp has not been run with"


class Refusal(NamedTuple):
    """An argument that the scheme does not go with."""

    argument: str
    why: str
    remedy: str = "drop it"


#: Refused where they are set at all; the parsed name is the argument's, unless `_PARSED` has it.
_SET = (
    Refusal("--fp8-format", _QUANTISES_NOTHING),
    Refusal("--fp4-format", _QUANTISES_NOTHING),
    Refusal("--fp8-output-proj", _QUANTISES_NOTHING),
    Refusal("--fp8-param-gather", _NO_TE),
    Refusal("--use-flash-attn", "chooses a kernel, and attention is the scheme's"),
    Refusal("--flash-attention-version", "chooses a kernel, and attention is the scheme's"),
    Refusal("--moe-grouped-gemm", "multiplies all experts at once, past the scheme's layers"),
    Refusal("--use-grouped-gemm-for-dense-mlp", _NO_TE),
    Refusal("--use-grouped-gemm-for-shared-expert", _NO_TE),
    Refusal("--use-transformer-engine-op-fuser", _NO_TE),
    Refusal("--mla-down-proj-fusion", _NO_TE),
    Refusal("--fused-residual-rmsnorm", _NO_TE),
    Refusal("--moe-paged-stash", _NO_TE),
    Refusal("--overlap-dispatch-backward-with-experts-wgrad", _NO_TE),
    Refusal("--use-kitchen", "quantises by itself"),
    Refusal("--tp-comm-overlap", _NO_TE),
    Refusal("--delay-wgrad-compute", _NO_TE),
    Refusal("--overlap-moe-expert-parallel-comm", _NO_TE),
    Refusal("--fine-grained-activation-offloading", _NO_TE),
    Refusal("--use-te-activation-func", _NO_TE),
    Refusal("--cuda-graph-impl", "replays products that no proof and no capture sees"),
    Refusal("--sft", _PACKS),
    Refusal("--dataloader-inter-document-masking", _PACKS),
    Refusal("--mtp-num-layers", "builds layers that --spec does not describe"),
    Refusal("--yaml-cfg", "replaces the arguments that the scheme's layers are built from"),
    Refusal("--qk-clip", "reads scores from Transformer Engine's attention"),
    Refusal("--log-max-attention-logit", "reads scores from Transformer Engine's attention"),
    Refusal("--skip-train", _NOTHING),
    Refusal("--freeze-all-layers", _NOTHING),
    Refusal("--logits-load-dir", "trains on another loss than the one that a run folder records"),
    Refusal("--window-size", _FAMILY),
    Refusal("--qk-l2-norm", _FAMILY),
    Refusal("--use-mup", _FAMILY),
    Refusal("--moe-mlp-glu-interleave-size", _FAMILY),
    Refusal("--moe-shared-expert-glu-interleave-size", _FAMILY),
    Refusal("--heterogeneous-layers-config-path", _FAMILY),
    Refusal("--experimental-attention-variant", _FAMILY),
    Refusal("--use-torch-fsdp2", _SHARDS),
    Refusal("--use-megatron-fsdp", _SHARDS),
    Refusal("--init-model-with-meta-device", _SHARDS),
    Refusal("--pipeline-model-parallel-layout", _LAYOUT),
    Refusal("--decoder-first-pipeline-num-layers", _LAYOUT),
    Refusal("--decoder-last-pipeline-num-layers", _LAYOUT),
    Refusal("--account-for-embedding-in-pipeline-split", _LAYOUT),
    Refusal("--account-for-loss-in-pipeline-split", _LAYOUT),
    Refusal("--use-tp-pp-dp-mapping", _LAYOUT),
    Refusal("--hierarchical-context-parallel-sizes", _LAYOUT),
    Refusal("--hybrid-context-parallel", _LAYOUT),
    Refusal("--moe-expert-capacity-factor", _DROPS),
    Refusal("--moe-expert-rank-capacity-factor", _DROPS),
    Refusal("--rampup-batch-size", _BATCHES),
    Refusal("--step-batch-size-schedule", _BATCHES),
    Refusal("--perform-rl-step", "trains by another loop"),
)
_PARSED = {"--fp8-format": "fp8", "--fp4-format": "fp4"}


def _is_set(args: Any, argument: str) -> bool:
    value = getattr(args, _PARSED.get(argument, argument[2:].replace("-", "_")), None)
    return getattr(value, "name", value) not in (None, False, "none")


def _is_dense_first(frequency: object) -> bool:
    """Whether all layers with experts follow all others."""
    is_list = isinstance(frequency, list) and sorted(frequency) == frequency and 1 in frequency
    return frequency == 1 or is_list


def _divides_shared(args: Any) -> bool:
    width = args.moe_ffn_hidden_size or args.ffn_hidden_size
    return not (args.moe_shared_expert_intermediate_size or 0) % width


#: What Megatron-LM makes of `--tensor-parallel-num-weight-shards`, for the decoder and for experts (0.19).
_GATHERED = ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")
#: Refused where the function says so.
_OF_LOOP: tuple[tuple[Callable[[Any], bool], Refusal], ...] = (
    (
        lambda args: args.gradient_accumulation_fusion,
        Refusal(
            "gradient accumulation fusion",
            "(on by default) multiplies the weight gradient itself, without the scheme's quantisation",
            "add --no-gradient-accumulation-fusion",
        ),
    ),
    (
        lambda args: _is_set(args, "--attention-backend") and _backend(args) != "auto",
        Refusal(
            "--attention-backend",
            "chooses a kernel of Transformer Engine, and attention is the scheme's",
        ),
    ),
    (
        lambda args: args.context_parallel_size > 1 and args.create_attention_mask_in_dataloader,
        Refusal(
            "--context-parallel-size",
            "needs attention without a mask from the data loader, which has a rank's rows alone",
            "add --no-create-attention-mask-in-dataloader",
        ),
    ),
    (
        lambda args: any(getattr(args, name, 1) != 1 for name in _GATHERED),
        Refusal(
            "--tensor-parallel-num-weight-shards, --expert-tensor-parallel-num-weight-shards",
            "gather weights for each product, which the scheme's layers do not",
            "leave them at the number of tensor-parallel ranks",
        ),
    ),
    (
        lambda args: getattr(args, "mlp_chunks_for_training", 1) != 1,
        Refusal(
            "--mlp-chunks-for-training",
            "multiplies a feed-forward in pieces, and the proof expects it whole",
        ),
    ),
)
#: The same for models.
_OF_MODEL: tuple[tuple[Callable[[Any], bool], Refusal], ...] = (
    (
        lambda args: not args.swiglu,
        Refusal("--swiglu", f"is missing: a feed-forward without a gate {_FAMILY}", "add --swiglu"),
    ),
    (
        lambda args: args.normalization != "RMSNorm",
        Refusal("--normalization", f"other than RMSNorm {_FAMILY}", "add --normalization RMSNorm"),
    ),
    (
        lambda args: args.add_bias_linear,
        Refusal(
            "--disable-bias-linear",
            f"is missing: a linear layer with a bias, but for qkv, {_FAMILY}",
            "add --disable-bias-linear, and --add-qkv-bias for Qwen2",
        ),
    ),
    (
        lambda args: args.position_embedding_type != "rope",
        Refusal(
            "--position-embedding-type",
            f"other than rope {_FAMILY}",
            "add --position-embedding-type rope",
        ),
    ),
    (
        lambda args: args.rotary_percent != 1.0,
        Refusal("--rotary-percent", f"other than 1.0 {_FAMILY}"),
    ),
    (
        lambda args: args.multi_latent_attention and not args.qk_layernorm,
        Refusal(
            "--qk-layernorm",
            f"is missing: latent attention without norms of its latents {_FAMILY}",
            "add --qk-layernorm",
        ),
    ),
    (
        lambda args: bool(args.num_experts) and not _is_dense_first(args.moe_layer_freq),
        Refusal(
            "--moe-layer-freq",
            "must be dense layers first and experts in all that follow, such as ([0]*1+[1]*26)",
            "choose such a pattern, or 1",
        ),
    ),
    (
        lambda args: bool(args.num_experts) and not _divides_shared(args),
        Refusal(
            "--moe-shared-expert-intermediate-size",
            "must be a multiple of --moe-ffn-hidden-size",
            "choose a multiple",
        ),
    ),
)


def _backend(args: Any) -> str:
    return str(getattr(args.attention_backend, "name", args.attention_backend))


def require_possible(args: Any, version: str) -> None:
    """Refuse a version, or an argument, with which the scheme would not be what runs.

    Raises:
        ConfigError: names the first one.
    """
    if not version.startswith(tuple(f"{each}." for each in VERSIONS)):
        raise ConfigError(
            f"quantexp.megatron_lm has been run with Megatron-LM {VERSIONS[0]} to {VERSIONS[-1]}, got {version}; "
            "check out one of these, such as core_v0.19.0"
        )
    for refusal in _applying(args):
        raise ConfigError(f"{refusal.argument} {refusal.why}; {refusal.remedy}")


def require_known_model(args: Any) -> None:
    """Refuse a model of none of quantexp's families.

    Raises:
        ConfigError: names the first argument.
    """
    for refusal in (
        *(each for applies, each in _OF_MODEL if applies(args)),
        *(each for each in _SET if each.why == _FAMILY and _is_set(args, each.argument)),
    ):
        raise ConfigError(f"{refusal.argument} {refusal.why}; {refusal.remedy}")


def _applying(args: Any) -> Iterator[Refusal]:
    yield from (refusal for applies, refusal in (*_OF_LOOP, *_OF_MODEL) if applies(args))
    yield from (refusal for refusal in _SET if _is_set(args, refusal.argument))


def refusals() -> list[Refusal]:
    """All of them."""
    return [*(refusal for _, refusal in (*_OF_LOOP, *_OF_MODEL)), *_SET]
